"""The wish to stop: the first signal is remembered, so that the step in work can end; the second one interrupts."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what a cluster's scheduler sends before it kills, and a terminal that goes away"""


@contextmanager
def wish_to_stop(say: Callable[[str], None]) -> Iterator[threading.Event]:
    """The event is set by the first signal; the second one does what it did before. Only the main thread can catch
    them."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(*_: object) -> None:
        asked.set()
        say("train: stopping after this step, with a checkpoint; Ctrl-C again stops at once")
        restore()

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        restore()
