"""The train stage on a tiny harvest: it learns, resumes exactly after kill -9, and refuses what would be silent."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig

from eyas.draft.vocab import build_vocab
from eyas.errors import InputError, ProofError
from eyas.pipeline import STAGES, Run
from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.states.store import HarvestStore
from eyas.target.info import TargetInfo
from eyas.train import checkpoints, loop
from eyas.train.packing import rows_of
from eyas.train.previous import change_over
from eyas.train.trainer import train

from . import killed
from .tiny_run import DRAFT_VOCAB, VOCAB, tiny_harvest, tiny_recipe, tiny_run, tiny_target

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    tiny_run(root)
    return root


@pytest.fixture
def fresh(base: Path, tmp_path: Path) -> tuple[RunDir, TargetInfo]:
    """A copy of the prepared run, for one test."""
    shutil.copytree(base, tmp_path / "run")
    return RunDir(tmp_path / "run"), tiny_target(base / "target")


def go(fresh: tuple[RunDir, TargetInfo], **settings: Any) -> dict[str, Any]:
    run, target = fresh
    return train(tiny_recipe(run.root, **settings), target, run, Progress(quiet=True))


def entries(run: RunDir, kind: str = "step") -> list[dict[str, Any]]:
    lines = (run.train / "log.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["kind"] == kind]


def without_time(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k != "seconds"} for e in log]


def test_trains_and_leaves_a_whole_drafter(fresh):
    run, _ = fresh
    counts = go(fresh, epochs=12)
    log, held_out = entries(run), entries(run, "eval")
    assert counts["steps"] == len(log) == 12 * 4
    assert len(held_out) == 12
    assert log[-1]["loss"] < 0.5 * log[0]["loss"]
    assert {"accuracy_0", "conditional_1", "mean_length", "tokens", "supervised", "grad_norm", "lr"} <= log[0].keys()
    assert counts["held_out_loss"] == held_out[-1]["eval_loss"]
    assert {p.name: p.ok for p in run.proofs()} == {
        "train: weights are finite": True,
        "train: norm weights moved": True,
    }
    assert sorted(p.name for p in (run.train / "final").iterdir()) == ["config.json", "model.safetensors"]
    config = Eagle3SpeculatorConfig.from_pretrained(str(run.train / "final"))
    assert config.draft_vocab_size == DRAFT_VOCAB
    tensors = load_file(run.train / "final" / "model.safetensors")
    assert tensors["d2t"].shape == (DRAFT_VOCAB,)
    assert tensors["t2d"].shape == (VOCAB,)
    assert "lm_head.weight" in tensors
    assert not [n for n in tensors if n.startswith(("embed", "verifier"))]


@pytest.mark.parametrize(
    "settings",
    [{"draft": {"preset": "eagle3.1"}, "train_head": True}, {"optimizer": "muon"}, {"compute": "bfloat16", "lr": 1e-5}],
)
def test_every_trained_weight_moves_norms_included(fresh, settings):
    run, _ = fresh
    go(fresh, **{"epochs": 1, "lr": 1e-3, "save_every": 1, "keep": 99, **settings})
    first, last = (load_file(run.train / f"checkpoint-{s}" / "model.safetensors") for s in (1, 4))
    assert "norm.weight" in first
    assert [n for n in first if torch.equal(first[n], last[n])] == []
    assert all(t.dtype == torch.float32 for t in last.values())


def test_retention_keeps_the_newest_and_the_best(fresh):
    run, _ = fresh
    go(fresh, epochs=5, keep=2)
    losses = {e["step"]: e["eval_loss"] for e in entries(run, "eval")}
    best = min(losses, key=lambda s: losses[s])
    found = {c.step: c.holdout_loss for c in checkpoints.whole_checkpoints(run.train)}
    assert found.keys() == {best, 20} if best != 20 else len(found) == 2
    assert found[best] == losses[best]


def test_a_finished_run_is_not_trained_again(fresh):
    run, _ = fresh
    first = go(fresh, epochs=1)
    before = (run.train / "log.jsonl").read_text()
    assert go(fresh, epochs=1) == first
    assert (run.train / "log.jsonl").read_text() == before


@pytest.fixture(scope="module")
def uninterrupted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(base, root)
    train(killed.recipe(root), tiny_target(base / "target"), RunDir(root), Progress(quiet=True))
    return RunDir(root)


@pytest.fixture(scope="module")
def killed_runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs killed after step 5 (no checkpoint there), while checkpoint 6 is written, and just before its rename."""
    roots: dict[str, Path] = {}
    processes = []
    for where, step in (("log", 5), ("seal", 6), ("rename", 6)):
        roots[where] = tmp_path_factory.mktemp(where) / "run"
        shutil.copytree(base, roots[where])
        command = [sys.executable, "-m", "train.killed", str(roots[where]), where, str(step)]
        processes.append(subprocess.Popen(command, cwd=TESTS))
    codes = [p.wait(timeout=300) for p in processes]
    assert codes == [-signal.SIGKILL] * len(codes)
    return roots


@pytest.mark.parametrize("where", ["log", "seal", "rename"])
def test_kill_9_then_resume_gives_the_same_run_bit_for_bit(base, uninterrupted, killed_runs, where):
    run = RunDir(killed_runs[where])
    assert [c.step for c in checkpoints.whole_checkpoints(run.train)] == [3]
    train(killed.recipe(run.root), tiny_target(base / "target"), run, Progress(quiet=True))
    for kind in ("step", "eval"):
        assert without_time(entries(run, kind)) == without_time(entries(uninterrupted, kind))
    ours, theirs = (load_file(r.train / "final" / "model.safetensors") for r in (run, uninterrupted))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    assert not [p for p in run.train.iterdir() if p.name.startswith(".")]


def test_ten_kills_at_random_steps_give_the_same_run_bit_for_bit(base: Path, tmp_path: Path):
    whole, often = tmp_path / "whole", tmp_path / "often"
    for root in (whole, often):
        shutil.copytree(base, root)
    train(killed.recipe(whole, killed.OFTEN), tiny_target(base / "target"), RunDir(whole), Progress(quiet=True))
    steps = len(entries(RunDir(whole)))
    where = {w for w, _ in killed.kills(0, steps)}
    assert where == set(killed.WHERE)
    command = [sys.executable, "-m", "train.killed", str(often), "often", "0", str(steps)]
    assert subprocess.run(command, cwd=TESTS, timeout=300, check=False).returncode == 0
    for kind in ("step", "eval"):
        assert without_time(entries(RunDir(often), kind)) == without_time(entries(RunDir(whole), kind))
    ours, theirs = (load_file(r / "train" / "final" / "model.safetensors") for r in (often, whole))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_ctrl_c_saves_and_the_same_command_continues(fresh, monkeypatch):
    run, _ = fresh
    add = loop.Log.add

    def interrupting(self: loop.Log, entry: dict[str, Any]) -> None:
        add(self, entry)
        if entry["step"] == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.Log, "add", interrupting)
    with pytest.raises(KeyboardInterrupt):
        go(fresh)
    monkeypatch.setattr(loop.Log, "add", add)
    # the signal came after step 5's decision: step 6 is the last one
    assert checkpoints.whole_checkpoints(run.train)[-1].step == 6
    assert not (run.train / "final").exists()
    go(fresh)
    assert [e["step"] for e in entries(run)] == list(range(1, 13))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_last_step_is_not_forgotten(fresh, monkeypatch):
    run, _ = fresh
    add = loop.Log.add

    def interrupting(self: loop.Log, entry: dict[str, Any]) -> None:
        add(self, entry)
        if entry["step"] == 12 and entry["kind"] == "step":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.Log, "add", interrupting)
    with pytest.raises(KeyboardInterrupt):
        go(fresh)
    monkeypatch.setattr(loop.Log, "add", add)
    assert (run.train / "final").exists()
    go(fresh)
    assert [e["step"] for e in entries(run)] == list(range(1, 13))


@pytest.mark.parametrize("change", ["vocabulary", "data", "train settings", "draft settings", "target"])
def test_a_resume_with_other_inputs_is_refused(fresh, change):
    run, target = fresh
    go(fresh, epochs=1)
    settings: dict[str, Any] = {"epochs": 1}
    if change == "vocabulary":  # a stale d2t: the same size, other tokens
        tiny_harvest(run, seed=5)
        build_vocab(run, VOCAB, DRAFT_VOCAB)
        tiny_harvest(run)
    elif change == "data":
        tiny_harvest(run, train=3, holdout=1, seed=9, name="part-1")
    elif change == "train settings":
        settings["ttt_steps"] = 3
    elif change == "draft settings":
        settings["draft"] = {"intermediate_size": 40}
    else:
        target = tiny_target(run.root / "target", fingerprint="other")
    with pytest.raises(InputError, match=f"other inputs: .*{change}.* changed"):
        go((run, target), **settings)


def test_a_training_that_was_set_aside_continues_where_it_was(fresh):
    run, _ = fresh
    stop = iter([False] * 5 + [True] * 9)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(run.root), fresh[1], run, Progress(quiet=True), lambda: next(stop))
    steps = len(entries(run))
    said: list[str] = []
    change_over(run, "a", "b", said.append)
    assert not run.train.exists()
    go(fresh, epochs=1, lr=1e-2)
    change_over(run, "b", "a", said.append)
    assert len(entries(run)) == steps < 12
    assert go(fresh)["steps"] == 12
    assert [e["step"] for e in entries(run)] == list(range(1, 13))
    assert [line.split(" (")[0] for line in said[:2]] == ["train: the training of the earlier inputs"] * 2


def test_accumulated_batches_are_the_step_of_one_batch_that_holds_all(fresh):
    run, _ = fresh
    tiny_harvest(run, train=2, holdout=0)
    build_vocab(run, VOCAB, DRAFT_VOCAB)
    settings = {"epochs": 4, "step_decay": 0.8, "weight_decay": 0.1}
    go(fresh, tokens_per_batch=24, accumulate=2, **settings)
    ours, apart = load_file(run.train / "final" / "model.safetensors"), entries(run)
    shutil.rmtree(run.train)
    go(fresh, tokens_per_batch=48, **settings)
    theirs, together = load_file(run.train / "final" / "model.safetensors"), entries(run)
    assert len(apart) == len(together) == 4
    for a, b in zip(apart, together, strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-4)
        assert (a["tokens"], a["supervised"]) == (b["tokens"], b["supervised"])
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=2e-5)


def test_norms_that_never_move_are_found(fresh):
    """A learning rate below float32's resolution leaves norm weights near 1 as they are, and says nothing."""
    run, _ = fresh
    with pytest.raises(ProofError, match=r"norm\.weight.* is as it was before"):
        go(fresh, epochs=1, lr=1e-9)
    assert [p.ok for p in run.proofs()] == [True, False]
    assert not (run.train / "final").exists()


def test_retention_settings_may_change(fresh):
    go(fresh, epochs=1)
    go(fresh, epochs=1, keep=1, save_every=2)


def test_the_stage_is_not_stale_for_them_either(fresh):
    run, target = fresh
    stage = next(s for s in STAGES if s.name == "train")
    usual, kept, other = (
        stage.made_from(Run(tiny_recipe(run.root, **settings), target, run, Progress(quiet=True)))
        for settings in ({}, {"keep": 7, "save_every": 3, "eval_every": 2}, {"lr": 1e-2})
    )
    assert usual == kept != other


def test_a_step_that_is_not_finite_stops_before_the_optimizer(fresh):
    run, _ = fresh
    go(fresh, epochs=1, save_every=1, keep=9)
    shutil.rmtree(run.train / "checkpoint-4")
    shutil.rmtree(run.train / "checkpoint-3")
    before = load_file(run.train / "checkpoint-2" / "model.safetensors")
    shard = run.states / "part-0.safetensors"
    with safe_open(shard, "pt") as f:
        about = f.metadata()
    tensors = load_file(shard)
    tensors["states"][:, 0, 3] = float("nan")
    save_file(tensors, shard, about)
    with pytest.raises(ProofError, match=r"training step 3 \(epoch 1\).*not finite.*fc\.weight.*samples part-0-") as e:
        go(fresh, epochs=1, save_every=1, keep=9)
    assert str(e.value.fix).endswith("; checkpoint-2 is still good")
    assert [c.step for c in checkpoints.whole_checkpoints(run.train)] == [1, 2]
    after = load_file(run.train / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(after[n], before[n]) for n in before)
    shutil.rmtree(run.train)
    with pytest.raises(ProofError, match=r"(?s)training step 1 .*; there is no checkpoint yet$"):
        go(fresh, epochs=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens_per_batch": 16}, r"tokens_per_batch is 16, but sample part-0-\d+/0 alone has"),
        ({"draft": {"aux_layers": [1, 2, 3]}}, r"not after \[1\]"),
        ({"draft": {"vocab_size": 20}}, "maps 24 draft to 64 target tokens, expected 20 and 64"),
        ({"draft": {"from": "/nowhere"}}, r"draft\.from"),
    ],
)
def test_settings_that_cannot_work_are_refused(fresh, settings, message):
    with pytest.raises(InputError, match=message):
        go(fresh, **settings)


def test_the_budget_that_is_suggested_fits_both_splits(fresh):
    longest = {split: max(map(rows_of, HarvestStore(fresh[0]).samples(split))) for split in ("train", "holdout")}
    assert 16 < longest["holdout"] < longest["train"]  # a shorter held-out one must not be all that is named
    with pytest.raises(InputError, match=f"set train.tokens_per_batch to at least {longest['train']},"):
        go(fresh, tokens_per_batch=16)


def test_the_largest_seed_trains(fresh):
    assert go(fresh, epochs=1, seed=2**31 - 1)["steps"] == 4


def test_without_held_out_samples(fresh):
    run, _ = fresh
    tiny_harvest(run, holdout=0)
    build_vocab(run, VOCAB, DRAFT_VOCAB)
    assert go(fresh, epochs=1)["held_out_loss"] is None
