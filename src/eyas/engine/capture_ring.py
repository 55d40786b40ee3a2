"""Shared memory between the engine's process and the one that files states: a few slots, each with room for a step.

Standard library and numpy alone: the filing process starts without torch. numpy has no bfloat16, so states are kept
as unsigned integers of the same width. Shapes: N rows of a slot, n of them used, L layers, H hidden.
"""

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.engine.capture_sizes import RING

Bits = npt.NDArray[np.unsignedinteger]
Ints = npt.NDArray[np.int64]
_PAGE = 4096


@dataclass(frozen=True)
class FloatBits:
    """How a float type looks as an unsigned integer."""

    unsigned: type[np.unsignedinteger]
    magnitude: int
    """mask of everything but the sign"""
    infinity: int


FLOATS = {
    "F32": FloatBits(np.uint32, 0x7FFFFFFF, 0x7F800000),
    "BF16": FloatBits(np.uint16, 0x7FFF, 0x7F80),
    "F16": FloatBits(np.uint16, 0x7FFF, 0x7C00),
}
"""by the name that safetensors files have for the type"""


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a slot: states [n, L, H], then three numbers a row and two magnitudes a row and layer.

    A step's part of each is contiguous, so its size depends on the rows used.
    """

    rows: int
    layers: int
    hidden: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return np.dtype(FLOATS[self.dtype].unsigned).itemsize

    @property
    def numbers_at(self) -> int:
        return _whole_pages(self.rows * self.layers * self.hidden * self.itemsize)

    @property
    def extremes_at(self) -> int:
        return self.numbers_at + _whole_pages(NUMBERS * self.rows * 8)

    @property
    def slot_bytes(self) -> int:
        return self.extremes_at + _whole_pages(2 * self.rows * self.layers * self.itemsize)


NUMBERS = 3
"""of each row: position, -1 where the model has several components; token, -1 where it saw embeddings; KV slot"""


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class Ring:
    """The memory itself; `fd` is passed on to the other process, which maps it again."""

    def __init__(self, layout: Layout, fd: int | None = None) -> None:
        self.layout = layout
        size = layout.slot_bytes * RING
        if fd is None:
            fd = os.memfd_create("eyas-capture")
            os.ftruncate(fd, size)  # memory is taken as it is first written
        self.fd = fd
        self.memory = mmap.mmap(fd, size)

    def states(self, slot: int, count: int) -> Bits:
        """[count, L, H]"""
        x = self.layout
        flat = self._view(slot, 0, FLOATS[x.dtype].unsigned, count * x.layers * x.hidden)
        return flat.reshape(count, x.layers, x.hidden)

    def numbers(self, slot: int, count: int) -> Ints:
        """[NUMBERS, count]"""
        return self._view(slot, self.layout.numbers_at, np.int64, NUMBERS * count).reshape(NUMBERS, count)

    def extremes(self, slot: int, count: int) -> Bits:
        """[2, count, L]: smallest and largest magnitude of each row and layer"""
        x = self.layout
        flat = self._view(slot, x.extremes_at, FLOATS[x.dtype].unsigned, 2 * count * x.layers)
        return flat.reshape(2, count, x.layers)

    def _view(self, slot: int, at: int, dtype: type[np.generic], count: int) -> npt.NDArray[Any]:
        return np.frombuffer(self.memory, dtype, count, slot * self.layout.slot_bytes + at)


def bad_rows(states: Bits, dtype: str) -> npt.NDArray[np.bool_]:
    """[n] true where a layer of states [n, L, H] holds an infinity, NaN or one magnitude throughout (zero, say)."""
    magnitudes = states & FLOATS[dtype].unsigned(FLOATS[dtype].magnitude)
    return bad_extremes(magnitudes.min(axis=-1), magnitudes.max(axis=-1), dtype)


def bad_extremes(smallest: Bits, largest: Bits, dtype: str) -> npt.NDArray[np.bool_]:
    """The same from each layer's smallest and largest magnitude [n, L], NaN where one value is.

    Magnitudes of IEEE floats compare as their bits do.
    """
    return ((largest == smallest) | (largest >= FLOATS[dtype].infinity)).any(axis=-1)
