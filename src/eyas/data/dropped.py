"""Rows that cannot be used: counted by reason, with examples in a file and a table."""

import json
from collections import Counter
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from eyas.errors import InputError

EXAMPLES = 100
"""rows of one reason written to the file; all are counted"""


class Dropped:
    """Writes examples to `file` as JSON lines {"reason", "place", "detail", "excerpt"}."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, reason: str, place: str, detail: str, value: Any = None) -> None:
        self.counts[reason] += 1
        first = f"{place}: {detail}" if detail else place
        self.first.setdefault(reason, first.encode("utf-8", "backslashreplace").decode())
        if self.counts[reason] <= EXAMPLES:
            line = {"reason": reason, "place": place, "detail": detail, "excerpt": _excerpt(value)}
            self._file.write(json.dumps(line) + "\n")

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> list[str]:
        """One line for each reason, the most frequent first."""
        return [f"{n:,} x {reason} (first: {self.first[reason]})" for reason, n in self.counts.most_common()]

    def print(self, console: Console) -> None:
        if not self.counts:
            return
        table = Table("dropped", "rows", "first one", title="Rows left out", title_justify="left")
        for reason, n in self.counts.most_common():
            table.add_row(_plain(reason), f"{n:,}", _plain(self.first[reason]))
        console.print(table)


def judge(names: list[str], read: int, used: int, duplicates: int, dropped: Dropped, fix: str) -> None:
    """Raises InputError when there is nothing to work with, or more bad rows than good ones (duplicates are good)."""
    where, bad = ", ".join(names), dropped.total
    if read == 0:
        raise InputError(f"{where} holds no row", fix="give a file with at least one conversation")
    reasons = "".join(f"\n  {line}" for line in dropped.lines())
    if used == 0:
        raise InputError(f"no usable row in {where}: {bad:,} of {read:,} dropped{reasons}", fix=fix)
    if bad > used + duplicates:
        raise InputError(f"more bad rows than good ones in {where}: {bad:,} of {read:,}{reasons}", fix=fix)


def _excerpt(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value))
    return text if len(text) <= 300 else text[:297] + "..."


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
