"""Whether the decoder layers are whole: a layer that lacks a tensor, or has it in another shape, runs on noise.

Only headers are read. Layers may differ by design (dense and expert layers, hybrid layers, layers without attention,
quantized and plain ones): told is only what few layers lack and most others, alike in everything else, have.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from eyas.errors import InputError
from eyas.target.config_json import TargetConfig
from eyas.target.roles import LAYER, number_ranges
from eyas.target.safetensors_files import Checkpoint

_MOST_MODULES = 3  # a whole attention or feed-forward block may be left out by design
_WEIGHTS = ("weight", "weight_packed", "qweight")
_AUXILIARY = re.compile(r"(scale|scales|scale_inv|scale_2|zero_point|inv_freq|qzeros|g_idx)$")
_EXPERT = re.compile(r"(?<=\.)\d+(?=\.)")
_PLAIN = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_VARYING = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim", "block_configs")

Layers = list[set[str]]


def check_layers(
    config: TargetConfig, checkpoint: Checkpoint, trunk: str, layers: int, types: tuple[str, ...]
) -> list[str]:
    """Notes on the layers of `trunk`, which are of the kinds `types` where the config tells. Raises InputError naming
    the tensors that a layer lacks or has in another shape."""
    tensors: list[dict[str, str]] = [{} for _ in range(layers)]
    beyond: set[int] = set()
    for name in checkpoint.file_of:
        match = LAYER.match(name)
        if match and match[1] == trunk:
            number = int(match[3])
            if number < layers:
                tensors[number][name[match.end() :]] = name
            else:
                beyond.add(number)
    _refuse_lacking(checkpoint, trunk, [_modules(own) for own in tensors])
    if not any(isinstance(config.find(field), list) for field in _VARYING):
        _refuse_odd_shapes(checkpoint, tensors, types or ("",) * layers)
    if len(beyond) > (config.whole("num_nextn_predict_layers", low=0) or 0):
        ranges = number_ranges(beyond)
        return [f"config.json says num_hidden_layers {layers}, the checkpoint has also layer {ranges}: it is not used"]
    return []


def _modules(names: Iterable[str]) -> set[str]:
    """What a layer consists of: modules with a weight (however it is stored), biases, and parameters of their own."""
    parted = [name.rpartition(".") for name in names]
    weighted = {module for module, _, leaf in parted if leaf in _WEIGHTS}
    own = {
        f"{module}{dot}{leaf}"
        for module, dot, leaf in parted
        if leaf == "bias" or (module not in weighted and not _AUXILIARY.search(leaf))
    }
    return weighted | own


def _refuse_lacking(checkpoint: Checkpoint, trunk: str, layers: Layers) -> None:
    few = max(1, len(layers) // 8)
    kinds = Counter(frozenset(own) for own in layers)
    for number, own in enumerate(layers):
        if kinds[frozenset(own)] > few:
            continue
        for kind, count in kinds.items():
            lacking = kind - own
            blocks = {_EXPERT.sub("*", name) for name in lacking}
            alike = own < kind and len(blocks) <= _MOST_MODULES and 2 * len(lacking) <= len(kind)
            others = sum(n for k, n in kinds.items() if k >= own and k != own)
            if alike and count > kinds[frozenset(own)] and 2 * count >= others:
                raise InputError(
                    f"{checkpoint.path}: layer {number} ({trunk or 'top level'}) lacks {_some(lacking)}, which {count} "
                    "layers, alike in everything else, have",
                    fix="complete the checkpoint: download it again, or repeat the merge that wrote it",
                )


def _refuse_odd_shapes(checkpoint: Checkpoint, tensors: list[dict[str, str]], types: tuple[str, ...]) -> None:
    few = max(1, len(tensors) // 10)
    shapes: dict[tuple[str, str, str], dict[tuple[int, ...], list[tuple[int, str]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    entries = checkpoint.weight_entries()
    for number, own in enumerate(tensors):
        for key, name, entry in _plain(entries, own):
            shapes[types[number], key, entry["dtype"]][tuple(entry["shape"])].append((number, name))
    for found in shapes.values():
        if len(found) < 2:
            continue
        usual, holders = max(found.items(), key=lambda item: len(item[1]))
        total = sum(map(len, found.values()))
        for shape, places in found.items():
            numbers = {number for number, _ in places}
            if shape != usual and len(numbers) <= few and 4 * len(holders) >= 3 * (total - len(places) + 1):
                raise InputError(
                    f"{checkpoint.path / checkpoint.file_of[places[0][1]]}: {places[0][1]} has shape {list(shape)}, "
                    f"{list(usual)} expected, as in layer {number_ranges({number for number, _ in holders})}",
                    fix="the weights are damaged or of another model: download the checkpoint again",
                )


def _plain(entries: dict[str, dict[str, Any]], own: dict[str, str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name within the layer (experts alike), whole name and header entry of the tensors that are stored plainly."""
    for rest, name in own.items():
        entry = entries.get(name)
        if entry is not None and entry["dtype"] in _PLAIN:
            yield _EXPERT.sub("*", rest), name, entry


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")
