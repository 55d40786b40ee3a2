"""Rotary embedding parameters in the transformers-5 spelling, whichever way the config spells them."""

from typing import Any

from eyas.target.config_json import TargetConfig
from eyas.target.library_defaults import library_defaults
from eyas.target.values import Values, is_number

_FLAT_THETA = ("rope_theta", "rotary_emb_base", "rotary_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct")
# What each type cannot do without. The types are those of transformers, of vLLM, and of checkpoints' own code.
_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "ntk": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
    "deepseek_yarn": ("factor",),
    "deepseek_llama_scaling": ("factor",),
    "telechat3-yarn": ("factor",),
    "proportional": (), "axial": (), "mrope": (), "bailing_mrope": (), "mllama4": (), "openpangu": (), "xdrope": (),
}  # fmt: skip
_POSITIVE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "alpha")
_NUMBERS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
_LISTS = ("short_factor", "long_factor")


def rope_parameters(config: TargetConfig) -> tuple[dict[str, Any], list[str]]:
    """`{rope_type, rope_theta, ...}` of the full-attention layers (plain rope for a model that says nothing), and a
    note where the config contradicts itself.

    Old spelling: `rope_theta`, `partial_rotary_factor` and `rope_scaling` (with `type` or `rope_type`) beside each
    other.
    New: `rope_parameters`, for each layer type where they differ (Gemma 3).
    As in transformers, `rope_scaling` takes the place of `rope_parameters`, and a value in either wins over one beside
    them. Raises InputError naming the key of a value that cannot be.
    """
    flat = config.values
    old, new = flat.table("rope_scaling"), flat.table("rope_parameters")
    said = old if old.items else new if new.items else Values(config.file, "rope_parameters", _defaults(config))
    values = _of_full_attention(said)
    found = _checked(values)
    notes: list[str] = []
    outside = {
        "rope_theta": _theta(config),
        "partial_rotary_factor": _first(flat, _PARTIAL, at_most=1.0),
    }
    for key, value in outside.items():
        if value is not None and found.setdefault(key, value) != value:
            notes.append(
                f"config.json says {key} {value:g} and, in {values.place}, {found[key]:g}: the second counts, as in "
                "transformers"
            )
    if "rope_theta" not in found:
        theta = library_defaults(config.model_type).get("default_theta") or 10000.0
        found["rope_theta"] = (
            theta.get("full_attention", theta.get("global", 10000.0)) if isinstance(theta, dict) else theta
        )
    return {"rope_type": found.pop("rope_type"), "rope_theta": float(found.pop("rope_theta")), **found}, notes


def _defaults(config: TargetConfig) -> dict[str, Any]:
    """What the installed class has where the config says nothing."""
    default = library_defaults(config.model_type).get("rope_parameters")
    return default if isinstance(default, dict) else {}


def _of_full_attention(values: Values) -> Values:
    """An object of objects is keyed by layer type."""
    kinds = values.tables()
    return (kinds.get("full_attention") or next(iter(kinds.values()))) if kinds else values


def _checked(values: Values) -> dict[str, Any]:
    """The values without those that are null, and the type as `rope_type`."""
    key = "rope_type" if values.items.get("rope_type") is not None else "type"
    kind = values.text(key, tuple(_NEEDS)) or "default"
    for name in _LISTS:
        values.entries(name, is_number, "a list of numbers")
    for name in _POSITIVE:
        values.number(name, above=0)
    for name in _NUMBERS:
        values.number(name)
    values.number("rope_theta", above=0)
    values.number("partial_rotary_factor", above=0, at_most=1)
    needs = _NEEDS[kind]
    if kind == "dynamic" and values.items.get("alpha") is None:
        needs = ("factor",)
    for name in needs:
        if values.items.get(name) is None:
            expected = "a list of numbers" if name in _LISTS else "a number"
            raise values.wrong(name, f"{expected} (rope type {kind!r} needs it)")
    found = {name: value for name, value in values.items.items() if value is not None and name != "type"}
    found["rope_type"] = {"mrope": "default", "su": "longrope"}.get(kind, kind)  # old names
    return found


def _theta(config: TargetConfig) -> float | None:
    """The base beside the rope's other parameters: one number, or one for each layer (Step, Granite)."""
    flat = config.values
    theta = flat.items.get("rope_theta")
    if not isinstance(theta, list):
        return _first(flat, _FLAT_THETA)
    layers = config.size("num_hidden_layers")
    expected = f"a finite number above 0, or a list of one for each of the {layers} layers,"
    theta = flat.entries("rope_theta", lambda v: is_number(v) and v > 0, expected)
    if len(theta) < layers:
        raise flat.wrong("rope_theta", expected)
    types = config.find("layer_types") or []
    full = [base for base, kind in zip(theta, types, strict=False) if kind == "full_attention"]
    return float((full or theta)[0])


def _first(values: Values, names: tuple[str, ...], *, at_most: float = float("inf")) -> float | None:
    found = [value for name in names if (value := values.number(name, above=0, at_most=at_most)) is not None]
    return found[0] if found else None
