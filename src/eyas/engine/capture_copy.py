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
    slots: torch.Tensor | None
    """[N] int64, KV slot of each row"""
    wait: Callable[[], None]
    bad: Callable[[], npt.NDArray[np.bool_]]
    """[N] rows that are not finite or all zero in a layer; after `wait`"""
    done: Callable[[], None]


def _nothing() -> None:
    return None


class HostCopy:
    """For a model on the CPU."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def take(self, count: int, slots: torch.Tensor | None) -> Copied:
        rows, positions = self._tap.rows[:count].clone(), self._tap.positions[:count].clone()
        kept = None if slots is None else slots[:count].to(torch.int64, copy=True)
        return Copied(rows, positions, kept, _nothing, lambda: bad_rows(rows), _nothing)


class _Slot:
    """One slot of the ring: device staging and its pinned mirror."""

    def __init__(self, tap: Tap, staging: torch.Tensor) -> None:
        count = tap.rows.shape[0]
        self.rows = staging
        self.numbers = torch.empty(3, count, dtype=torch.int64, device=tap.rows.device)
        """positions, KV slots, and whether the row is bad"""
        self.host_rows = torch.empty(tap.rows.shape, dtype=tap.rows.dtype, device="cpu", pin_memory=True)
        self.host_numbers = torch.empty(3, count, dtype=torch.int64, device="cpu", pin_memory=True)
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
        slot.rows[:count].copy_(self._tap.rows[:count])
        slot.numbers[0, :count].copy_(self._tap.positions[:count])
        if slots is not None:
            slot.numbers[1, :count].copy_(slots[:count])
        self._side.wait_stream(torch.cuda.current_stream(self._tap.rows.device))
        with torch.cuda.stream(self._side):
            largest = torch.linalg.vector_norm(slot.rows[:count], ord=torch.inf, dim=-1)
            fine = (largest > 0) & torch.isfinite(largest)
            slot.numbers[2, :count].copy_(~fine.all(dim=-1))
            slot.host_rows[:count].copy_(slot.rows[:count], non_blocking=True)
            for i in range(3):  # a slice of each row, since a strided pinned copy would not be asynchronous
                slot.host_numbers[i, :count].copy_(slot.numbers[i, :count], non_blocking=True)
            slot.copied.record(self._side)
        # the next use of this slot's staging, on the main stream, follows `done`, which follows `copied`
        return Copied(
            slot.host_rows[:count],
            slot.host_numbers[0, :count],
            None if slots is None else slot.host_numbers[1, :count],
            slot.copied.synchronize,
            lambda: slot.host_numbers[2, :count].numpy().astype(np.bool_),
            lambda: self._free.put(slot),
        )


def copier(tap: Tap) -> HostCopy | RingCopy:
    return RingCopy(tap) if tap.rows.is_cuda else HostCopy(tap)
