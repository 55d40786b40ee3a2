"""The target's embedding, head and final norm as float32 tensors, dequantized; strictly what resolve found."""

import numpy as np
import torch

from eyas.errors import InputError
from eyas.target.dequantize import unpack_rows
from eyas.target.info import TargetInfo, TensorRef
from eyas.target.safetensors_files import read_header

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


def load_embedding(info: TargetInfo) -> torch.Tensor:
    """The embedding, [vocab, hidden] float32, without `embedding_scale`."""
    return load_weight(info.embedding)


def load_head(info: TargetInfo, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The head, [vocab, hidden] float32, or only the token ids in `rows` (int64 [m]) -> [m, hidden]."""
    return load_weight(info.head, rows)


def load_final_norm(info: TargetInfo) -> torch.Tensor:
    """The final norm's stored weight, [hidden] float32; the model multiplies by 1 + it where `norm_plus_one`."""
    return load_weight(info.final_norm)


def load_weight(ref: TensorRef, rows: torch.Tensor | None = None) -> torch.Tensor:
    """One weight in float32, whole or some of its rows, of which only these are read from disk.

    Raises InputError when the file no longer holds what was resolved, or the values are not finite.
    """
    if rows is not None and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < ref.shape[0]:
        raise InputError(f"{ref.name} has {ref.shape[0]} rows, asked for {int(rows.min())} to {int(rows.max())}")
    stored = read_stored(ref, rows).float() if ref.packing is None else unpack_rows(ref, rows, read_stored)
    expected = (ref.shape[0] if rows is None else rows.numel(), *ref.shape[1:])
    if tuple(stored.shape) != expected:
        raise InputError(f"{ref.file}: {ref.name} has shape {list(stored.shape)}, {list(expected)} expected")
    if not bool(torch.isfinite(stored).all()):
        raise InputError(f"{ref.file}: {ref.name} holds values that are not finite", fix="download the file again")
    return stored


def read_stored(ref: TensorRef, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor as stored (a copy), or some of its first dimension; only their bytes are read."""
    header = read_header(ref.file)
    if ref.name not in header.tensors:
        raise InputError(f"{ref.file} no longer holds {ref.name}", fix="the checkpoint changed: start again")
    entry = header.tensors[ref.name]
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise InputError(f"{ref.file}: {ref.name} has dtype {entry['dtype']}, which eyas cannot read")
    start, end = header.data_range(ref.name)
    shape: list[int] = entry["shape"]
    if end == start:
        return torch.empty(shape, dtype=dtype)
    width = (end - start) // (shape[0] if shape else 1)
    data = np.memmap(ref.file, dtype=np.uint8, mode="r", offset=start, shape=(shape[0] if shape else 1, width))
    taken = np.array(data) if rows is None else data[rows.cpu().numpy()]
    lead = [] if not shape else [taken.shape[0]]
    return torch.from_numpy(taken).view(dtype).reshape([*lead, *shape[1:]])
