"""The engine's side of the filing process: starts it, hands it steps in order, and tells when it is gone.

All in the engine's own thread and without waiting: a step is handed over once its rows are in the ring, which is
looked at when the next one comes. A full ring slows the engine and loses nothing.
"""

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from multiprocessing import Pipe

import torch

from eyas.engine import capture_writer
from eyas.engine.capture_copy import copier, name_of
from eyas.engine.capture_filer import Settings
from eyas.engine.capture_plugin import Tap
from eyas.engine.capture_ring import Layout, Ring
from eyas.engine.capture_sizes import RING
from eyas.engine.capture_steps import Books, Scheduled, Step

_log = logging.getLogger("vllm.eyas")  # below vLLM's own, so that it is in the server's log
_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_END_SECONDS = 5.0
"""between the end of the socket and the exit code"""


class FilingProcess:
    """Raises RuntimeError where it does not start. Later failures never stop the engine: every shard that was not
    written by then, or is closed later, gets an `.error` file."""

    def __init__(self, tap: Tap, block_size: int, arena_bytes: int) -> None:
        rows, layers, hidden = tap.rows.shape
        self._ring = Ring(Layout(rows, layers, hidden, name_of(tap.rows.dtype)))
        self._copier = copier(tap, self._ring)
        settings = Settings(self._ring.layout, tap.layers, block_size, arena_bytes)
        self._connection, theirs = Pipe()
        with theirs:
            fds = (theirs.fileno(), self._ring.fd)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "eyas.engine.capture_filer", *map(str, fds), settings.to_json()],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
            )
        os.close(self._ring.fd)  # the memory stays mapped
        self._free = deque(range(RING))
        self._pending: deque[tuple[torch.cuda.Event | None, Books | Step]] = deque()
        """not handed over yet, in order"""
        self._handed = 0
        """steps that the filing process has, and whose slots it has not given back"""
        self._closed: set[str] = set()
        """shards of which it has not said that they are written"""
        self._failure: str | None = None
        self._stopping = False
        self._lock = threading.Lock()
        """of the two above, which the watching thread reads when the process ends"""
        if not self._connection.poll(_START_SECONDS):
            self._process.kill()
        try:
            self._connection.recv()
        except EOFError:
            code = self._process.wait()
            raise RuntimeError(
                f"eyas capture: the process that files states did not start (exit code {code})"
            ) from None
        threading.Thread(target=self._watch, name="eyas-capture-watch", daemon=True).start()

    def books(self, books: Books) -> None:
        with self._lock:
            self._closed.update(books.closed)
            failure = self._failure
        if failure is not None:
            self._tell(failure)
        else:
            self._pending.append((None, books))

    def step(self, scheduled: Scheduled, starts: list[int] | None, kv_slots: torch.Tensor | None, count: int) -> None:
        """Takes the buffer's first `count` rows. One of `starts` and `kv_slots` is given."""
        slot = self._free_slot()
        if slot is None:
            return
        event = self._copier.copy(slot, count, kv_slots)
        self._pending.append((event, Step(scheduled, starts, slot, count, self._copier.judges)))
        if event is None:
            self.hand_over()

    def hand_over(self, *, wait: bool = False) -> None:
        """What is ready, in order; everything, if `wait`."""
        while self._pending and (wait or self._ready()):
            self._hand_over_one()

    def stop(self) -> None:
        """Ends the process once every closed shard is written."""
        self._stopping = True
        self.hand_over(wait=True)
        try:
            self._connection.send(None)
            self._process.wait(_STOP_SECONDS)
        except OSError:
            self._lost()
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._connection.close()

    def _ready(self) -> bool:
        event = self._pending[0][0]
        return event is None or event.query()

    def _hand_over_one(self) -> None:
        event, what = self._pending.popleft()
        if event is not None:
            event.synchronize()
        try:
            self._connection.send_bytes(pickle.dumps(what, pickle.HIGHEST_PROTOCOL))  # half the time of `send`
            self._handed += isinstance(what, Step)
        except OSError:
            self._lost()

    def _free_slot(self) -> int | None:
        """Waits for one; None when the process is gone."""
        while not self._free and self._failure is None:
            while self._handed == 0 and self._pending:  # it has nothing to give back
                self._hand_over_one()
            try:
                told = self._connection.recv()
            except (EOFError, OSError):
                self._lost()
                break
            if isinstance(told, int):
                self._handed -= 1
                self._free.append(told)
            else:
                with self._lock:
                    self._closed.discard(told)
        return None if self._failure is not None else self._free.popleft()

    def _watch(self) -> None:
        self._process.wait()
        if not self._stopping:
            self._lost()

    def _lost(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        code = self._process.returncode
        with self._lock:
            if self._failure is None:
                self._failure = (
                    f"eyas capture: the process that files states ended (exit code {code}; -9 may be want of memory)"
                )
                _log.error("%s; no states are kept until this server is started again", self._failure)
        self._tell(self._failure)

    def _tell(self, failure: str) -> None:
        with self._lock:
            for path in self._closed:
                if not os.path.exists(path):
                    capture_writer.write_error(path, failure)
            self._closed.clear()
