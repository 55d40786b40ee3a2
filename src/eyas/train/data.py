"""From packs of sample numbers to batches on the device, read ahead of the step that needs them."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.draft.model import StepCounts
from eyas.draft.rows import DraftBatch, plan_steps
from eyas.errors import EyasError, InputError
from eyas.states.store import Sample, SampleRef
from eyas.train.packing import Pack

AHEAD = 4
"""batches read ahead, unless more are asked for"""


class Store(Protocol):
    """What training needs of a harvest (eyas.states.store.HarvestStore)."""

    def load(self, ref: SampleRef) -> Sample: ...


@dataclass(frozen=True)
class Layout:
    """How samples become batch rows."""

    aux: list[int]
    """places of the aux layers among the stored ones"""
    last: int
    """place of the state before the final norm"""
    hidden: int
    steps: int
    nested: bool
    """each TTT step with its own rows; else one row set for all (see plan_steps)"""
    pad_to: int | None
    """rows of every batch; None: as many as its samples have"""


def layout(stored: list[int], aux: list[int], last: int, **rest: int | bool | None) -> Layout:
    """Raises InputError when a layer was not harvested."""
    missing = [k for k in [*aux, last] if k not in stored]
    if missing:
        raise InputError(
            f"draft.aux_layers: the harvest holds the states after layers {stored}, not after {missing}",
            fix="set draft.aux_layers to harvested layers, or harvest again",
        )
    return Layout([stored.index(k) for k in aux], stored.index(last), **rest)  # type: ignore[arg-type]


def collate(samples: Sequence[Sample], how: Layout) -> DraftBatch:
    """One batch of whole samples, in order.

    Row t of a sample with tokens x[0..n-1] and states g[0..n-2]: token x[t+1], aux states g[t], teacher state y[t+1],
    label token x[t+2], position t + 1; supervised iff loss_mask[t+1] and loss_mask[t+2].
    """
    parts: list[list[torch.Tensor]] = [[] for _ in range(6)]
    for number, sample in enumerate(samples):
        n = sample.token_ids.numel()
        if sample.states.shape[0] < n - 1 or sample.states.shape[2] != how.hidden:
            raise EyasError(
                f"sample {sample.id}: states of shape {list(sample.states.shape)} for {n} tokens, expected "
                f"[{n - 1}, layers, {how.hidden}]",
                fix="harvest again",
            )
        mask = sample.loss_mask[1:-1] & sample.loss_mask[2:]
        rows = (
            sample.token_ids[1:-1],
            sample.token_ids[2:],
            sample.states[: n - 2, how.aux].flatten(1),
            sample.states[1 : n - 1, how.last],
            torch.full((n - 2,), number),
            mask,
        )
        for part, value in zip(parts, rows, strict=True):
            part.append(value)
    tokens = sum(x.numel() for x in parts[0])
    if not samples:
        parts = _nothing(how)
    filler = (how.pad_to or max(tokens, 1)) - tokens
    ids, labels, aux, last, documents, mask = (
        _padded(torch.cat(part), filler, fill) for part, fill in zip(parts, (0, 0, 0, 0, -1, False), strict=True)
    )
    positions = torch.cat([torch.arange(1, x.numel() + 1) for x in parts[0]] + [torch.zeros(filler, dtype=torch.long)])
    plan = plan_steps(documents, mask, how.steps, nested=how.nested)
    return DraftBatch(
        ids[None], labels[None], aux[None], last[None], documents[None], positions[None], mask[None], plan, tokens
    )


def _nothing(how: Layout) -> list[list[torch.Tensor]]:
    empty = torch.zeros(0, dtype=torch.long)
    return [
        [empty],
        [empty],
        [torch.zeros(0, len(how.aux) * how.hidden)],
        [torch.zeros(0, how.hidden)],
        [empty],
        [empty.bool()],
    ]


def _padded(x: torch.Tensor, rows: int, value: int | bool) -> torch.Tensor:
    return x if rows == 0 else torch.cat([x, x.new_full((rows, *x.shape[1:]), value)])


@dataclass(frozen=True)
class Loaded:
    """A batch and the ids of its samples."""

    batch: DraftBatch
    ids: list[str]


class Reader:
    """Iterates over the batches of `packs`; a thread reads `ahead` of the consumer from a store of its own.

    On CUDA the batches are page-locked and copied on a side stream while the previous step computes. Close it, or
    iterate to the end: the thread ends with either.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        refs: Sequence[SampleRef],
        packs: Sequence[Pack],
        how: Layout,
        device: torch.device,
        ahead: int = AHEAD,
    ) -> None:
        self._open, self._refs, self._packs, self._how, self._device = open_store, refs, packs, how, device
        self._queue: queue.Queue[Loaded | BaseException | None] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="eyas-reader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Loaded]:
        try:
            yield from self._on_cuda() if self._device.type == "cuda" else self._take()
        finally:
            self.close()

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.05)

    def _read(self) -> None:
        try:
            store = self._open()
            for pack in self._packs:
                refs = [self._refs[i] for i in pack]
                batch = collate([store.load(ref) for ref in refs], self._how)
                if self._device.type == "cuda":
                    batch = batch.pinned()
                if not self._put(Loaded(batch, [ref.id for ref in refs])):
                    return
            self._put(None)
        except BaseException as e:  # noqa: BLE001 - raised again where the batch is asked for
            self._put(e)

    def _put(self, item: Loaded | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _take(self) -> Iterator[Loaded]:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _on_cuda(self) -> Iterator[Loaded]:
        side = torch.cuda.Stream(self._device)
        waiting: Loaded | None = None
        for item in self._take():
            with torch.cuda.stream(side):
                copied = Loaded(item.batch.to(self._device), item.ids)
            if waiting is not None:
                yield waiting
            torch.cuda.current_stream(self._device).wait_stream(side)
            copied.batch.record_stream(torch.cuda.current_stream(self._device))
            waiting = copied
        if waiting is not None:
            yield waiting


Readers = Callable[[int], Reader]
"""first optimizer step -> the batches of this rank from there on"""


class Batches:
    """The train loader that Trainer sees: all steps of the run, the finished ones skipped without being read."""

    def __init__(self, readers: Readers, total: int, accumulate: int = 1) -> None:
        self._readers, self._total = readers, total * accumulate
        self.start = 0
        self._reader: Reader | None = None

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[dict[str, Loaded]]:
        self._reader = self._readers(self.start)
        for loaded in self._reader:
            yield {"loaded": loaded}

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class StepBatches:
    """This rank's batches of one optimizer step, and the sums over those that were computed."""

    def __init__(self, loaded: list[Loaded]) -> None:
        self.loaded, self.done = loaded, 0
        self.counts = torch.zeros(5, loaded[0].batch.plan.counts.numel(), device=loaded[0].batch.input_ids.device)

    def add(self, counts: StepCounts) -> None:
        self.counts += counts.stack()
        self.done += 1

    @property
    def labels(self) -> torch.Tensor:
        """[T]: rows with a loss"""
        return torch.stack([x.batch.plan.counts for x in self.loaded]).sum(0)

    @property
    def ids(self) -> list[str]:
        return [i for x in self.loaded for i in x.ids]

    @property
    def sizes(self) -> list[int]:
        """rows that are no padding, supervised label rows"""
        return [sum(x.batch.tokens for x in self.loaded), sum(x.batch.supervised for x in self.loaded)]
