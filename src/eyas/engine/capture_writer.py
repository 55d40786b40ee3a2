"""Writes shards of captured states (format: eyas.states.shard). Standard library and numpy alone."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eyas.engine.capture_ring import Bits


@dataclass(frozen=True)
class Entry:
    """One sample. states: pieces [rows_j, layers * hidden] that make up its rows; tokens [rows + 1] int32."""

    request: str
    prompt: int
    tokens: npt.NDArray[np.int32]
    states: Sequence[Bits]
    missing_rows: int
    bad_rows: int

    @property
    def rows(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, in pieces along its first dimension. dtype: safetensors' name."""

    dtype: str
    shape: list[int]
    pieces: Sequence[npt.NDArray[np.generic]]


def write(path: str, layers: Sequence[int], hidden: int, dtype: str, entries: Sequence[Entry]) -> None:
    """Streams a shard of at least one entry to a hidden name, syncs it, and renames it to `path`."""
    ends = np.cumsum([0] + [e.rows for e in entries], dtype=np.int64)
    info = [
        {"request": e.request, "prompt": e.prompt, "missing_rows": e.missing_rows, "bad_rows": e.bad_rows}
        for e in entries
    ]
    consumed = np.concatenate([e.tokens[:-1] for e in entries])
    last = np.array([e.tokens[-1] for e in entries], dtype=np.int32)
    tensors = {
        "states": _Tensor(dtype, [len(consumed), len(layers), hidden], [piece for e in entries for piece in e.states]),
        "offsets": _Tensor("I64", [len(ends)], [ends]),
        "tokens": _Tensor("I32", [len(consumed)], [consumed]),
        "last_token": _Tensor("I32", [len(last)], [last]),
    }
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as f:
            f.write(_header(tensors, {"layers": json.dumps(list(layers)), "requests": json.dumps(info)}))
            for tensor in tensors.values():
                for piece in tensor.pieces:
                    f.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
        _sync_folder(folder)
    except BaseException:
        if os.path.exists(aside):
            os.unlink(aside)
        raise


def write_error(path: str, text: str) -> None:
    """Tells whoever waits for `path` that it will not come, in `path`.error."""
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.error.{os.getpid()}.part")
    with open(aside, "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(aside, path + ".error")


def _header(tensors: dict[str, _Tensor], metadata: dict[str, str]) -> bytes:
    """The head of a safetensors file: 8 bytes of length, then JSON padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        size = sum(piece.nbytes for piece in tensor.pieces)
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
