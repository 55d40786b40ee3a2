"""Safetensors checkpoints by their headers alone: which file holds which tensor, and that every file is whole."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.target.info import TensorRef

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # the format's own limit, in bytes
_PLACE = re.compile(rb'"data_offsets"\s*:\s*\[\s*(\d+)\s*,\s*(\d+)\s*\]')
_WEIGHT = re.compile(rb'"([^"\\]+\.(?:weight|bias))"\s*:\s*(\{[^{}]*\})')
_SHAPE = re.compile(rb'"shape"\s*:\s*\[[\d\s,]*\]')
_SHARD_NAME = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


@dataclass(frozen=True)
class Header:
    """The header of one safetensors file; tensor data starts `data_start` bytes into the file."""

    file: Path
    tensors: dict[str, dict[str, Any]]
    data_start: int

    def ref(self, name: str) -> TensorRef:
        entry = self.entry(name)
        return TensorRef(name=name, file=self.file, shape=tuple(entry["shape"]), dtype=entry["dtype"])

    def entry(self, name: str) -> dict[str, Any]:
        """dtype, shape and data_offsets; InputError when they are malformed or contradict each other."""
        entry = self.tensors[name]
        _check_entry(self.file, name, entry)
        return entry

    def data_range(self, name: str) -> tuple[int, int]:
        """First byte and end of the tensor's data in the file."""
        start, end = self.entry(name)["data_offsets"]
        return self.data_start + start, self.data_start + end


_AGAIN = "the file is damaged: download or copy it again"
_LFS = b"version https://git-lfs"


def read_header(file: Path) -> Header:
    """Reads and checks the header of one file, its size included. Raises InputError on a damaged or cut file."""
    raw = _raw_header(file)
    try:
        tensors = json.loads(raw)
        tensors.pop("__metadata__", None)
        places = _PLACE.findall(raw)
        if not len(tensors) == len(places) == len(_SHAPE.findall(raw)):  # one of them is malformed
            for name, entry in tensors.items():
                _check_entry(file, name, entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{file}: the safetensors header cannot be read", fix=_AGAIN) from None
    _check_size(file, 8 + len(raw) + _data_end(file, places))
    return Header(file, tensors, 8 + len(raw))


def _data_end(file: Path, places: list[tuple[bytes, bytes]]) -> int:
    """The end of data that starts at 0 and has neither gaps nor overlaps, which the format demands."""
    end = 0
    for start, stop in sorted((int(start), int(stop)) for start, stop in places):
        if start != end or stop < start:
            raise InputError(
                f"{file}: a tensor lies at bytes {start} to {stop} of the data, the one before it ends at {end}",
                fix=_AGAIN,
            )
        end = stop
    return end


def _check_entry(file: Path, name: str, entry: dict[str, Any]) -> None:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        dtype = shape = start = end = None
    if not (isinstance(dtype, str) and _counts(shape) and _counts([start, end]) and start <= end):
        shown = repr(entry)
        raise InputError(
            f"{file}: header entry {name} is {shown if len(shown) <= 120 else shown[:117] + '...'}; a dtype, a shape "
            "and two ascending data_offsets in whole numbers expected",
            fix=_AGAIN,
        )
    bits = BITS.get(dtype)
    if bits is not None and (end - start) * 8 != math.prod(shape) * bits:
        raise InputError(f"{file}: header entry {name} says {dtype} {shape}, but {end - start} bytes", fix=_AGAIN)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def scan_header(file: Path) -> int:
    """Checks a file's size against its header and returns its number of tensors, without building the header's objects:
    ten times as fast as `read_header`, which counts with 200,000 tensors."""
    raw = _raw_header(file)
    places = _PLACE.findall(raw)
    _check_size(file, 8 + len(raw) + max((int(end) for _, end in places), default=0))
    return len(places)


def _raw_header(file: Path) -> bytes:
    if file.is_dir():
        raise InputError(f"{file} is a directory, a safetensors file expected", fix="download the file again")
    size = file.stat().st_size
    with open(file, "rb") as f:
        if f.read(len(_LFS)) == _LFS:
            raise InputError(
                f"{file} is a Git LFS pointer ({size} bytes), not the weights themselves",
                fix=f"run `git lfs pull` in {file.parent}",
            )
        f.seek(0)
        first = f.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > _LARGEST_HEADER:
            raise InputError(f"{file} is no safetensors file ({size} bytes, header length {length})", fix=_AGAIN)
        raw = f.read(length)
    if len(raw) < length:
        raise InputError(
            f"{file} is cut short inside its header: {size} bytes, at least {8 + length} expected", fix=_AGAIN
        )
    return raw


def _check_size(file: Path, expected: int) -> None:
    size = file.stat().st_size
    if size != expected:
        what = "is cut short" if size < expected else "is longer than its header says"
        raise InputError(f"{file} {what}: {size} bytes, {expected} expected", fix=_AGAIN)


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a checkpoint directory. Opening it proved that every file is present and whole."""

    path: Path
    files: tuple[str, ...]
    file_of: dict[str, str] = field(repr=False)
    """the file name of each tensor"""
    _headers: dict[str, Header] = field(default_factory=dict, repr=False)

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def header(self, file: str) -> Header:
        """The parsed header of one file, kept for the next call."""
        if file not in self._headers:
            self._headers[file] = read_header(self.path / file)
        return self._headers[file]

    def header_of(self, name: str) -> Header:
        """The header that holds a tensor. Raises InputError when the index is wrong about it."""
        header = self.header(self.file_of[name])
        if name not in header.tensors:
            raise InputError(
                f"{self.path}: the index places {name} in {header.file.name}, whose header does not have it",
                fix="index and shards are of different checkpoints: download them again",
            )
        return header

    def ref(self, name: str) -> TensorRef:
        return self.header_of(name).ref(name)

    def weight_entries(self) -> dict[str, dict[str, Any]]:
        """Header entries of all tensors named `*.weight` or `*.bias`, without parsing the others: of 200,000 tensors
        that is a matter of a tenth of a second."""
        found: dict[str, dict[str, Any]] = {}
        for file in self.files:
            for name, entry in _WEIGHT.findall(_raw_header(self.path / file)):
                found[name.decode()] = json.loads(entry)
                _check_entry(self.path / file, name.decode(), found[name.decode()])
        return found


def open_checkpoint(path: Path) -> Checkpoint:
    """Checks every file of a checkpoint directory. Raises InputError when a file, the index or a tensor is missing."""
    index_file = _index_file(path)
    if index_file is None:
        file = _single_file(path)
        header = read_header(file)
        return Checkpoint(path, (file.name,), dict.fromkeys(header.tensors, file.name), {file.name: header})
    weight_map = _weight_map(index_file)
    expected = Counter(weight_map.values())
    missing = [name for name in sorted(expected) if not (path / name).is_file()]
    if missing:
        raise InputError(
            f"{path}: {len(missing)} of {len(expected)} shards named in {index_file.name} are missing, "
            f"the first is {missing[0]}",
            fix="finish the download of the checkpoint",
        )
    checkpoint = Checkpoint(path, tuple(sorted(expected)), weight_map)
    differing = [name for name in checkpoint.files if scan_header(path / name) != expected[name]]
    for tensor, name in weight_map.items():
        if name in differing:
            checkpoint.header_of(tensor)
    return checkpoint


def _index_file(path: Path) -> Path | None:
    if (path / INDEX).is_file():
        return path / INDEX
    if (path / "model.safetensors").exists():
        return None
    others = sorted(path.glob("*.safetensors.index.json"))
    if len(others) > 1:
        raise InputError(
            f"{path} has several weight indexes and none is {INDEX}: {', '.join(o.name for o in others)}",
            fix=f"keep one of them, named {INDEX}",
        )
    return others[0] if others else None


def _weight_map(index_file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
        good = bool(weight_map) and all(file and "/" not in file and file != ".." for file in set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise InputError(f"{index_file} has no usable weight_map", fix="download the index again")
    return dict(weight_map)


def _single_file(path: Path) -> Path:
    if (path / "model.safetensors").exists():
        return path / "model.safetensors"
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        if pickles:
            raise InputError(
                f"{path} has its weights only as pickle files ({pickles[0].name}), which eyas does not read",
                fix="convert them to safetensors",
            )
        raise InputError(f"{path} has no *.safetensors weights", fix="point target.path at a complete checkpoint")
    if len(files) > 1 or _SHARD_NAME.search(files[0].name):
        raise InputError(
            f"{path} has {len(files)} weight file(s) such as {files[0].name}, but the index {INDEX} is missing",
            fix="download the index too",
        )
    return files[0]
