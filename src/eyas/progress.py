"""Progress for people, on stderr: bars with rates and time left on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

LINE_EVERY = 10.0
"""seconds between two lines of one task where no bar can be drawn"""


ENOUGH = 0.1
"""share of the work after which its rate says how long the rest takes"""


class Task:
    """One long piece of work. `advance` counts units; further counts (tokens=...) are shown as rates."""

    def __init__(self, owner: "Progress", name: str, total: int | None, unit: str, done: int) -> None:
        self._owner, self._name, self._total, self._unit = owner, name, total, unit
        self._first, self.done = done, done
        self._rates: dict[str, float] = {}
        self._note = ""
        self._start = self._shown = time.monotonic()
        self._bar = owner.bars.add_task(name, total=total, completed=done, note="") if owner.bars else None

    def advance(self, units: int = 1, *, note: str | None = None, **counted: float) -> None:
        self.done += units
        for key, value in counted.items():
            self._rates[key] = self._rates.get(key, 0) + value
        if note is not None:
            self._note = note
        if self._owner.bars and self._bar is not None:
            self._owner.bars.update(self._bar, completed=self.done, note=self._details())
        elif time.monotonic() - self._shown >= LINE_EVERY:
            self._shown = time.monotonic()
            self._owner.say(self._line())

    def _details(self) -> str:
        passed = max(time.monotonic() - self._start, 1e-9)
        rates = [f"{value / passed:,.0f} {key.replace('_', ' ')}/s" for key, value in self._rates.items()]
        return "  ".join([*rates, self._note] if self._note else rates)

    def _line(self) -> str:
        passed = time.monotonic() - self._start
        fresh = self.done - self._first
        left = ""
        if self._total and fresh >= ENOUGH * (self._total - self._first):
            left = f", {passed / fresh * (self._total - self.done):,.0f} s left"
        of = f"/{self._total:,}" if self._total else ""
        return f"{self._name}: {self.done:,}{of} {self._unit}  {self._details()}{left}"


@contextmanager
def own_bars_only() -> Iterator[None]:
    """transformers and the hub client draw no bars of theirs meanwhile."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


class Progress:
    """Where the pipeline reports. `quiet` silences bars and lines (errors still reach the user as exceptions)."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.bars: Bars | None = None
        self._draws = sys.stderr.isatty() and not quiet

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, name: str, *, total: int | None, unit: str, done: int = 0) -> Iterator[Task]:
        """A bar (or lines) while the block runs; `done` units were there before it began."""
        if not self._draws or self.bars is not None:
            yield Task(self, name, total, unit, done)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
        times = (
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bars(*columns, *times, console=self.console) as self.bars:
            try:
                yield Task(self, name, total, unit, done)
            finally:
                bars, self.bars = self.bars, None
                bars.refresh()
