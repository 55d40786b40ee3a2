"""kill -9 of client and server in the middle of a harvest, again and again: the rerun does exactly the missing work."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eyas.data.schema import part_files
from eyas.rundir import RunDir
from eyas.states.store import HarvestStore

from .conftest import write_prompts

KILLS, SAMPLES = 20, 400


class Nursery:
    """The process that forks clients and servers."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).with_name("crash_processes.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.folder, self.number = folder, 0
        assert self._line() == "imported"

    def start(self, kind: str, *args: object) -> tuple[int, Path]:
        """Process id and log."""
        self.number += 1
        log = self.folder / f"{self.number}-{kind}.log"
        return int(self._ask(kind, *args, log)), log

    def wait(self, pid: int) -> int:
        return int(self._ask("wait", pid, "-"))

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self.wait(pid) == -signal.SIGKILL

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def _ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\t".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    n = Nursery(tmp_path)
    yield n
    n.close()


def committed(run: RunDir) -> list[str]:
    return [i for part in part_files(run.samples) for i in pq.read_table(part, columns=["id"])["id"].to_pylist()]


def until(what: object, seconds: float = 60) -> None:
    assert callable(what)
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.005)


def test_client_and_server_killed_at_random_moments(tiny: Path, tmp_path: Path, nursery: Nursery) -> None:
    moments = random.Random(20)
    run, prompts = RunDir(tmp_path / "run"), write_prompts(tmp_path / "p.jsonl", SAMPLES)
    run.states.mkdir(parents=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def start_server() -> int:
        pid, log = nursery.start("server", tiny, run.states, port)
        until(lambda: log.exists() and log.read_text().endswith("ready\n"))
        return pid

    def start_client() -> tuple[int, Path]:
        return nursery.start("client", tiny, run.root, prompts, f"http://127.0.0.1:{port}")

    server = start_server()
    killed: Counter[str] = Counter()
    seen: set[str] = set()
    for kill in range(KILLS):
        client, log = start_client()
        parts = len(part_files(run.samples)) if kill % 2 else 0
        if kill % 2:  # in the middle of the answers, however slow the machine; else anywhere, the start included
            until(lambda: len(part_files(run.samples)) > parts)  # noqa: B023
        time.sleep(moments.uniform(0.0, 0.15))
        if moments.random() < 0.5:
            nursery.kill(client)
            killed["client"] += 1
        else:
            nursery.kill(server)
            killed["server"] += 1
            code, said = nursery.wait(client), log.read_text()
            if "the list of models" in said:  # it had not answered yet: its address may be wrong
                assert (code, said.split()[0]) == (2, "GivenServerError"), said
            else:
                assert (code, said.split()[0]) == (1, "EngineError"), said
            assert f"http://127.0.0.1:{port} failed" in said
            server = start_server()
        now = committed(run)
        assert seen <= set(now), "what was committed stays"
        assert len(set(now)) == len(now), "nothing twice"
        seen = set(now)
    assert min(killed["client"], killed["server"]) >= 5
    assert 0 < len(seen) < SAMPLES, "the kills came in the middle"
    nursery.kill(server)  # a shard of a client that is gone is not to appear any more
    server = start_server()
    client, log = start_client()
    assert nursery.wait(client) == 0, log.read_text()
    assert log.read_text().endswith(f"done {SAMPLES} {SAMPLES - len(seen)}\n"), "exactly the missing work"
    prepared = pq.read_table(run.prepared)["id"].to_pylist()
    assert Counter(committed(run)) == Counter(f"{i}/0" for i in prepared)
    store = HarvestStore(run)
    for ref in store.samples():
        assert len(store.load(ref).states) == ref.rows
    assert {p.stem for p in run.states.iterdir()} == {p.stem for p in part_files(run.samples)}
    assert not list(run.samples.glob(".*"))
