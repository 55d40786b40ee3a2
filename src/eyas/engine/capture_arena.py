"""Host memory of rows that are being captured: one paged arena, written with one indexed copy a step.

Loaded inside the filing process; standard library and numpy alone, states as unsigned integers of their width.
Shapes: a row is one token's states [layers, hidden]; N rows of a step; R rows of the arena.
"""

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eyas.engine.capture_ring import FLOATS, Bits, Ints

PAGE = 64
"""rows of a page"""
_NORESERVE = 0x4000  # MAP_NORESERVE on Linux: address space now, memory when first written
_UNSEEN, _GOOD, _BAD = 0, 1, 2
_COMPARED = 32
"""values of a row that are compared with the row before; the others only where these are equal"""


@dataclass(frozen=True)
class Taken:
    """A finished sample: its pages of the arena stay its own until `release`."""

    pages: list[int]
    rows: int
    missing: int
    """rows that never came, consumed other tokens, or are the row before once more (a buffer that was not refreshed)"""
    bad: int


class ArenaFull(RuntimeError):
    """More rows are live than the arena has room for."""


class Arena:
    """Rows by request and position. Not thread-safe but for `pieces` and `release`, which a writer thread may call."""

    def __init__(self, layers: int, hidden: int, dtype: str, limit_bytes: int) -> None:
        unsigned = np.dtype(FLOATS[dtype].unsigned)
        row_bytes = layers * hidden * unsigned.itemsize
        self.capacity = max(limit_bytes // row_bytes // PAGE, 2) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, self.capacity * row_bytes, flags=flags)
        with contextlib.suppress(OSError):  # fewer page faults on the first write: 9 ms instead of 30 for 512 wide rows
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._rows: Bits = np.frombuffer(self._memory, unsigned).reshape(self.capacity, layers * hidden)
        self._seen = np.zeros(self.capacity, dtype=np.uint8)
        self._tokens = np.zeros(self.capacity, dtype=np.int64)
        """what each row consumed; -1 unknown"""
        self._free: list[int] = []
        self._fresh = 0
        self._lock = threading.Lock()
        self._lines: dict[str, int] = {}
        """request -> its line of the page table"""
        self._spare_lines = [0]
        self._table = np.zeros((1, 16), dtype=np.int64)
        self._pages = np.zeros(1, dtype=np.int64)
        """pages in use of each line"""

    def __len__(self) -> int:
        return len(self._lines)

    def put(
        self,
        requests: list[str],
        owner: Ints,
        positions: Ints,
        tokens: Ints,
        rows: Bits,
        bad: npt.NDArray[np.bool_],
    ) -> None:
        """Files rows [N, layers, hidden]: row i is of requests[owner[i]], lies at positions[i], consumed tokens[i].

        A position that is written twice (preemption, rejected drafts) keeps the later row.
        """
        if len(owner) == 0:
            return
        known = self._lines
        lines = np.array([known[r] if r in known else self._line(r) for r in requests], dtype=np.int64)
        line = lines[owner]
        last = np.full(len(requests), -1, dtype=np.int64)
        np.maximum.at(last, owner, positions)
        needed = last // PAGE + 1
        for i in np.flatnonzero(needed > self._pages[lines]):
            self._grow(int(lines[i]), int(needed[i]))
        at = self._table[line, positions // PAGE] * PAGE + positions % PAGE
        self._rows[at] = rows.reshape(len(owner), -1)
        self._seen[at] = np.where(bad, _BAD, _GOOD)
        self._tokens[at] = tokens

    def take(self, request: str, tokens: npt.NDArray[np.integer]) -> Taken:
        """Ends a request that consumed `tokens` [rows]. Rows never written are zero; these and wrong ones count."""
        rows = len(tokens)
        line = self._line(request)
        self._grow(line, -(-rows // PAGE))
        pages = self._table[line, : self._pages[line]].tolist()
        self._forget(request)
        keep = -(-rows // PAGE)
        self.release(pages[keep:])  # asynchronous scheduling runs past the end
        at = (np.array(pages[:keep], dtype=np.int64)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:rows]
        seen = self._seen[at]
        self._rows[at[seen == _UNSEEN]] = 0
        consumed = self._tokens[at]
        wrong = (seen == _UNSEEN) | ((consumed != tokens) & (consumed >= 0)) | self._repeated(at, tokens)
        return Taken(pages[:keep], rows, int(wrong.sum()), int((seen == _BAD).sum()))

    def _repeated(self, at: Ints, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Rows that equal the row before them bit for bit, though their tokens differ."""
        found = np.zeros(len(at), dtype=np.bool_)
        start = self._rows[at, :_COMPARED]
        suspect = np.flatnonzero((start[1:] == start[:-1]).all(axis=-1) & (tokens[1:] != tokens[:-1])) + 1
        found[suspect] = (self._rows[at[suspect]] == self._rows[at[suspect - 1]]).all(axis=-1)
        return found

    def drop(self, request: str) -> None:
        if request in self._lines:
            line = self._lines[request]
            pages = self._table[line, : self._pages[line]].tolist()
            self._forget(request)
            self.release(pages)

    def pieces(self, taken: Taken) -> list[Bits]:
        """The sample's rows [.., layers * hidden], in order, as views of whole runs of neighbouring pages."""
        runs: list[list[int]] = []
        for page in taken.pages:
            if runs and runs[-1][1] == page:
                runs[-1][1] += 1
            else:
                runs.append([page, page + 1])
        pieces, left = [], taken.rows
        for a, b in runs:
            pieces.append(self._rows[a * PAGE : min(b * PAGE, a * PAGE + left)])
            left -= (b - a) * PAGE
        return pieces

    def release(self, pages: list[int]) -> None:
        with self._lock:
            self._free.extend(reversed(pages))

    def _line(self, request: str) -> int:
        line = self._lines.get(request)
        if line is None:
            if not self._spare_lines:
                count = len(self._table)
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
                self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)])
                self._spare_lines = list(range(2 * count - 1, count - 1, -1))
            line = self._lines[request] = self._spare_lines.pop()
        return line

    def _forget(self, request: str) -> None:
        line = self._lines.pop(request)
        self._pages[line] = 0
        self._spare_lines.append(line)

    def _grow(self, line: int, pages: int) -> None:
        if pages > self._table.shape[1]:
            wider = np.zeros((len(self._table), max(pages, 2 * self._table.shape[1])), dtype=np.int64)
            wider[:, : self._table.shape[1]] = self._table
            self._table = wider
        while self._pages[line] < pages:
            page = self._new_page()
            self._seen[page * PAGE : (page + 1) * PAGE] = _UNSEEN
            self._table[line, self._pages[line]] = page
            self._pages[line] += 1

    def _new_page(self) -> int:
        with self._lock:
            if self._free:
                return self._free.pop()
            if (self._fresh + 1) * PAGE > self.capacity:
                raise ArenaFull(
                    f"eyas capture: {self.capacity} rows are live and host memory for captured states is full; "
                    "lower the concurrency or raise arena_gb"
                )
            self._fresh += 1
            return self._fresh - 1


def default_limit() -> int:
    """Bytes: half of the machine's memory. It is taken only as rows arrive."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
