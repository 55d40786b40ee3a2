"""Whether the drafter that `draft.from` names is one to start from, by config.json and the weights' header alone.

Names and shapes of weights do not tell how they are used: a drafter that rotates by another base fits, and starts as
noise. Needs no torch.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.draft.rope import draft_rope, spelled_out
from eyas.draft.sizes import aux_layers, layer_sizes, norm_options, weight_shapes
from eyas.errors import InputError
from eyas.recipe import DraftPart
from eyas.target.config_json import TargetConfig, read_json_object
from eyas.target.info import TargetInfo
from eyas.target.rope import rope_parameters
from eyas.target.safetensors_files import read_header
from eyas.target.values import Values

WEIGHTS = "model.safetensors"
OTHER_DRAFTER = "start from a drafter of such a target, or leave draft.from out"
_NOT_A_TARGET = "name the directory of a drafter, e.g. RUN_DIR/drafter/vllm, or leave draft.from out"
_FLOATS = ("F64", "F32", "F16", "BF16")
_LAYER_NAMES = ("layers.", "fc.", "fc_norm.", "input_norm.")
"""of weights that a drafter's output depends on; others are the target's (embed_tokens) or no weights (d2t)"""


def start_problems(start: Path, target: TargetInfo, part: DraftPart) -> list[InputError]:
    """Why the recipe's drafter for `target` cannot start from the one in `start`; the recipe's sizes are sound."""
    try:
        return _problems(start, target, part)
    except InputError as e:  # of a file that cannot be read: it knows the file, not who named it
        return [InputError(f"draft.from: {e.message}", fix=f"{e.fix}, or leave draft.from out")]


def _problems(start: Path, target: TargetInfo, part: DraftPart) -> list[InputError]:
    outer = read_json_object(start / "config.json")
    if outer is None or not (start / WEIGHTS).is_file():
        return [InputError(f"draft.from: {start} holds no drafter (config.json, {WEIGHTS})", fix=_NOT_A_TARGET)]
    header = read_header(start / WEIGHTS)
    tensors = {speculators_name(name): header.entry(name) for name in header.tensors}
    shapes = {name: entry["shape"] for name, entry in tensors.items()}
    sizes, norms, hidden = layer_sizes(target, part), norm_options(part), target.hidden_size
    wanted = weight_shapes(hidden, sizes, norms, layers=part.layers, aux=len(aux_layers(target, part)))
    if "fc.weight" not in shapes:
        return weight_misfits(start / WEIGHTS, shapes, wanted)
    found = [
        *_flag_problems(Values(start / "config.json", "", outer), part),
        *_layer_problems(start, outer, target, part),
    ]
    packed = [f"{name} is {tensors[name]['dtype']}" for name in wanted if name in tensors]
    packed = [said for said in packed if not said.endswith(tuple(f" {kind}" for kind in _FLOATS))]
    if packed:
        said = (
            f"draft.from: {start / WEIGHTS} is quantized: {'; '.join(packed[:4])}, one of {', '.join(_FLOATS)} expected"
        )
        found.append(InputError(said, fix="name the drafter that it was made from"))
    return found or weight_misfits(start / WEIGHTS, shapes, wanted)


def weight_misfits(
    weights: Path, found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]
) -> list[InputError]:
    """What is wrong with the shapes `found` in a file, by speculators' names, where `wanted` are to be taken over."""
    if "fc.weight" not in found:
        about = (read_json_object(weights.parent / "config.json") or {}).get("architectures")
        told = f" (architectures: {', '.join(map(str, about))})" if isinstance(about, list) and about else ""
        return [
            InputError(f"draft.from: {weights.parent} holds no EAGLE-3 drafter: no fc.weight{told}", fix=_NOT_A_TARGET)
        ]
    wrong = [
        f"{name} is {'missing' if name not in found else list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name not in found or list(found[name]) != list(shape)
    ]
    more = [name for name in found if name.startswith(_LAYER_NAMES) and name not in wanted and "rotary_emb" not in name]
    wrong += [f"{name} is not part of the recipe's drafter" for name in more]
    if not wrong:
        return []
    return [
        InputError(
            f"draft.from: {weights} does not fit the recipe: {'; '.join(wrong[:4])}",
            fix="set draft.preset, draft.layers, draft.aux_layers and the head sizes to that drafter's",
        )
    ]


def speculators_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _flag_problems(config: Values, part: DraftPart) -> list[InputError]:
    """Where norms stand. Absent: false, to speculators' class and to the engines."""
    norms = norm_options(part)
    wanted = {
        "norm_before_residual": norms.norm_before_residual,
        "norm_before_fc": norms.norm_before_fc,
        "norm_output": norms.norm_output,
        "fc_norm": norms.fc_norm,
    }
    is_ = {key: bool(config.flag(key)) for key in wanted}
    preset = {(False, False): "eagle3", (True, True): "eagle3.1"}.get((is_["norm_before_fc"], is_["norm_output"]))
    found: list[InputError] = []
    for key, value in wanted.items():
        if is_[key] == value:
            continue
        fix = OTHER_DRAFTER.replace("of such a target", "without it" if is_[key] else "with it")
        if key == "norm_before_residual":
            fix = f"set draft.norm_before_residual: {str(is_[key]).lower()}"
        elif key != "fc_norm" and preset is not None:
            fix = f"set draft.preset: {preset}"
        found.append(
            InputError(
                f"draft.from: {config.file} has {key} {str(is_[key]).lower()}, "
                f"the recipe's drafter {str(value).lower()}",
                fix=fix,
            )
        )
    return found


def _layer_problems(start: Path, outer: dict[str, Any], target: TargetInfo, part: DraftPart) -> list[InputError]:
    """The decoder layer's config: beside the other keys (vLLM), or an object of its own (speculators).

    Sizes that it does not say are left to the weights' shapes; norm and rope have the class's defaults.
    """
    file, nested = start / "config.json", "transformer_layer_config"
    inner = Values(file, "", outer).table(nested).items
    layer = TargetConfig(file, outer, inner or outer, (nested,) if inner else ())
    sizes, found = layer_sizes(target, part), []

    def differs(key: str, is_: Any, wanted: Any, fix: str, *, said: bool = True) -> None:
        default = "" if said else " (absent: the default)"
        if not said:
            fix += "; if it was trained otherwise all the same, write that into its config.json"
        found.append(
            InputError(f"draft.from: {file}: {key} is {is_}{default}, the recipe's drafter has {wanted}", fix=fix)
        )

    for key, wanted, fix in (
        ("hidden_size", target.hidden_size, OTHER_DRAFTER),
        ("num_attention_heads", sizes.heads, "set draft.attention_heads: {}"),
        ("num_key_value_heads", sizes.key_value_heads, "set draft.key_value_heads: {}"),
        ("head_dim", sizes.head_dim, "set draft.head_dim: {}"),
        ("intermediate_size", sizes.intermediate_size, "set draft.intermediate_size: {}"),
    ):
        is_ = layer.whole(key) if layer.says(key) else None
        if is_ not in (None, wanted):
            differs(key, is_, wanted, fix.format(is_))
    eps = layer.number("norm_eps", above=0)
    if eps is not None and not _same(eps, target.rms_norm_eps):
        differs("rms_norm_eps", eps, target.rms_norm_eps, OTHER_DRAFTER, said=layer.says("norm_eps"))
    positions = layer.whole("max_position_embeddings") or target.max_position_embeddings
    is_rope = spelled_out(rope_parameters(layer)[0], positions)
    rope = spelled_out(draft_rope(target.rope_parameters), target.max_position_embeddings)
    keys = rope.keys() if is_rope["rope_type"] == rope["rope_type"] else ["rope_type", "rope_theta"]
    place = next((k for k in ("rope_scaling", "rope_parameters") if isinstance(layer.text.get(k), dict)), None)
    for key in keys:
        if not _same(is_rope[key], rope[key]):
            said = key in layer.text or (place is not None and (key in layer.text[place] or key == "rope_type"))
            differs(key, is_rope[key], rope[key], OTHER_DRAFTER, said=said)
    return found


def _same(a: Any, b: Any) -> bool:
    """A number that went through float32 is the same number."""
    both = isinstance(a, int | float) and isinstance(b, int | float)
    return math.isclose(a, b, rel_tol=1e-6) if both else bool(a == b)
