"""Rotary embedding parameters in the transformers-5 spelling, whichever way the config spells them."""

from typing import Any

from eyas.target.config_json import TargetConfig
from eyas.target.library_defaults import library_defaults

_FLAT_THETA = ("rope_theta", "rotary_emb_base", "rotary_base")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rope_pct")


def rope_parameters(config: TargetConfig) -> dict[str, Any]:
    """`{rope_type, rope_theta, ...}` of the full-attention layers; plain rope for a model that says nothing.

    Old spelling: `rope_theta`, `partial_rotary_factor` and `rope_scaling` (with `type` or `rope_type`) beside each
    other.
    New: `rope_parameters`, for each layer type where they differ (Gemma 3).
    """
    new = config.find("rope_parameters")
    found: dict[str, Any] = {}
    if isinstance(new, dict) and new:
        # A dict of dicts is keyed by layer type.
        nested = {k: v for k, v in new.items() if isinstance(v, dict)}
        found = dict(nested.get("full_attention") or next(iter(nested.values())) if nested else new)
    old = config.text.get("rope_scaling")
    if isinstance(old, dict):
        old = old.get("full_attention", old)
        found = {**found, **{k: v for k, v in old.items() if v is not None}}
    for key in _FLAT_THETA:
        if config.text.get(key) is not None:
            found["rope_theta"] = config.text[key]
            break
    for key in _PARTIAL:
        if config.text.get(key) is not None:
            found["partial_rotary_factor"] = config.text[key]
            break
    if "type" in found:
        kind = found.pop("type")
        found.setdefault("rope_type", kind)
    found.setdefault("rope_type", "default")
    if found["rope_type"] == "mrope":  # Qwen2-VL's old name for plain rope with sections
        found["rope_type"] = "default"
    if found.get("rope_theta") is None:
        theta = library_defaults(config.model_type).get("default_theta") or 10000.0
        found["rope_theta"] = (
            theta.get("full_attention", theta.get("global", 10000.0)) if isinstance(theta, dict) else theta
        )
    found["rope_theta"] = float(found["rope_theta"])
    return {"rope_type": found.pop("rope_type"), "rope_theta": found.pop("rope_theta"), **found}
