"""Checkpoints are whole or absent, of the same inputs or refused, and only the best and the newest stay."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.errors import EyasError, InputError
from eyas.recipe import TrainPart
from eyas.train import checkpoints
from eyas.train.checkpoints import directory_aside, load_optimizer, resumable, retain, seal, tidy, whole_checkpoints
from eyas.train.optimizers import build_optimizer

from .test_optimizers import Small, run

MADE_OF = {"data": "a", "vocabulary": "b"}


def write(root: Path, step: int, loss: float | None = None) -> Path:
    path = root / f"checkpoint-{step}"
    with directory_aside(path) as aside:
        (aside / "model.safetensors").write_bytes(b"weights" * step)
        seal(aside, step, MADE_OF, loss)
    return path


def steps(root: Path) -> list[int]:
    return [c.step for c in whole_checkpoints(root)]


def test_the_newest_whole_checkpoint_of_the_same_inputs(tmp_path: Path):
    assert resumable(tmp_path, MADE_OF) is None
    write(tmp_path, 9)
    write(tmp_path, 10)
    found = resumable(tmp_path, MADE_OF)
    assert found is not None
    assert found.step == 10


GARBAGE = {"bytes": b"\xff\xfe\x80", "other JSON": b"[1]", "another step": b'{"global_step": 4}'}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_a_garbled_loop_state_is_never_resumed(tmp_path: Path, garbage):
    write(tmp_path, 3)
    with directory_aside(tmp_path / "checkpoint-5") as aside:
        (aside / "model.safetensors").write_bytes(b"weights")
        (aside / "trainer_state.json").write_bytes(garbage)
        seal(aside, 5, MADE_OF, None)
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize("damage", [{"files": []}, {"files": {}}, {"files": 1}, {"step": "5"}, {"holdout_loss": "low"}])
def test_a_garbled_list_of_files_is_never_resumed(tmp_path: Path, damage):
    write(tmp_path, 3)
    about = write(tmp_path, 5) / "checkpoint.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | damage))
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize("damage", ["cut", "missing", "unsealed"])
def test_an_incomplete_checkpoint_is_never_resumed(tmp_path: Path, damage):
    write(tmp_path, 3)
    newest = write(tmp_path, 5)
    if damage == "cut":
        (newest / "model.safetensors").write_bytes(b"weigh")
    else:
        (newest / ("model.safetensors" if damage == "missing" else "checkpoint.json")).unlink()
    found = resumable(tmp_path, MADE_OF)
    assert found is not None
    assert found.step == 3
    tidy(tmp_path)
    assert not newest.exists()
    assert steps(tmp_path) == [3]


def test_nothing_is_visible_before_it_is_complete(tmp_path: Path):
    def stopped_while_writing() -> None:
        with directory_aside(tmp_path / "checkpoint-1") as aside:
            (aside / "model.safetensors").write_bytes(b"x")
            assert list(tmp_path.glob("checkpoint-*")) == []
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stopped_while_writing()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_kill_are_removed(tmp_path: Path):
    write(tmp_path, 2)
    for name in (".checkpoint-4.77.part", ".checkpoint-1.77.old"):
        (tmp_path / name).mkdir()
    tidy(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"]


def test_other_inputs_are_refused(tmp_path: Path):
    write(tmp_path, 2)
    with pytest.raises(InputError, match=r"checkpoint-2 was trained with other inputs: vocabulary changed") as e:
        resumable(tmp_path, {"data": "a", "vocabulary": "stale"})
    assert "delete" in str(e.value.fix)


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [2, 5]), (3, [2, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_best_and_newest_stay(tmp_path: Path, keep, left):
    for step, loss in enumerate([3.0, 1.0, 2.0, 1.5, 1.7], 1):
        write(tmp_path, step, loss)
    retain(tmp_path, keep)
    assert steps(tmp_path) == left
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"checkpoint-{s}" for s in left]


def test_newest_stay_without_held_out_samples(tmp_path: Path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    retain(tmp_path, 2)
    assert steps(tmp_path) == [2, 3]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_survive_exactly(tmp_path: Path, kind):
    part = TrainPart(optimizer=kind, lr=0.01)
    one, two = Small(), Small()
    first, second = build_optimizer(one, part), build_optimizer(two, part)
    run(one, first, 3)
    checkpoints.save(checkpoints.trained_weights(one), checkpoints.moments(one, first), tmp_path)
    checkpoints.load_weights(two, tmp_path)
    load_optimizer(two, second, tmp_path)
    assert run(one, first, 3) == run(two, second, 3)


def test_lost_moments_and_foreign_weights_are_refused(tmp_path: Path):
    model = Small()
    optimizer = build_optimizer(model, TrainPart())
    save_file({"fc.weight|step": torch.tensor(1.0)}, tmp_path / "optimizer.safetensors")
    with pytest.raises(EyasError, match=rf"no moments of norm\.weight\n  fix: delete {tmp_path} and run again"):
        load_optimizer(model, optimizer, tmp_path)
    save_file({"fc.weight": torch.zeros(4, 6)}, tmp_path / "model.safetensors")
    with pytest.raises(EyasError, match="does not hold this drafter's weights"):
        checkpoints.load_weights(model, tmp_path)
