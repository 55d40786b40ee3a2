"""A module's weight whatever way it is stored: plain, fp8 with scales, or packed; its logical shape from headers."""

from dataclasses import dataclass

from eyas.errors import InputError
from eyas.target.info import Packing, PackingKind, TensorRef
from eyas.target.safetensors_files import Checkpoint

_PLAIN = ("F64", "F32", "F16", "BF16")
_LOW = ("F8_E4M3", "F8_E5M2", "I8")
_SUFFIXES = (
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_shape",
    "weight_zero_point", "weight_global_scale", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip


@dataclass(frozen=True)
class Hints:
    """What only the quantization config tells of packed tensors."""

    bits: int = 4
    block: tuple[int, int] | None = None
    zero_offset: int = 1
    """GPTQ stores its zero points less 1; its version 2 does not"""


def weight_ref(checkpoint: Checkpoint, module: str, hints: Hints) -> TensorRef | None:
    """The weight of `module` ([out, in], or [n] for a norm); None when it has none or one of an unknown packing.

    Raises InputError for a low-precision weight without its scales.
    """
    parts = {s: checkpoint.ref(f"{module}.{s}") for s in _SUFFIXES if f"{module}.{s}" in checkpoint}
    if "weight" in parts:
        return _one_tensor(parts, hints)
    if "weight_packed" in parts:
        return _compressed_tensors(parts, hints)
    if "qweight" in parts and "scales" in parts and "qzeros" in parts:
        return _awq_or_gptq(parts, hints)
    return None


def _one_tensor(parts: dict[str, TensorRef], hints: Hints) -> TensorRef | None:
    weight = parts["weight"]
    if weight.dtype in _PLAIN:
        return weight
    if len(weight.shape) != 2:
        return None
    rows, width = weight.shape
    if weight.dtype in _LOW:
        if "weight_scale" not in parts and "weight_scale_inv" not in parts:
            raise InputError(
                f"{weight.file}: {weight.name} is {weight.dtype} and has no weight_scale beside it",
                fix="check that the checkpoint is complete",
            )
        return _packed(weight, "scaled", weight.shape, parts, Hints(8, hints.block))
    if weight.dtype in ("U8", "F4") and "weight_scale" in parts and "weight_scale_2" in parts:
        return _packed(weight, "nvfp4", (rows, width * (2 if weight.dtype == "U8" else 1)), parts, hints)
    return None


def _compressed_tensors(parts: dict[str, TensorRef], hints: Hints) -> TensorRef | None:
    packed = parts["weight_packed"]
    if len(packed.shape) != 2 or "weight_scale" not in parts:
        return None
    rows, words = packed.shape
    if packed.dtype == "U8" and "weight_global_scale" in parts:
        return _packed(packed, "nvfp4", (rows, words * 2), parts, hints)
    if packed.dtype != "I32":
        return None
    return _packed(packed, "pack-quantized", (rows, words * (32 // hints.bits)), parts, hints)


def _awq_or_gptq(parts: dict[str, TensorRef], hints: Hints) -> TensorRef | None:
    qweight, scales = parts["qweight"], parts["scales"]
    if len(qweight.shape) != 2 or len(scales.shape) != 2 or qweight.dtype != "I32":
        return None
    out, in_word = scales.shape[1], 32 // hints.bits
    if qweight.shape[1] == out:  # several inputs in a word
        return _packed(qweight, "gptq", (out, qweight.shape[0] * in_word), parts, hints)
    if qweight.shape[1] * in_word == out:  # several outputs in a word
        return _packed(qweight, "awq", (out, qweight.shape[0]), parts, hints)
    return None


def _packed(
    stored: TensorRef, kind: PackingKind, shape: tuple[int, ...], parts: dict[str, TensorRef], hints: Hints
) -> TensorRef:
    packing = Packing(kind, hints.bits, hints.block, hints.zero_offset, parts)
    return TensorRef(stored.name, stored.file, shape, stored.dtype, packing)
