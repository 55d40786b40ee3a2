"""The worker's side of capture: a thread files each step's rows under their requests, others write finished shards.

Loaded inside vLLM's worker process by eyas.engine.capture_connector.
"""

import queue
import threading
import traceback
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eyas.engine import capture_writer
from eyas.engine.capture_arena import Arena, Ints, Taken
from eyas.engine.capture_copy import Copied

_QUEUED_STEPS = 8
_WRITERS = 4
"""threads that write shards: one file system call at a time does not fill a fast disk"""
_STOP_SECONDS = 60.0


@dataclass
class Scheduled:
    """The capturing requests' parts in one step, as parallel lists: hundreds of requests are in every step."""

    requests: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """the scheduler's idea of each one's first row; with a drafter and asynchronous scheduling it may be too high"""
    rows: list[int] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)
    """index, within the request, of its first block below"""
    block_counts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """KV blocks that rows can lie in, request after request"""

    def add(self, request: str, position: int, rows: int, first_block: int, blocks: list[int]) -> None:
        self.requests.append(request)
        self.positions.append(position)
        self.rows.append(rows)
        self.first_blocks.append(first_block)
        self.block_counts.append(len(blocks))
        self.blocks += blocks


@dataclass(frozen=True)
class Finished:
    """A request whose sample goes into `shard`. tokens [rows + 1]: the last one was sampled and never consumed."""

    request: str
    tokens: npt.NDArray[np.int32]
    prompt: int
    shard: str

    @property
    def rows(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Books:
    """What happened between two steps: applied before the rows of the step that it travels with."""

    finished: list[Finished] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    """shards that get no further sample and are to be written"""

    def __bool__(self) -> bool:
        return bool(self.finished or self.dropped or self.closed)


def rows_by_name(scheduled: Scheduled, starts: dict[str, int], positions: Ints) -> tuple[Ints, Ints, Ints]:
    """Which rows of a step are captured, where the runner says in which row each request starts.

    starts: request -> its first row. positions [N]: the model's own, -1 where unknown.
    Returns row [M], owner [M] (index into the requests) and position [M].
    """
    counts = np.array(scheduled.rows, dtype=np.int64)
    first = np.array([starts[r] for r in scheduled.requests], dtype=np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
    row = first[owner] + within
    own = positions[row]
    return row, owner, np.where(own >= 0, own, np.array(scheduled.positions, dtype=np.int64)[owner] + within)


def rows_by_slot(scheduled: Scheduled, slots: Ints, block_size: int) -> tuple[Ints, Ints, Ints]:
    """The same where the runner names nothing: a row's KV slot tells its request and its position.

    slots [N]: KV slot of each row. A block that a request writes to is its own, and blocks outside the range that
    it can write to in this step are not in `scheduled`, so a block that was given away is never taken for a
    request's.
    """
    counts = np.array(scheduled.block_counts, dtype=np.int64)
    blocks = np.array(scheduled.blocks, dtype=np.int64)
    owners = np.repeat(np.arange(len(counts)), counts)
    before = np.array(scheduled.first_blocks, dtype=np.int64) - (counts.cumsum() - counts)
    logical = before[owners] + np.arange(len(blocks))
    order = np.argsort(blocks)
    block = slots // block_size
    found = np.minimum(np.searchsorted(blocks[order], block), max(len(blocks) - 1, 0))
    entry = order[found]
    row = np.flatnonzero((blocks[entry] == block) & (slots >= 0))
    entry = entry[row]
    return row, owners[entry], logical[entry] * block_size + slots[row] % block_size


@dataclass(frozen=True)
class _Step:
    scheduled: Scheduled
    starts: dict[str, int] | None
    block_size: int
    copied: Copied


@dataclass(frozen=True)
class _Shard:
    path: str
    samples: list[tuple[Finished, Taken]]
    failure: str | None


class Filer:
    """One thread files, some write. What goes wrong never stops the engine: every later shard's `.error` file tells."""

    def __init__(self, arena: Arena, layers: tuple[int, ...]) -> None:
        self._arena, self._layers = arena, layers
        self._open: dict[str, list[tuple[Finished, Taken]]] = {}
        self._failure: str | None = None
        # bounded: when filing cannot keep up the engine waits, and nothing is lost
        self._steps: queue.Queue[Books | _Step | None] = queue.Queue(_QUEUED_STEPS)
        self._shards: queue.Queue[_Shard | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._file, name="eyas-capture-file", daemon=True),
            *(
                threading.Thread(target=self._write, name=f"eyas-capture-write-{i}", daemon=True)
                for i in range(_WRITERS)
            ),
        ]
        for thread in self._threads:
            thread.start()

    def books(self, books: Books) -> None:
        self._steps.put(books)

    def step(self, scheduled: Scheduled, starts: dict[str, int] | None, block_size: int, copied: Copied) -> None:
        self._steps.put(_Step(scheduled, starts, block_size, copied))

    def stop(self) -> None:
        self._steps.put(None)
        for thread in self._threads:
            thread.join(_STOP_SECONDS)

    def _file(self) -> None:
        while (item := self._steps.get()) is not None:
            try:
                if isinstance(item, Books):
                    self._apply(item)
                else:
                    self._put(item)
            except Exception:  # noqa: BLE001 - told to the reader through the shards' .error files
                self._failure = self._failure or traceback.format_exc()
                if isinstance(item, Books):
                    for path in item.closed:
                        self._shards.put(_Shard(path, self._open.pop(path, []), self._failure))
        for _ in range(_WRITERS):
            self._shards.put(None)

    def _put(self, step: _Step) -> None:
        copied = step.copied
        try:
            copied.wait()
            if step.starts is not None:
                row, owner, position = rows_by_name(step.scheduled, step.starts, copied.positions.numpy())
            elif copied.slots is not None:
                row, owner, position = rows_by_slot(step.scheduled, copied.slots.numpy(), step.block_size)
            else:
                raise RuntimeError("eyas capture: a step came without row names and without KV slots")
            rows, bad, tokens = copied.rows, copied.bad(), copied.tokens.numpy()
            if len(row) != len(bad) or (row[1:] < row[:-1]).any():  # other requests' rows lie between
                rows, bad, tokens = rows[row], bad[row], tokens[row]
            self._arena.put(step.scheduled.requests, owner, position, tokens, rows, bad)
        finally:
            copied.done()

    def _apply(self, books: Books) -> None:
        for request in books.dropped:
            self._arena.drop(request)
        for finished in books.finished:
            taken = self._arena.take(finished.request, finished.tokens[:-1])
            self._open.setdefault(finished.shard, []).append((finished, taken))
        for path in books.closed:
            self._shards.put(_Shard(path, self._open.pop(path), self._failure))

    def _write(self) -> None:
        while (shard := self._shards.get()) is not None:
            try:
                if shard.failure is not None:
                    raise RuntimeError(shard.failure)
                entries = [
                    capture_writer.Entry(f.request, f.prompt, f.tokens, self._arena.pieces(t), t.missing, t.bad)
                    for f, t in shard.samples
                ]
                capture_writer.write(shard.path, self._layers, entries)
            except Exception as e:  # noqa: BLE001
                capture_writer.write_error(shard.path, str(e) or repr(e))
            for _, taken in shard.samples:
                self._arena.release(taken.pages)
