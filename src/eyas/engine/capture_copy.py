"""Copies a step's rows out of the static buffer, into a slot of the ring, before the next step overwrites it.

On a GPU: a device copy on the model's own stream (so that the buffer is free for the next step), then copies to pinned
memory on a side stream; nothing waits for the device. On a CPU a plain copy is all.
Shapes: N rows of the buffer, n of the step, L layers, H hidden.
"""

import weakref
from typing import Protocol

import torch

from eyas.engine.capture_plugin import Tap
from eyas.engine.capture_ring import NUMBERS, Ring

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def name_of(dtype: torch.dtype) -> str:
    """As in a safetensors file. Raises TypeError on a type that states cannot have."""
    if dtype not in NAMES:
        raise TypeError(f"eyas capture: states of {dtype} are not supported; expected {', '.join(map(str, NAMES))}")
    return NAMES[dtype]


class Copier(Protocol):
    judges: bool
    """copies the smallest and largest magnitude of each row and layer too"""

    def copy(self, slot: int, count: int, kv_slots: torch.Tensor | None) -> torch.cuda.Event | None:
        """Of the buffer's first `count` rows. Returns what says that the slot is filled; None if it is."""
        ...


class HostCopy:
    """For a model on the CPU."""

    judges = False

    def __init__(self, tap: Tap, ring: Ring) -> None:
        self._tap, self._ring = tap, ring

    def copy(self, slot: int, count: int, kv_slots: torch.Tensor | None) -> None:
        states = torch.from_numpy(self._ring.states(slot, count)).view(self._tap.rows.dtype)
        states.copy_(self._tap.rows[:count])
        numbers = torch.from_numpy(self._ring.numbers(slot, count))
        numbers[:2].copy_(self._tap.numbers[:, :count])
        if kv_slots is not None:
            numbers[2].copy_(kv_slots[:count])


class _Slot:
    """One slot of the ring: staging on the device, and the pinned memory that mirrors it."""

    def __init__(self, tap: Tap, staging: torch.Tensor, ring: Ring, index: int) -> None:
        rows, layers, _ = tap.rows.shape
        self.states = staging
        self.numbers = torch.empty(NUMBERS * rows, dtype=torch.int64, device=staging.device)
        self.extremes = torch.empty(2 * rows * layers, dtype=staging.dtype, device=staging.device)
        self.host_states = torch.from_numpy(ring.states(index, rows)).view(staging.dtype)
        self.host_numbers = torch.from_numpy(ring.numbers(index, rows)).view(-1)
        self.host_extremes = torch.from_numpy(ring.extremes(index, rows)).view(staging.dtype).view(-1)
        self.filled = torch.cuda.Event(blocking=True)


class DeviceCopy:
    """For a model on a GPU. Memory: 1 + RING static buffers on the device, RING pinned on the host."""

    judges = True

    def __init__(self, tap: Tap, ring: Ring) -> None:
        self._tap = tap
        self._stream = torch.cuda.Stream(device=tap.rows.device)
        memory = torch.frombuffer(ring.memory, dtype=torch.uint8)
        _pin(memory)
        weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, memory.data_ptr()).atexit = False
        self._slots = [_Slot(tap, staging, ring, i) for i, staging in enumerate(tap.staging)]

    def copy(self, slot: int, count: int, kv_slots: torch.Tensor | None) -> torch.cuda.Event:
        own, layers = self._slots[slot], self._tap.rows.shape[1]
        states = own.states[:count]
        flat = own.numbers[: NUMBERS * count]  # contiguous, so that one copy takes them to the host
        numbers = flat.view(NUMBERS, count)
        states.copy_(self._tap.rows[:count])
        numbers[:2].copy_(self._tap.numbers[:, :count])
        if kv_slots is not None:
            numbers[2].copy_(kv_slots[:count])
        self._stream.wait_stream(torch.cuda.current_stream(states.device))
        with torch.cuda.stream(self._stream):
            size = 2 * count * layers
            smallest, largest = own.extremes[:size].view(2, count, layers)
            torch.aminmax(states.abs(), dim=-1, out=(smallest, largest))
            own.host_states[:count].copy_(states, non_blocking=True)
            own.host_numbers[: NUMBERS * count].copy_(flat, non_blocking=True)
            own.host_extremes[:size].copy_(own.extremes[:size], non_blocking=True)
            own.filled.record(self._stream)
        # the next use of this slot's staging, on the main stream, follows the filing, which follows this event
        return own.filled


def _pin(memory: torch.Tensor) -> None:
    """Registers host memory with CUDA, for copies that do not wait."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(f"eyas capture: CUDA cannot pin {memory.numel() >> 20} MiB of host memory (error {status})")


def copier(tap: Tap, ring: Ring) -> Copier:
    return DeviceCopy(tap, ring) if tap.rows.is_cuda else HostCopy(tap, ring)
