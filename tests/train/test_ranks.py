"""Two gloo ranks on the CPU: one step is the step of the global batch, and a rank without samples joins it."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.states.store import HarvestStore
from eyas.train.packing import make_schedule, trainable
from eyas.train.trainer import train

from . import ranked
from .tiny_run import tiny_recipe, tiny_run, tiny_target

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of ranked.RUNS, in one start of two ranks; each one's twin NAME-alone: a single rank, twice the batches."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("ranks")
    tiny_run(root / "base")
    processes = _start(root / "base")
    try:
        for name in ("ddp", "muon", "fsdp-head"):
            shutil.copytree(root / "base", root / f"{name}-alone")
            settings = {**ranked.SETTINGS, **ranked.RUNS[name]}
            settings |= {"accumulate": 2 * settings.get("accumulate", 1)}
            settings.pop("sharding", None)
            alone = RunDir(root / f"{name}-alone")
            train(tiny_recipe(alone.root, **settings), tiny_target(root / "alone"), alone, Progress(quiet=True))
        assert [p.wait(timeout=200) for p in processes] == [0, 0]
    finally:
        for p in processes:
            p.kill()
    return root


def _start(base: Path) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "train.ranked", str(base)]
    ranks = [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
    return [subprocess.Popen(command, cwd=TESTS, env=env) for env in ranks]


def entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "train" / "log.jsonl").read_text().splitlines()]


def without_time(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k != "seconds"} for e in log]


def numbers(entry: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in entry.items() if k not in ("kind", "seconds")}


def test_some_step_leaves_a_rank_without_samples(root: Path) -> None:
    refs = trainable(HarvestStore(RunDir(root / "base")).samples("train"))
    part = tiny_recipe(root, **ranked.SETTINGS).train
    schedule = make_schedule(refs, part.tokens_per_batch, part.epochs, part.seed, 2)
    assert any(not pack for step in schedule.steps for rank in step for pack in rank)


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("ddp", "ddp"),
        ("fsdp", "ddp"),
        ("resumed", "ddp"),
        ("muon", "muon"),
        ("fsdp-muon", "muon"),
        ("fsdp-head", "fsdp-head"),
    ],
)
def test_two_ranks_take_the_steps_of_one_rank_with_twice_the_batches(root: Path, name: str, twin: str) -> None:
    ours, theirs = entries(root / name), entries(root / f"{twin}-alone")
    assert [(e["kind"], e["step"]) for e in ours] == [(e["kind"], e["step"]) for e in theirs]
    for a, b in zip(map(numbers, ours), map(numbers, theirs), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    final = load_file(root / f"{twin}-alone" / "train" / "final" / "model.safetensors")
    found = load_file(root / name / "train" / "final" / "model.safetensors")
    assert found.keys() == final.keys()
    for key, value in final.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "muon", "fsdp-muon", "fsdp-head"])
def test_all_ranks_have_the_same_weights(root: Path, name: str) -> None:
    a, b = (load_file(root / name / f"rank{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(a[key], b[key]) for key in a)
    final = load_file(root / name / "train" / "final" / "model.safetensors")
    assert all(torch.equal(a[key], final[key]) for key in a)


def test_sharded_training_resumes_bit_for_bit(root: Path) -> None:
    assert without_time(entries(root / "resumed")) == without_time(entries(root / "fsdp"))
    ours, theirs = (load_file(root / n / "train" / "final" / "model.safetensors") for n in ("resumed", "fsdp"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_step_that_is_not_finite_is_refused_by_all_ranks_in_the_same_words(root: Path) -> None:
    ours, theirs = ((root / "broken" / f"error{rank}").read_text() for rank in range(2))
    assert ours == theirs
    assert re.search(r"not finite; .*samples .*part-0-0/0", ours)
