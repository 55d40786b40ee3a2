"""The filing process: sorts each step's rows under their requests and writes finished shards.

    python -m eyas.engine.capture_filer CONNECTION MEMORY SETTINGS

eyas.engine.capture_process starts it beside the engine, in a process of its own: as threads of the engine's process
the same work held the interpreter's lock for a millisecond or two of every step. CONNECTION and MEMORY are inherited
file descriptors: a socket that brings `Step` and `Books` and takes back the slots that are free again and the shards
that are written, and the ring. It ends when it is told so (None), or when the engine's process is gone.
Standard library and numpy alone.
"""

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np

from eyas.engine import capture_writer
from eyas.engine.capture_arena import Arena, Taken
from eyas.engine.capture_ring import Ints, Layout, Ring, bad_extremes, bad_rows
from eyas.engine.capture_steps import Books, Finished, Scheduled, Step

_WRITERS = 4
"""threads that write shards: one file system call at a time does not fill a fast disk"""
_LOOK_SECONDS = 1.0
"""how often a filing process without work looks whether the engine is still there"""


@dataclass(frozen=True)
class Settings:
    """Travels as JSON on the command line."""

    layout: Layout
    layers: tuple[int, ...]
    block_size: int
    arena_bytes: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Settings":
        found = json.loads(text)
        return Settings(Layout(**found.pop("layout")), tuple(found.pop("layers")), **found)


def rows_by_name(scheduled: Scheduled, starts: list[int], positions: Ints) -> tuple[Ints, Ints, Ints]:
    """Which rows of a step are captured, where the runner says in which row each request starts.

    starts: first row of each request, -1 where it was not named. positions [N]: the model's own, -1 where unknown.
    Returns row [M], owner [M] (index into the requests) and position [M]. Raises ValueError on an unnamed request.
    """
    if min(starts, default=0) < 0:
        raise ValueError("eyas capture: the model runner does not name the rows of every request of its step")
    counts = np.array(scheduled.rows, dtype=np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
    row = np.array(starts, dtype=np.int64)[owner] + within
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
class _Shard:
    path: str
    samples: list[tuple[Finished, Taken]]
    failure: str | None


class Filer:
    """Files in the caller's thread, writes in others. What goes wrong is told by every later shard's `.error` file.

    written: called with each shard's path once it, or its `.error` file, is there; from any thread.
    """

    def __init__(self, settings: Settings, ring: Ring, written: Callable[[str], None]) -> None:
        self._settings, self._ring, self._written = settings, ring, written
        layout = settings.layout
        self._arena = Arena(layout.layers, layout.hidden, layout.dtype, settings.arena_bytes)
        self._open: dict[str, list[tuple[Finished, Taken]]] = {}
        self._failure: str | None = None
        self._shards: queue.Queue[_Shard | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._write, name=f"write-{i}") for i in range(_WRITERS)]
        for thread in self._threads:
            thread.start()

    def step(self, step: Step) -> None:
        """The slot may be used again on return."""
        try:
            self._put(step)
        except Exception:  # noqa: BLE001 - told to the reader through the shards' .error files
            self._failure = self._failure or traceback.format_exc()

    def books(self, books: Books) -> None:
        try:
            for request in books.dropped:
                self._arena.drop(request)
            for finished in books.finished:
                taken = self._arena.take(finished.request, finished.tokens[:-1])
                self._open.setdefault(finished.shard, []).append((finished, taken))
        except Exception:  # noqa: BLE001
            self._failure = self._failure or traceback.format_exc()
        for path in books.closed:
            self._shards.put(_Shard(path, self._open.pop(path, []), self._failure))

    def stop(self) -> None:
        """Returns once every closed shard is written."""
        for _ in self._threads:
            self._shards.put(None)
        for thread in self._threads:
            thread.join()

    def _put(self, step: Step) -> None:
        rows = self._ring.states(step.slot, step.count)
        positions, tokens, slots = self._ring.numbers(step.slot, step.count)
        dtype = self._settings.layout.dtype
        smallest, largest = self._ring.extremes(step.slot, step.count)
        bad = bad_extremes(smallest, largest, dtype) if step.judged else None
        if step.starts is not None:
            row, owner, position = rows_by_name(step.scheduled, step.starts, positions)
        else:
            row, owner, position = rows_by_slot(step.scheduled, slots, self._settings.block_size)
        if len(row) != step.count or (row[1:] < row[:-1]).any():  # other requests' rows lie between
            rows, tokens = rows[row], tokens[row]
            bad = None if bad is None else bad[row]
        if bad is None:
            bad = bad_rows(rows, dtype)
        self._arena.put(step.scheduled.requests, owner, position, tokens, rows, bad)

    def _write(self) -> None:
        layout = self._settings.layout
        while (shard := self._shards.get()) is not None:
            try:
                if shard.failure is not None:
                    raise RuntimeError(shard.failure)
                entries = [
                    capture_writer.Entry(f.request, f.prompt, f.tokens, self._arena.pieces(t), t.missing, t.bad)
                    for f, t in shard.samples
                ]
                capture_writer.write(shard.path, self._settings.layers, layout.hidden, layout.dtype, entries)
            except OSError as e:
                capture_writer.write_error(shard.path, f"{os.path.dirname(shard.path)}: {e}")
            except Exception as e:  # noqa: BLE001
                capture_writer.write_error(shard.path, str(e) or repr(e))
            for _, taken in shard.samples:
                self._arena.release(taken.pages)
            self._written(shard.path)


def _take_the_engines_cores() -> None:
    """vLLM may have bound the thread that starts this process to one core, as it does on a CPU."""
    cores: set[int] = set()
    for task in os.listdir(f"/proc/{os.getppid()}/task"):
        try:
            cores |= os.sched_getaffinity(int(task))
        except ProcessLookupError:  # that thread has ended
            continue
    os.sched_setaffinity(0, cores)


def main(connection: Connection, ring: Ring, settings: Settings) -> None:
    """Until the engine's process says so, or is gone; closed shards are written in any case."""
    sending = threading.Lock()

    def send(what: int | str) -> None:
        with sending:
            try:
                connection.send(what)
            except OSError:  # the engine is gone: nobody is to be told
                return

    filer = Filer(settings, ring, send)
    engine = os.getppid()
    send(-1)  # ready
    try:
        while True:
            while not connection.poll(_LOOK_SECONDS):
                if os.getppid() != engine:  # another process has inherited its end of the socket
                    return
            message = connection.recv()
            if message is None:
                return
            if isinstance(message, Books):
                filer.books(message)
            else:
                filer.step(message)
                send(message.slot)
    except (EOFError, ConnectionResetError):
        return
    finally:
        filer.stop()


if __name__ == "__main__":
    # the engine's end is this process's end: what a terminal sends to all of them is the engine's to heed
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _take_the_engines_cores()
    chosen = Settings.from_json(sys.argv[3])
    main(Connection(int(sys.argv[1])), Ring(chosen.layout, int(sys.argv[2])), chosen)
