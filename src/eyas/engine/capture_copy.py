"""Copies a step's rows out of the static buffer before the next step overwrites it, and never waits for the device.

On a GPU: a device copy on the model's own stream (so that the buffer is free for the next step), then a copy to
pinned memory on a side stream. The ring has a few slots; when the host cannot keep up, taking a slot blocks, which
slows the engine and loses nothing. On a CPU a plain copy is all. Shapes: N rows of the step, L layers, H hidden.
"""

import queue
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eyas.engine.capture_arena import bad_rows
from eyas.engine.capture_plugin import Tap


@dataclass(frozen=True)
class Copied:
    """Host views of one step, valid from the return of `wait` until `done`."""

    rows: torch.Tensor
    """[N, L, H]"""
    positions: torch.Tensor
    """[N] int64, -1 where the model has several position components"""
    tokens: torch.Tensor
    """[N] int64, the token that each row consumed; -1 where the model saw embeddings alone"""
    slots: torch.Tensor | None
    """[N] int64, KV slot of each row"""
    wait: Callable[[], None]
    bad: Callable[[], npt.NDArray[np.bool_]]
    """[N] rows that are not finite, or of one magnitude throughout (all zero, say), in a layer; after `wait`"""
    done: Callable[[], None]


def _nothing() -> None:
    return None


class HostCopy:
    """For a model on the CPU."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def take(self, count: int, slots: torch.Tensor | None) -> Copied:
        rows, positions = self._tap.rows[:count].clone(), self._tap.positions[:count].clone()
        tokens = self._tap.tokens[:count].clone()
        kept = None if slots is None else slots[:count].to(torch.int64, copy=True)
        return Copied(rows, positions, tokens, kept, _nothing, lambda: bad_rows(rows), _nothing)


_NUMBERS = 4
"""beside the states, of each row: position, token, KV slot, and whether it is bad"""


class _Slot:
    """One slot of the ring: device staging and its pinned mirror."""

    def __init__(self, tap: Tap, staging: torch.Tensor) -> None:
        numbers = _NUMBERS * tap.rows.shape[0]
        self.rows = staging
        self.numbers = torch.empty(numbers, dtype=torch.int64, device=tap.rows.device)
        self.host_rows = torch.empty(tap.rows.shape, dtype=tap.rows.dtype, device="cpu", pin_memory=True)
        self.host_numbers = torch.empty(numbers, dtype=torch.int64, device="cpu", pin_memory=True)
        self.copied = torch.cuda.Event(blocking=True)


class RingCopy:
    """For a model on a GPU. Memory: 1 + RING static buffers on the device, RING pinned on the host."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._side = torch.cuda.Stream(device=tap.rows.device)
        self._free: queue.Queue[_Slot] = queue.Queue()
        for staging in tap.staging:
            self._free.put(_Slot(tap, staging))

    def take(self, count: int, slots: torch.Tensor | None) -> Copied:
        slot = self._free.get()
        size = _NUMBERS * count  # the numbers of a step lie together, so that one copy takes them to the host
        numbers = slot.numbers[:size].view(_NUMBERS, count)
        slot.rows[:count].copy_(self._tap.rows[:count])
        numbers[0].copy_(self._tap.positions[:count])
        numbers[1].copy_(self._tap.tokens[:count])
        if slots is not None:
            numbers[2].copy_(slots[:count])
        self._side.wait_stream(torch.cuda.current_stream(self._tap.rows.device))
        with torch.cuda.stream(self._side):
            smallest, largest = torch.aminmax(slot.rows[:count].abs(), dim=-1)  # both are NaN where one value is
            fine = (smallest < largest) & torch.isfinite(largest)
            numbers[3].copy_(~fine.all(dim=-1))
            slot.host_rows[:count].copy_(slot.rows[:count], non_blocking=True)
            slot.host_numbers[:size].copy_(slot.numbers[:size], non_blocking=True)
            slot.copied.record(self._side)
        # the next use of this slot's staging, on the main stream, follows `done`, which follows `copied`
        host = slot.host_numbers[:size].view(_NUMBERS, count)
        return Copied(
            slot.host_rows[:count],
            host[0],
            host[1],
            None if slots is None else host[2],
            slot.copied.synchronize,
            lambda: host[3].numpy().astype(np.bool_),
            lambda: self._free.put(slot),
        )


def copier(tap: Tap) -> HostCopy | RingCopy:
    return RingCopy(tap) if tap.rows.is_cuda else HostCopy(tap)
