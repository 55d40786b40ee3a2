"""Quantized weights to float32, where the format allows it only the rows that were asked for.

Shapes: o = outputs (rows of the weight), i = inputs, g = groups of inputs that share a scale, w = packed words.
"""

from collections.abc import Callable

import torch

from eyas.errors import InputError
from eyas.target.info import Packing, TensorRef

Read = Callable[[TensorRef, torch.Tensor | None], torch.Tensor]

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ keeps output 8 k + c of word k


def unpack_rows(ref: TensorRef, rows: torch.Tensor | None, read: Read) -> torch.Tensor:
    """The quantized weight `ref` in float32: [o, i], or the `rows` asked for; `read(part, rows)` gives stored tensors.

    Raises InputError when the stored parts do not fit each other.
    """
    packing = ref.packing
    if packing is None:
        raise ValueError(f"{ref.name} is stored plainly")
    if packing.kind == "scaled":
        return _scaled(ref, packing, rows, read)
    if packing.kind == "pack-quantized":
        return _pack_quantized(ref, packing, rows, read)
    if packing.kind == "nvfp4":
        return _nvfp4(ref, packing, rows, read)
    whole = _awq(packing, read) if packing.kind == "awq" else _gptq(packing, read)
    return whole.t()[_index(rows)].contiguous()


def _scaled(ref: TensorRef, packing: Packing, rows: torch.Tensor | None, read: Read) -> torch.Tensor:
    """fp8 or int8 values times one scale for the tensor, for each row, or for each block."""
    name = "weight_scale_inv" if "weight_scale_inv" in packing.parts else "weight_scale"
    scale = read(packing.parts[name], None).float()
    values = read(packing.parts["weight"], rows).float()
    outputs, inputs = ref.shape
    if scale.numel() == 1:
        return values * scale.reshape(())
    if scale.shape in ((outputs,), (outputs, 1)):
        return values * scale.reshape(outputs, 1)[_index(rows)]
    high, wide = packing.block or (128, 128)
    if tuple(scale.shape) != (-(-outputs // high), -(-inputs // wide)):
        raise InputError(
            f"{ref.file}: {packing.parts[name].name} has shape {list(scale.shape)}, which is no scale of "
            f"{list(ref.shape)} "
            f"for the tensor, its rows or its blocks of {high} x {wide}",
            fix="check weight_block_size in config.json",
        )
    chosen = torch.arange(outputs) if rows is None else rows
    of_row = scale[chosen // high]
    return values * of_row.repeat_interleave(wide, dim=1)[:, :inputs]


def _pack_quantized(ref: TensorRef, packing: Packing, rows: torch.Tensor | None, read: Read) -> torch.Tensor:
    """compressed-tensors: signed values with an offset, the inputs packed into words, lowest bits first."""
    parts, bits = packing.parts, packing.bits
    half = 1 << (bits - 1)
    values = _unpack(read(parts["weight_packed"], rows), bits).float() - half
    scale = read(parts["weight_scale"], rows).float()
    of_input = _group_of_input(ref, scale.shape[1], parts.get("weight_g_idx"), read)
    if "weight_zero_point" in parts:  # packed along the outputs: word k holds outputs 8 k to 8 k + 7
        zero = _unpack(read(parts["weight_zero_point"], None).t().contiguous(), bits).t()[: ref.shape[0]]
        values = values - (zero[_index(rows)].float() - half)[:, of_input]
    return values * scale[:, of_input]


def _nvfp4(ref: TensorRef, packing: Packing, rows: torch.Tensor | None, read: Read) -> torch.Tensor:
    """Two 4-bit floats a byte, low nibble first; fp8 scales for 16 inputs; one float32 scale for the tensor."""
    parts = packing.parts
    stored = read(parts["weight_packed"] if "weight_packed" in parts else parts["weight"], rows)
    values = _FP4[torch.stack([stored & 15, stored >> 4], dim=-1).reshape(stored.shape[0], -1).long()]
    scale = read(parts["weight_scale"], rows).float()
    if "weight_scale_2" in parts:
        scale = scale * read(parts["weight_scale_2"], None).float().reshape(())
    else:
        scale = scale / read(parts["weight_global_scale"], None).float().reshape(())
    return values * scale.repeat_interleave(ref.shape[1] // scale.shape[1], dim=1)


def _awq(packing: Packing, read: Read) -> torch.Tensor:
    """[i, o]"""
    parts = packing.parts

    def outputs(words: torch.Tensor) -> torch.Tensor:
        nibbles = _unpack(words, packing.bits).reshape(words.shape[0], -1, 8)
        return nibbles[..., list(_AWQ_NIBBLE)].reshape(words.shape[0], -1)

    if packing.bits != 4:
        raise InputError(f"{parts['qweight'].name}: AWQ with {packing.bits} bits is unknown, 4 expected")
    values = outputs(read(parts["qweight"], None))
    zeros, scales = outputs(read(parts["qzeros"], None)), read(parts["scales"], None).float()
    group = values.shape[0] // scales.shape[0]
    of_input = torch.arange(values.shape[0]) // group
    return (values - zeros[of_input]).float() * scales[of_input]


def _gptq(packing: Packing, read: Read) -> torch.Tensor:
    """[i, o]"""
    parts = packing.parts
    values = _unpack(read(parts["qweight"], None).t().contiguous(), packing.bits).t()
    zeros = _unpack(read(parts["qzeros"], None), packing.bits) + packing.zero_offset
    scales = read(parts["scales"], None).float()
    if "g_idx" in parts:
        of_input = read(parts["g_idx"], None).long()
    else:
        of_input = torch.arange(values.shape[0]) // (values.shape[0] // scales.shape[0])
    return (values - zeros[of_input]).float() * scales[of_input]


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, w] -> unsigned values, int64 [n, w * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).reshape(words.shape[0], -1)


def _group_of_input(ref: TensorRef, groups: int, g_idx: TensorRef | None, read: Read) -> torch.Tensor:
    """The group of each input, int64 [i]."""
    if g_idx is not None:
        return read(g_idx, None).long()
    inputs = ref.shape[1]
    if inputs % groups:
        raise InputError(
            f"{ref.file}: {ref.name} has {inputs} inputs in {groups} groups", fix="download the file again"
        )
    return torch.arange(inputs) // (inputs // groups)


def _index(rows: torch.Tensor | None) -> torch.Tensor | slice:
    return slice(None) if rows is None else rows
