"""How a target is quantized, from its config and from the tensors themselves."""

import re
from collections import Counter
from typing import Any

from eyas.target.config_json import TargetConfig
from eyas.target.info import Quantization
from eyas.target.packing import Hints
from eyas.target.safetensors_files import Checkpoint

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MARKS = ("weight_packed", "qweight", "weight_scale_inv", "weight_scale", "weight_scale_2", "blocks")


def quantization_config(config: TargetConfig) -> dict[str, Any]:
    """The outer `quantization_config` first, then the text config's (the order of vLLM); empty when there is none."""
    for level in (config.outer, config.text):
        for key in ("quantization_config", "compression_config"):
            if isinstance(level.get(key), dict):
                return dict(level[key])
    return {}


def packing_hints(config: TargetConfig) -> Hints:
    """What only the config tells of packed weights: bits, block size, GPTQ's zero points."""
    said = quantization_config(config)
    block = said.get("weight_block_size")
    groups = [g.get("weights") for g in (said.get("config_groups") or {}).values() if isinstance(g, dict)]
    for weights in groups:
        if isinstance(weights, dict) and weights.get("block_structure"):
            block = weights["block_structure"]
    return Hints(
        bits=_method(said)[1] if said else 4,
        block=(int(block[0]), int(block[1])) if isinstance(block, list) and len(block) == 2 else None,
        zero_offset=0 if said.get("checkpoint_format") == "gptq_v2" else 1,
    )


def find_quantization(config: TargetConfig, checkpoint: Checkpoint) -> Quantization | None:
    """None for a plain checkpoint. What is quantized is counted from the tensors, never from the config's lists."""
    said = quantization_config(config)
    modules: dict[str, None] = {}
    for name in checkpoint.file_of:
        module, _, leaf = name.rpartition(".")
        if leaf in _MARKS or name.endswith("_blocks"):
            modules[module if leaf in _MARKS else name.removesuffix("_blocks")] = None
    if not said and not modules:
        return None
    method, bits = _method(said)
    kinds = Counter(_NUMBER.sub("*", module) for module in modules)
    return Quantization(method, bits, tuple(sorted(kinds)), len(modules))


def _method(said: dict[str, Any]) -> tuple[str, int]:
    name = str(said.get("quant_method") or said.get("quant_algo") or "unknown").lower()
    if name in ("compressed-tensors", "compressed_tensors"):
        return _compressed_tensors(said)
    if name == "fp8":
        return ("fp8 block" if said.get("weight_block_size") else "fp8"), 8
    if name in ("awq", "gptq", "gptq_marlin", "awq_marlin"):
        bits = int(said.get("bits") or said.get("w_bit") or 4)
        return f"{name.removesuffix('_marlin')} int{bits}", bits
    if name == "modelopt" or "nvfp4" in name:
        algo = str(said.get("quant_algo") or said.get("quantization", {}).get("quant_algo") or name).lower()
        return ("nvfp4", 4) if "fp4" in algo else (algo, 8)
    if name == "mxfp4":
        return "mxfp4", 4
    return name, int(said.get("bits") or 8)


def _compressed_tensors(said: dict[str, Any]) -> tuple[str, int]:
    groups = [g for g in (said.get("config_groups") or {}).values() if isinstance(g, dict)]
    weights = [g["weights"] for g in groups if isinstance(g.get("weights"), dict)]
    if not weights:
        return "compressed-tensors", 8
    bits, kind = int(weights[0].get("num_bits") or 8), str(weights[0].get("type") or "int")
    if "nvfp4" in str(said.get("format")):
        return "compressed-tensors nvfp4", 4
    return f"compressed-tensors {'fp' if kind == 'float' else 'int'}{bits}", bits
