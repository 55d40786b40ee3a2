"""Writes shards of captured states (format: eyas.states.shard) from inside vLLM's worker."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class Entry:
    """One sample. states: pieces [rows_j, layers, hidden] that make up its rows; tokens [rows + 1] int32."""

    request: str
    prompt: int
    tokens: npt.NDArray[np.int32]
    states: Sequence[torch.Tensor]
    missing_rows: int
    bad_rows: int

    @property
    def rows(self) -> int:
        return len(self.tokens) - 1


def write(path: str, layers: Sequence[int], entries: Sequence[Entry]) -> None:
    """Streams a shard of at least one entry to a hidden name, syncs it, and renames it to `path`."""
    ends = np.cumsum([0] + [e.rows for e in entries], dtype=np.int64)
    info = [
        {"request": e.request, "prompt": e.prompt, "missing_rows": e.missing_rows, "bad_rows": e.bad_rows}
        for e in entries
    ]
    tensors: dict[str, list[torch.Tensor]] = {
        "states": [piece for e in entries for piece in e.states],
        "offsets": [torch.from_numpy(ends)],
        "tokens": [torch.from_numpy(np.concatenate([e.tokens[:-1] for e in entries]))],
        "last_token": [torch.from_numpy(np.array([e.tokens[-1] for e in entries], dtype=np.int32))],
    }
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as f:
            f.write(_header(tensors, {"layers": json.dumps(list(layers)), "requests": json.dumps(info)}))
            for pieces in tensors.values():
                for piece in pieces:
                    f.write(piece.contiguous().flatten().view(torch.uint8).numpy().data)
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


def _header(tensors: dict[str, list[torch.Tensor]], metadata: dict[str, str]) -> bytes:
    """The head of a safetensors file: 8 bytes of length, then JSON padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, pieces in tensors.items():
        size = sum(p.numel() * p.element_size() for p in pieces)
        shape = [sum(p.shape[0] for p in pieces), *pieces[0].shape[1:]]
        entries[name] = {"dtype": _NAMES[pieces[0].dtype], "shape": shape, "data_offsets": [at, at + size]}
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
