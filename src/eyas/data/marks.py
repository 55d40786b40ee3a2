"""A growing set of 64-bit numbers that takes 8 bytes for each, plus a bounded part."""

import numpy as np

_RECENT = 1 << 15


class Marks:
    """The marks seen so far: a sorted array, and the latest ones in a set until they are merged into it."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, np.uint64)
        self._recent: set[int] = set()

    def add(self, mark: int) -> bool:
        """False if it was there already."""
        if mark in self._recent:
            return False
        at = int(np.searchsorted(self._sorted, np.uint64(mark)))
        if at < len(self._sorted) and int(self._sorted[at]) == mark:
            return False
        self._recent.add(mark)
        if len(self._recent) >= max(_RECENT, len(self._sorted) >> 6):
            self._merge()
        return True

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def _merge(self) -> None:
        recent = np.fromiter(self._recent, np.uint64, len(self._recent))
        recent.sort()
        self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, recent), recent)
        self._recent.clear()
