"""Ctrl-C as a wish: the first one is remembered, so that the step in work can end; the second one interrupts."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c(say: Callable[[str], None]) -> Iterator[threading.Event]:
    """The event is set by the first Ctrl-C; the second one interrupts at once. Only the main thread can catch it."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        asked.set()
        say("train: stopping after this step, with a checkpoint; Ctrl-C again stops at once")
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
