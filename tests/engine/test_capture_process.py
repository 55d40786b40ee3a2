"""The filing process beside the engine: its shards hold what it was given; and what happens when one of both dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from eyas.engine.capture_process import FilingProcess
from eyas.engine.capture_sizes import RING
from eyas.engine.capture_steps import Books, Finished, Scheduled
from eyas.states.shard import Shard

from .fake_tap import FakeTap, H, L, some_rows

STEPS, REQUESTS = 50, 6


def one_row_each(step: int) -> Scheduled:
    found = Scheduled()
    for i in range(REQUESTS):
        found.add(f"r{i}", step, 1, 0, [])
    return found


def until(true: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_many_steps_come_out_as_they_went_in(tmp_path: Path, dtype: torch.dtype) -> None:
    tap = FakeTap(torch.zeros(REQUESTS, L, H, dtype=dtype))
    filing = FilingProcess(tap, block_size=16, arena_bytes=1 << 22)
    want = some_rows(STEPS * REQUESTS, dtype=dtype).view(STEPS, REQUESTS, L, H)
    order = torch.arange(REQUESTS - 1, -1, -1)  # the runner's order of rows is another than the scheduler's
    for step in range(STEPS):
        tap.rows.copy_(want[step][order])
        tap.numbers[0], tap.numbers[1] = step, 100 + step
        filing.step(one_row_each(step), order.tolist(), None, REQUESTS)
    path = str(tmp_path / "s.safetensors")
    tokens = np.arange(100, 101 + STEPS, dtype=np.int32)
    filing.books(Books([Finished(f"r{i}", tokens, 1, path) for i in range(REQUESTS)], closed=[path]))
    filing.stop()
    shard = Shard(Path(path))
    for i in range(REQUESTS):
        sample = shard.sample(i)
        assert torch.equal(sample.states, want[:, i])
        assert (sample.missing_rows, shard.requests[i]["bad_rows"]) == (0, 0)


def test_a_shard_appears_without_another_step(tmp_path: Path) -> None:
    filing = FilingProcess(FakeTap(some_rows(2)), 16, 1 << 22)
    path = tmp_path / "s.safetensors"
    filing.step(Scheduled(["a"], [0], [2], [0], [0]), [0], None, 2)
    filing.books(Books([Finished("a", np.arange(3, dtype=np.int32), 1, str(path))], closed=[str(path)]))
    filing.hand_over(wait=True)
    until(path.exists)
    filing.stop()


def test_when_the_filing_process_dies_every_open_shard_is_told_of_and_the_engine_goes_on(tmp_path: Path) -> None:
    filing = FilingProcess(FakeTap(some_rows(2)), 16, 1 << 22)
    closed, later = str(tmp_path / "closed.safetensors"), str(tmp_path / "later.safetensors")
    os.kill(filing._process.pid, signal.SIGSTOP)  # so that it does not write what it is told to
    filing.books(Books([Finished("a", np.arange(3, dtype=np.int32), 1, closed)], closed=[closed]))
    filing.hand_over(wait=True)
    os.kill(filing._process.pid, signal.SIGKILL)
    until(Path(closed + ".error").exists)
    for step in range(2 * RING):
        filing.step(Scheduled(["a"], [step], [1], [0], [0]), [0], None, 1)
    filing.books(Books([Finished("b", np.arange(3, dtype=np.int32), 1, later)], closed=[later]))
    for path in (closed, later):
        assert "exit code -9" in Path(path + ".error").read_text()
    filing.stop()


def test_the_filing_process_ends_with_the_engine_and_heeds_no_signal_of_the_terminal(tmp_path: Path) -> None:
    code = (
        "import sys, time, torch\n"
        "from tests.engine.fake_tap import FakeTap, some_rows\n"
        "from eyas.engine.capture_process import FilingProcess\n"
        "filing = FilingProcess(FakeTap(some_rows(2)), 16, 1 << 22)\n"
        "print(filing._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).resolve().parents[2]
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root)
    assert engine.stdout is not None
    filer = psutil.Process(int(engine.stdout.readline()))
    filer.send_signal(signal.SIGINT)
    filer.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert filer.is_running()
    engine.kill()
    engine.wait()
    filer.wait(10)


def test_a_filing_process_that_cannot_start_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        FilingProcess(FakeTap(some_rows(2)), 16, 1 << 22)
