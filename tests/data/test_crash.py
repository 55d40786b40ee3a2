"""kill -9 in the middle of a harvest, again and again: the rerun does the missing work and nothing else."""

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from eyas.data.schema import part_files
from eyas.rundir import RunDir
from eyas.states.store import HarvestStore

from .conftest import write_prompts

KILLS, SAMPLES = 4, 150


def start(*arguments: Path) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("harvest_process.py")
    process = subprocess.Popen([sys.executable, str(script), *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def committed(run: RunDir) -> list[str]:
    return [i for part in part_files(run.samples) for i in pq.read_table(part)["id"].to_pylist()]


def test_killed_at_random_moments(tiny: Path, tmp_path: Path) -> None:
    moments = random.Random(20)
    run = RunDir(tmp_path / "run")
    prompts = write_prompts(tmp_path / "p.jsonl", SAMPLES)
    seen: set[str] = set()
    for kill in range(KILLS):
        process = start(tiny, run.root, prompts)
        while kill == KILLS - 1 and not committed(run):  # a slow machine may have got nowhere so far
            time.sleep(0.01)
        time.sleep(moments.uniform(0.05, 0.6))
        process.kill()
        process.wait()
        now = committed(run)
        assert seen <= set(now), "what was committed stays"
        assert len(set(now)) == len(now)
        seen = set(now)
    assert 0 < len(seen) < SAMPLES, "the kills came in the middle"
    process = start(tiny, run.root, prompts)
    out, _ = process.communicate(timeout=300)
    word, samples, asked = out.split()
    assert (word, int(samples)) == ("done", SAMPLES)
    assert int(asked) == SAMPLES - len(seen), "exactly the missing work"
    prepared = pq.read_table(run.prepared)["id"].to_pylist()
    assert Counter(committed(run)) == Counter(f"{i}/0" for i in prepared)
    store = HarvestStore(run)
    for ref in store.samples():
        assert len(store.load(ref).states) == ref.rows
    assert {p.stem for p in run.states.iterdir()} == {p.stem for p in part_files(run.samples)}
    assert not list(run.samples.glob(".*"))
