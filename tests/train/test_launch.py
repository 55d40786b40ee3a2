"""torchrun's ranks as one run: the same result as one rank, one message, Ctrl-C, and no process left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import EyasError, InputError, ProofError
from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.train import checkpoints, launch, rank, trainer

from .launched import SETTINGS
from .tiny_run import tiny_recipe, tiny_run, tiny_target

TESTS = Path(__file__).resolve().parent.parent


def start(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "train.launched", str(root)]
    return subprocess.Popen(
        command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def log(run: RunDir) -> list[dict[str, Any]]:
    file = run.train / "log.jsonl"
    return [json.loads(x) for x in file.read_text().splitlines() if x.endswith("}")] if file.exists() else []


def until(said: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < end
        time.sleep(0.02)


def ranks_of(root: Path) -> list[int]:
    everyone = psutil.process_iter(["cmdline"])
    return [p.pid for p in everyone if "eyas.train.rank" in (x := " ".join(p.info["cmdline"] or [])) and str(root) in x]


def test_ctrl_c_then_the_same_command_ends_as_one_rank_would(tmp_path: Path) -> None:
    run, target = tiny_run(tmp_path / "run")
    first = start(run.root)
    until(lambda: len(log(run)) > 2)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert "train: stopping after this step" in err
    step = checkpoints.whole_checkpoints(run.train)[-1].step
    assert max(e["step"] for e in log(run)) == step < 36
    assert not (run.train / "final").exists()
    second = start(run.root)
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert f"train: continuing after step {step}" in err
    assert "Traceback" not in err
    assert not (run.root / ".ranks").exists()
    assert all(p.ok for p in run.proofs())

    alone = RunDir(tmp_path / "alone")
    shutil.copytree(run.root, alone.root, ignore=shutil.ignore_patterns("train", "proofs.json"))
    torch.set_num_threads(1)
    recipe = tiny_recipe(alone.root, accumulate=2, **SETTINGS)
    counts, theirs = trainer.train(recipe, target, alone, Progress(quiet=True)), json.loads(out)
    assert counts.keys() == theirs.keys()
    assert counts["steps"] == theirs["steps"]
    steps = [[e for e in log(r) if e["kind"] == "step"] for r in (run, alone)]
    assert len(steps[0]) == len(steps[1]) == counts["steps"]
    assert [e["loss"] for e in steps[0]] == pytest.approx([e["loss"] for e in steps[1]], rel=1e-3)
    assert [e["tokens"] for e in steps[0]] == [e["tokens"] for e in steps[1]]
    ours, single = (load_file(r.train / "final" / "model.safetensors") for r in (run, alone))
    assert ours.keys() == single.keys()


def test_kill_9_of_the_launching_process_ends_every_rank(tmp_path: Path) -> None:
    run, _ = tiny_run(tmp_path / "run")
    process = start(run.root)
    until(lambda: len(ranks_of(run.root)) >= 2)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    until(lambda: not ranks_of(run.root), 20)


def test_a_rank_that_says_nothing_is_told_with_the_last_lines_of_its_log(tmp_path: Path, monkeypatch) -> None:
    run, target = tiny_run(tmp_path / "run")
    ended = [sys.executable, "-c", "import sys; print('killed by the kernel'); sys.exit(9)"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: popen([*command[:3], *ended], **rest))
    with pytest.raises(EyasError, match=r"exit status 9 and said nothing[^$]*killed by the kernel"):
        launch.train_in_ranks(tiny_recipe(run.root), target, run, Progress(quiet=True), 2)


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (InputError("too long", fix="shorten it"), InputError, "too long\n  fix: shorten it"),
        (ProofError("not finite"), ProofError, "not finite"),
        (OSError(28, "No space left on device", "/x"), EyasError, "No space left on device: /x"),
        (ValueError("odd\nsecond line"), EyasError, "a training rank ended with ValueError: odd\n  fix: look at"),
    ],
)
def test_a_ranks_error_is_one_message(tmp_path, monkeypatch, raised, kind, message):
    files = rank.RankFiles(tmp_path)
    target = tiny_target(tmp_path / "target")
    files.write_job(rank.Job(tiny_recipe(tmp_path, draft={"from": "/nowhere"}), target))
    assert files.read_job().target == target
    assert files.read_job().recipe == tiny_recipe(tmp_path, draft={"from": "/nowhere"})
    monkeypatch.setenv("RANK", "1")
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)

    def fails(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(trainer, "train", fails)
    rank.main(str(tmp_path))
    assert codes == [1]
    files.write_error(0, RuntimeError("connection closed by peer"))  # rank 0 was left alone
    os.utime(tmp_path / "error-0.json", (1, 1))
    if kind is not EyasError or isinstance(raised, OSError):
        with pytest.raises(kind) as e:
            launch._result(files, tmp_path / "train.log", 1)
    else:
        (tmp_path / "error-0.json").unlink()
        with pytest.raises(EyasError) as e:
            launch._result(files, tmp_path / "train.log", 1)
    assert type(e.value) is kind
    assert str(e.value).startswith(message)


SAID = """Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -{number} (pid: 5974)  (SIG)
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 5973)
"""


@pytest.mark.parametrize(
    ("number", "errors", "said"),
    [
        (
            9,
            [RuntimeError("Read error: Connection reset by peer. GLHF!")],
            "training rank 1 was killed (signal 9, SIGKILL)",
        ),
        (11, [RuntimeError("Read error")], "training rank 1 was killed (signal 11, SIGSEGV)"),
        (6, [], "training rank 1 was killed (signal 6, SIGABRT)"),
        (6, [ValueError("odd")], "a training rank ended with ValueError: odd"),
        (9, [ProofError("not finite")], "not finite"),
    ],
)
def test_a_killed_rank_is_told_before_the_connection_that_others_lost(tmp_path, number, errors, said):
    files, log = rank.RankFiles(tmp_path), tmp_path / "train.log"
    log.write_text(SAID.format(number=number))
    for error in errors:
        files.write_error(0, error)
    with pytest.raises(EyasError) as e:
        launch._result(files, log, 1)
    assert e.value.message == said
    if "killed" in said:
        assert "the same command continues from the last checkpoint" in str(e.value.fix)
        assert ("out of memory" in str(e.value.fix)) == (number == 9)


def test_kill_9_of_a_rank_is_what_is_told(tmp_path: Path) -> None:
    run, _ = tiny_run(tmp_path / "run")
    process = start(run.root)
    until(lambda: len(log(run)) > 2)
    os.kill(max(ranks_of(run.root)), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was killed (signal 9, SIGKILL)" in err


def test_more_ranks_than_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    recipe, target = tiny_recipe(tmp_path), tiny_target(tmp_path / "target")
    with pytest.raises(InputError, match=r"--nproc 3: this machine has 2 GPU\(s\)"):
        launch.train_stage(recipe, target, RunDir(tmp_path), Progress(quiet=True), 3)


@pytest.mark.parametrize(("gpus", "nproc", "ranks"), [(0, None, 1), (1, None, 1), (4, None, 4), (4, 1, 1), (0, 2, 2)])
def test_how_many_ranks(tmp_path, monkeypatch, gpus, nproc, ranks):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(trainer, "train", lambda *_: {"ranks": 1})
    monkeypatch.setattr(launch, "train_in_ranks", lambda *args: {"ranks": args[-1]})
    recipe, target = tiny_recipe(tmp_path), tiny_target(tmp_path / "target")
    assert launch.train_stage(recipe, target, RunDir(tmp_path), Progress(quiet=True), nproc) == {"ranks": ranks}
