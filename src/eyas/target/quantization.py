"""How a target is quantized, from its config and from the tensors themselves."""

import re
from collections import Counter

from eyas.target.config_json import TargetConfig
from eyas.target.info import Quantization
from eyas.target.packing import Hints
from eyas.target.safetensors_files import Checkpoint
from eyas.target.values import Values, is_whole

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MARKS = ("weight_packed", "qweight", "weight_scale_inv", "weight_scale", "weight_scale_2", "blocks")


def quantization_config(config: TargetConfig) -> Values:
    """The outer `quantization_config` first, then the text config's (the order of vLLM); empty when there is none."""
    for level in reversed(config.levels):
        for key in ("quantization_config", "compression_config"):
            said = level.table(key)
            if said.items:
                return said
    return Values(config.file, "quantization_config", {})


def packing_hints(config: TargetConfig) -> Hints:
    """What only the config tells of packed weights: bits, block size, GPTQ's zero points."""
    said = quantization_config(config)
    block = _block(said, "weight_block_size")
    for weights in _group_weights(said):
        block = _block(weights, "block_structure") or block
    return Hints(
        bits=_method(said)[1] if said.items else 4,
        block=block,
        zero_offset=0 if said.items.get("checkpoint_format") == "gptq_v2" else 1,
    )


def _block(values: Values, key: str) -> tuple[int, int] | None:
    """Rows and columns; None where the config says none, or writes them otherwise ("128x128")."""
    if not isinstance(values.items.get(key), list):
        return None
    high, wide = values.entries(key, lambda v: is_whole(v) and v > 0, "a list of two positive integers", length=2)
    return high, wide


def _group_weights(said: Values) -> list[Values]:
    """The weights' schemes of compressed-tensors' groups; a group without one quantizes no weights."""
    groups = said.table("config_groups")
    schemes = [groups.table(name).table("weights") for name in groups.items]
    return [scheme for scheme in schemes if scheme.items]


def find_quantization(config: TargetConfig, checkpoint: Checkpoint) -> Quantization | None:
    """None for a plain checkpoint. What is quantized is counted from the tensors, never from the config's lists."""
    said = quantization_config(config)
    modules: dict[str, None] = {}
    for name in checkpoint.file_of:
        module, _, leaf = name.rpartition(".")
        if leaf in _MARKS or name.endswith("_blocks"):
            modules[module if leaf in _MARKS else name.removesuffix("_blocks")] = None
    if not said.items and not modules:
        return None
    method, bits = _method(said)
    kinds = Counter(_NUMBER.sub("*", module) for module in modules)
    return Quantization(method, bits, tuple(sorted(kinds)), len(modules))


def _method(said: Values) -> tuple[str, int]:
    name = (said.text("quant_method") or said.text("quant_algo") or "unknown").lower()
    if name in ("compressed-tensors", "compressed_tensors"):
        return _compressed_tensors(said)
    if name == "fp8":
        return ("fp8 block" if said.items.get("weight_block_size") else "fp8"), 8
    if name in ("awq", "gptq", "gptq_marlin", "awq_marlin"):
        bits = said.whole("bits") or said.whole("w_bit") or 4
        return f"{name.removesuffix('_marlin')} int{bits}", bits
    if name == "modelopt" or "nvfp4" in name:
        algo = (said.text("quant_algo") or said.table("quantization").text("quant_algo") or name).lower()
        return ("nvfp4", 4) if "fp4" in algo else (algo, 8)
    if name == "mxfp4":
        return "mxfp4", 4
    return name, said.whole("bits") or 8


def _compressed_tensors(said: Values) -> tuple[str, int]:
    weights = _group_weights(said)
    if not weights:
        return "compressed-tensors", 8
    bits, kind = weights[0].whole("num_bits") or 8, weights[0].text("type") or "int"
    if "nvfp4" in str(said.items.get("format")):
        return "compressed-tensors nvfp4", 4
    return f"compressed-tensors {'fp' if kind == 'float' else 'int'}{bits}", bits
