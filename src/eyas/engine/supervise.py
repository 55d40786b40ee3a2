"""Runs a command; ends it and all it started when the parent goes away: python -m eyas.engine.supervise CMD...

The parent holds the other end of this process's standard input; its end (the parent closed it, or died, also by
kill -9) is the order to stop: SIGTERM to the command's process group, then SIGKILL to whatever is left of it. This
process is a "subreaper", so that orphans of the command stay in its sight. Exit status: the command's own, 143 when
it was told to stop.

`start` and `stop` are the parent's side.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

GRACE_SECONDS = 10.0
STOP_SECONDS = 30.0
"""the supervisor's time to end all that it watches"""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.2


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The supervisor of `command`, whose output goes to `log`. It is ended by `stop`, or by the end of this process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "eyas.engine.supervise", *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the command in order
        )


def stop(supervisor: subprocess.Popen[bytes]) -> None:
    """Ends the command and all it started, and waits for that."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    try:
        supervisor.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _in_child() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # should this supervisor itself be killed


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_group(group: int, grace: float = GRACE_SECONDS) -> None:
    """SIGTERM to a process group and what it started, SIGKILL to what is left after `grace` seconds."""
    mine = descendants(os.getpid())
    _signal_group(group, signal.SIGTERM)
    end = time.monotonic() + grace
    while time.monotonic() < end:
        _, mine = psutil.wait_procs(mine, timeout=_POLL_SECONDS)
        mine = list({*mine, *descendants(os.getpid())})
        if not mine:
            return
    _signal_group(group, signal.SIGKILL)
    for process in mine:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(mine, timeout=5)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def main(command: list[str]) -> int:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_in_child)
    try:
        while child.poll() is None:
            readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
            if readable and not os.read(0, 4096):
                break
    finally:
        status = child.poll()
        end_group(child.pid)
    if status is None:
        return 128 + signal.SIGTERM
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
