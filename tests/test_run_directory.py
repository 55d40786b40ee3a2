"""A run directory that somebody damaged: what is lost is made again, what cannot be read is named with its fix."""

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from eyas import pipeline
from eyas.cli import A_FAULT, _reported, app
from eyas.data.committed import Committed
from eyas.data.parts import harvest_files, read_part, write_part
from eyas.data.schema import HARVESTED
from eyas.data.set_aside import set_aside
from eyas.draft.inputs import draft_inputs
from eyas.errors import EyasError, InputError, disk_error
from eyas.files import write_json, written_aside
from eyas.pipeline import STAGES, Run, Stage, _keep_previous, _run_one, run_stages
from eyas.products import Products
from eyas.progress import Progress
from eyas.recipe import DraftPart, Recipe
from eyas.report.data_estimate import _harvested
from eyas.report.machine import Machine
from eyas.report.show import _samples
from eyas.rundir import Proof, RunDir, StageRecord
from eyas.states.shard import Shard, ShardSample, write_shard
from eyas.target.resolve import resolve_target
from eyas.train.checkpoints import directory_aside, seal, whole_checkpoints

SETTINGS = b"s"


def add_part(run: RunDir, stem: str, indices: tuple[int, ...] = (0, 1), settings: bytes = SETTINGS) -> Path:
    """A part as a harvest commits it; index -1: the answer was dropped."""
    rows = [
        {
            "id": f"{stem}-{n}/0",
            "conversation": f"{stem}-{n}",
            "turn": 0,
            "source": "p",
            "split": "train" if index >= 0 else "dropped",
            "token_ids": [1, 2, 3],
            "prompt_length": 1,
            "loss_mask": [False, True, True],
            "logprobs": [-1.0, -1.0],
            "finish_reason": "stop",
            "shard": f"{stem}.safetensors" if index >= 0 else "",
            "index": index,
            "rows": 2,
            "supervised": 2,
            "looped": 0,
        }
        for n, index in enumerate(indices)
    ]
    proof = json.dumps({"worst": 0.0, "total": 0.0, "n": 2, "allowed": [0.0, 0.0]}).encode()
    schema = HARVESTED.with_metadata({b"eyas.harvest": settings, b"eyas.proof": proof})
    part = run.samples / f"{stem}.parquet"
    part.parent.mkdir(parents=True, exist_ok=True)
    write_part(pa.Table.from_pylist(rows, schema=schema), part)
    kept = sum(i >= 0 for i in indices)
    if kept:
        one = ShardSample(torch.zeros(2, 1, 4), torch.tensor([1, 2, 3]), 1, 0)
        write_shard(run.states / f"{stem}.safetensors", [3], [one] * kept, ["r"] * kept)
    return part


def fill(run: RunDir, stage: str) -> None:
    """Every product of a stage, as far as its presence is looked at."""
    if stage == "harvest":
        add_part(run, "a")
        return
    further = [run.train / "final" / "config.json"] if stage == "train" else []
    for path in [*next(s for s in STAGES if s.name == stage).products(run), *further]:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.table({"turns": [1]}), path)
        else:
            path.write_text("{}")


@pytest.fixture
def done(tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs all stages with stand-ins that only write their products; returns the names of those that ran."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "good day"}\n')
    made = Recipe.model_validate(
        {
            "run_dir": str(tmp_path / "run"),
            "target": {"path": str(smollm2)},
            "data": {"prompts": str(tmp_path / "p.jsonl")},
        }
    )
    run = Run(made, resolve_target(str(smollm2)), RunDir(tmp_path / "run"), Progress())
    ran: list[str] = []

    def stand_in(stage: Stage) -> Stage:
        def work(run: Run) -> dict[str, Any]:
            ran.append(stage.name)
            fill(run.dir, stage.name)
            if stage.name in ("harvest", "train", "verify"):
                run.dir.write_proofs([Proof(stage.name, True, "1", "1")])
            return {}

        return replace(stage, work=work)

    monkeypatch.setattr("eyas.pipeline.STAGES", tuple(stand_in(s) for s in STAGES))
    monkeypatch.setattr("eyas.pipeline.write_report", lambda *_: None)

    def again(first: str = "prepare") -> list[str]:
        ran.clear()
        run_stages(run, first, "verify")
        return list(ran)

    assert again() == [s.name for s in STAGES]
    assert again() == []
    return again


@pytest.mark.parametrize("stage", [s.name for s in STAGES if s.name != "harvest"])
def test_a_stage_whose_product_is_gone_is_made_again(
    done: Callable[..., list[str]], tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for product in next(s for s in STAGES if s.name == stage).products(RunDir(tmp_path / "run")):
        product.unlink()
        assert done() == [stage]
        assert f"{product.name} is missing or damaged, made again" in capsys.readouterr().err
        if product.suffix in (".json", ".parquet"):
            product.write_text("garbage")
            assert done() == [stage]


@pytest.mark.parametrize("text", ["{", "[]", "", None])
def test_damaged_proofs_are_written_again(
    done: Callable[..., list[str]], tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    proven = run.proofs()
    assert [p.name for p in proven] == ["harvest", "train", "verify"]
    if text is None:
        run.proofs_json.unlink()
    else:
        run.proofs_json.write_text(text)
    assert done() == []
    assert run.proofs() == proven
    assert ("proofs.json: written again from run.json" in capsys.readouterr().err) == (text != "[]")
    run.verify_json.unlink()
    assert done() == ["verify"]
    assert run.proofs() == proven


@pytest.mark.parametrize(
    ("stage", "file", "way"),
    [
        ("prepare", "samples/prepared.parquet", "zeros"),
        ("harvest", "samples/a.parquet", "zeros"),
        ("vocab", "vocab/vocab.safetensors", "cut"),
        ("train", "train/final/model.safetensors", "zeros"),
        ("train", "train/final/config.json", "longer"),
        ("export", "drafter/vllm/model.safetensors", "zeros"),
        ("export", "drafter/vllm/config.json", "longer"),
        ("verify", "verify.json", "cut"),
    ],
)
def test_a_changed_product_is_made_again(
    done: Callable[..., list[str]], tmp_path: Path, stage: str, file: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run" / file
    was = path.read_bytes()
    path.write_bytes({"zeros": bytes(len(was)), "cut": was[:-1], "longer": was + b" "}[way])
    assert done() == [stage]
    assert f"{stage}: {file} is missing or damaged, made again" in capsys.readouterr().err
    assert path.read_bytes() == was
    assert done() == []


def test_a_cut_file_of_states_is_harvested_again(done: Callable[..., list[str]], tmp_path: Path) -> None:
    path = tmp_path / "run" / "states" / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert done() == ["harvest"]


def test_a_copied_run_is_unchanged(
    done: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.products.LARGE", 0)
    for path in (tmp_path / "run").rglob("*.*"):
        if path.is_file():
            os.utime(path)
    assert done() == []
    (tmp_path / "run" / "drafter" / "vllm" / "model.safetensors").write_text("[]")
    assert done() == ["export"]


@pytest.mark.parametrize("text", ["{", '{"x": 1}', None])
def test_products_that_are_not_recorded_are_recorded_again(
    done: Callable[..., list[str]], tmp_path: Path, text: str | None
) -> None:
    record = tmp_path / "run" / ".products" / "export.json"
    was = record.read_text()
    if text is None:
        record.unlink()
    else:
        record.write_text(text)
    assert done() == []
    assert record.read_text() == was


def test_the_stage_before_lost_its_product(done: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "run" / "vocab" / "vocab.json").unlink()
    with pytest.raises(InputError, match=r"train needs stage vocab, which lost vocab\.json"):
        done("train")


@pytest.mark.parametrize("file", ["samples/a.parquet", "states/a.safetensors"])
def test_a_harvest_that_lost_a_file_is_made_again(done: Callable[..., list[str]], tmp_path: Path, file: str) -> None:
    (tmp_path / "run" / file).unlink()
    assert done() == ["harvest"]
    (tmp_path / "run" / "samples" / "a.parquet").write_text("garbage")
    assert done() == ["harvest"]
    for part in (tmp_path / "run").glob("s*/a.*"):
        part.unlink()
    assert done() == ["harvest"]


def test_a_part_of_dropped_answers_needs_no_shard(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    part = add_part(run, "d", (-1, -1))
    assert harvest_files(run) == [part]


def test_recovery_drops_lost_and_unreadable_parts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    whole, lost, torn = (add_part(run, name) for name in ("a", "b", "c"))
    (run.states / "b.safetensors").unlink()
    torn.write_text("garbage")
    committed = Committed(run, SETTINGS.decode(), [3])
    notes = "\n".join(committed.recover())
    assert "1 sample files of 2 samples are harvested again: their states are gone" in notes
    assert "c.parquet is not a whole file of samples" in notes
    assert len(committed) == 2
    assert [whole.exists(), lost.exists(), torn.exists()] == [True, False, False]


def test_samples_of_other_settings_are_set_aside_and_taken_up_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    parts = [add_part(run, name) for name in ("a", "b")]
    before = {p: p.read_bytes() for p in [*parts, *run.states.iterdir()]}
    other = Committed(run, "../../elsewhere", [3])
    notes = other.recover()
    assert "4 samples of other settings" in notes[0]
    assert len(other) == 0
    assert not any(p.exists() for p in before)
    inside = {p for p in tmp_path.rglob("*") if p.is_file()}
    assert len(inside) == len(before)
    add_part(run, "c", settings=b"../../elsewhere")
    again = Committed(run, SETTINGS.decode(), [3])
    notes = again.recover()
    assert "taking up 2 sample files" in notes[0]
    assert "2 samples of other settings" in notes[1]
    assert len(again) == 4
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize("same", [True, False], ids=["the same settings", "other settings"])
def test_killed_while_samples_were_set_aside_or_brought_back(tmp_path: Path, same: bool) -> None:
    """Either way the part alone is in its place: its shard goes first, and comes back last."""
    run, settings = RunDir(tmp_path), SETTINGS.decode()
    part = add_part(run, "a")
    set_aside(run, part, settings)
    os.replace(next((run.samples / "previous").rglob("a.parquet")), part)
    if not same:
        Committed(run, "other", [3]).recover()
        assert not part.exists()
    again = Committed(run, settings, [3])
    again.recover()
    assert len(again) == 2
    assert (run.states / "a.safetensors").exists()


@pytest.mark.parametrize("at", [8, 300, 600, -300, -20])
def test_zeroed_bytes_of_a_part_are_noticed(tmp_path: Path, at: int) -> None:
    run = RunDir(tmp_path)
    part = add_part(run, "a")
    was = bytearray(part.read_bytes())
    was[at : at + 16] = bytes(16)
    part.write_bytes(was)
    with pytest.raises(EyasError, match=r"a\.parquet is not a whole file of samples"):
        read_part(part)
    with pytest.raises(EyasError, match=r"a\.parquet is not a whole file of samples"):
        list(_samples(run, None))
    assert "1 sample files are harvested again" in Committed(run, SETTINGS.decode(), [3]).recover()[0]
    assert not part.exists()


def test_the_estimate_passes_over_an_unreadable_part(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    add_part(run, "a")
    add_part(run, "b").write_text("garbage")
    found = _harvested(run)
    assert found is not None
    assert found.samples == 2


def test_a_missing_shard_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"(?s)x is not there.*run `eyas harvest RECIPE` again: it asks the missing"):
        Shard(tmp_path / "x")


def test_run_dir_is_a_file(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "good day"}\n')
    (tmp_path / "run").write_text("")
    for run_dir in (tmp_path / "run", tmp_path / "run" / "below"):
        path = tmp_path / "recipe.yaml"
        data = {"prompts": str(tmp_path / "p.jsonl"), "max_length": 256}
        path.write_text(yaml.safe_dump({"run_dir": str(run_dir), "target": {"path": str(smollm2)}, "data": data}))
        result = CliRunner().invoke(app, ["prepare", str(path), "--set", "engine.sampling.max_tokens=32"])
        assert result.exit_code == 2, result.output
        assert f"run_dir {run_dir} cannot be used" in result.stderr
        planned = CliRunner().invoke(app, ["plan", str(path), "--set", "engine.sampling.max_tokens=32", "--json"])
        assert planned.exit_code == 2
        assert [p["fix"] for p in json.loads(planned.stdout)["problems"]] == [
            "give a new or empty directory in run_dir"
        ]


def test_places_where_no_run_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, others = tmp_path / "home", tmp_path / "others"
    home.mkdir()
    others.mkdir()
    (others / "recipe.yaml").touch()
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(home))
    for place, why in [
        (Path("/"), "it is the root of all directories"),
        (home, "it is the home directory"),
        (others, r"it holds other files \(recipe\.yaml\) and is no run of eyas"),
        (tmp_path, r"it holds other files \(file, \.\.\.\)"),
        (tmp_path / "file", "it is a file"),
        (tmp_path / "file" / "x", r".*file is a file"),
        (tmp_path / ("x" * 300), "File name too long"),
    ]:
        with pytest.raises(InputError, match=f"cannot be used: {why}(?s:.*)fix: give a new or empty directory"):
            RunDir(place).check_place()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError), RunDir(others).locked():
        pass
    assert sorted(tmp_path.rglob("*")) == before
    run = RunDir(home / "new" / "run")
    for _ in range(2):  # not there; then with nothing but its lock
        with run.locked():
            pass
    write_json(run.run_json, {"stages": {}})
    (run.root / "x").touch()
    run.check_place()


@pytest.mark.parametrize("text", ["{", "[1]", '{"stages": {"train": {"what": 1}}}', '{"stages": 3}', "\x00\xff"])
def test_damaged_records_are_named(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path)
    reads: dict[Path, Callable[[], object]] = {
        run.run_json: lambda: run.record("train"),
        run.target_json: run.owner,
        run.proofs_json: run.proofs,
    }
    for path, read in reads.items():
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(InputError, match=rf"{path.name} is (damaged|not valid JSON)") as e:
            read()
        assert ("written anew" if path == run.proofs_json else "delete it") in (e.value.fix or "")


def test_verifying_again_leaves_the_drafter(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (run.drafter / "vllm").mkdir(parents=True)
    write_json(run.verify_json, {})
    run.write_record("verify", StageRecord("f", "done", finished="t"))
    _keep_previous(run, "verify")
    assert (run.drafter / "vllm").is_dir()
    assert (tmp_path / "previous" / "t" / "drafter" / "vllm").is_dir()
    assert not run.verify_json.exists()


@dataclass
class Trainings:
    """A run whose train stage only writes a checkpoint of so many steps, then final/ unless it is interrupted."""

    run: Run
    steps: int = 5
    interrupted: bool = False

    def again(self, first: str = "train", **settings: object) -> None:
        recipe = self.run.recipe
        changed = recipe.model_copy(update={"train": recipe.train.model_copy(update=settings)})
        run_stages(replace(self.run, recipe=changed), first, "train")

    def work(self, run: Run) -> dict[str, Any]:
        found = whole_checkpoints(run.dir.train)
        if not found:
            with directory_aside(run.dir.train / f"checkpoint-{self.steps}") as aside:
                (aside / "model.safetensors").write_text(str(run.recipe.train.lr))
                seal(aside, self.steps, {}, None)
        if self.interrupted:
            raise KeyboardInterrupt
        fill(run.dir, "train")
        return {"steps": found[-1].step if found else self.steps, "continued": bool(found)}

    @property
    def counts(self) -> dict[str, Any]:
        record = self.run.dir.record("train")
        assert record is not None
        return record.counts

    @property
    def aside(self) -> dict[str, Path]:
        """By the learning rate that they were made with."""
        found = self.run.dir.previous.glob("*-train-*/checkpoint-*/model.safetensors")
        return {path.read_text(): path.parent.parent for path in found}


@pytest.fixture
def trainings(tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "good day"}\n')
    made = {"run_dir": str(tmp_path / "run"), "target": {"path": str(smollm2)}, "data": {"prompts": "p.jsonl"}}
    monkeypatch.chdir(tmp_path)
    run = Run(Recipe.model_validate(made), resolve_target(str(smollm2)), RunDir(tmp_path / "run"), Progress())
    all_ = Trainings(run)

    def stand_in(stage: Stage) -> Stage:
        def filled(run: Run) -> dict[str, Any]:
            fill(run.dir, stage.name)
            return {}

        return replace(stage, work=all_.work if stage.name == "train" else filled)

    monkeypatch.setattr("eyas.pipeline.STAGES", tuple(stand_in(s) for s in STAGES))
    monkeypatch.setattr("eyas.pipeline.write_report", lambda *_: None)
    all_.again("prepare", lr=0.0)
    return all_


def test_a_changed_setting_sets_the_training_aside_and_the_old_one_takes_it_up_again(
    trainings: Trainings, capsys: pytest.CaptureFixture[str]
) -> None:
    train = trainings.run.dir.train
    trainings.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        trainings.again(lr=0.5)
    assert {p.name for p in trainings.aside["0.0"].iterdir()} == {"checkpoint-5", "final"}
    told = capsys.readouterr().err
    assert f"(5 steps, 109 B) is set aside in {trainings.aside['0.0']}: set the inputs back and it is" in told
    with pytest.raises(KeyboardInterrupt):  # an interrupted one is worth as much
        trainings.again(lr=0.25)
    assert trainings.aside.keys() == {"0.0", "0.5"}
    trainings.interrupted = False
    was = trainings.aside["0.5"]
    trainings.again(lr=0.5)
    assert trainings.counts == {"steps": 5, "continued": True}
    assert f"taking up the training of these inputs that was set aside in {was}" in capsys.readouterr().err
    assert (train / "checkpoint-5" / "model.safetensors").read_text() == "0.5"
    assert trainings.aside.keys() == {"0.0", "0.25"}


def test_a_training_without_a_whole_checkpoint_is_not_kept(trainings: Trainings) -> None:
    train = trainings.run.dir.train
    for path in (train / "checkpoint-5" / "model.safetensors", train / "final" / "model.safetensors"):
        path.unlink()
    trainings.again(lr=0.5)
    assert trainings.counts["continued"] is False
    assert not trainings.run.dir.previous.exists()


def test_every_training_is_kept_and_taken_up_again(trainings: Trainings) -> None:
    rates = (1.0, 2.0, 3.0, 4.0, 5.0)
    for lr in rates:
        trainings.again(lr=lr)
    assert trainings.aside.keys() == {"0.0", "1.0", "2.0", "3.0", "4.0"}
    for lr in (0.0, *rates):
        trainings.again(lr=lr)
        assert trainings.counts["continued"] is True


def test_draft_from_is_what_lies_there_and_not_this_runs_own(trainings: Trainings, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    first = draft_inputs(DraftPart.model_validate({"from": str(tmp_path)}))
    changed = bytearray(1 << 20)
    changed[1 << 19 : (1 << 19) + 40_000] = bytes([7]) * 40_000
    (tmp_path / "model.safetensors").write_bytes(changed)
    assert draft_inputs(DraftPart.model_validate({"from": str(tmp_path)})) != first
    run = trainings.run
    for own in (run.dir.train / "final", run.dir.drafter / "vllm"):
        draft = run.recipe.draft.model_copy(update={"from_": str(own)})
        with pytest.raises(InputError, match=f"lies in this run's {own.parent.name}/"):
            run_stages(replace(run, recipe=run.recipe.model_copy(update={"draft": draft})), "train", "train")
    assert trainings.aside == {}


def test_settings_that_cannot_work_touch_nothing(trainings: Trainings) -> None:
    run = trainings.run.dir
    write_json(run.verify_json, {})
    run.write_record("verify", StageRecord("f", "done", finished="t"))
    part = run.samples / "a.parquet"
    rows = pq.read_table(part)
    long = rows.set_column(
        rows.schema.get_field_index("rows"), "rows", pa.array([40, 40], rows.schema.field("rows").type)
    )
    write_part(long, part)
    Products(run.root, "harvest").record(harvest_files(run))
    before = sorted(p for p in run.root.rglob("*") if p.name != ".lock")
    records = run.records()
    with pytest.raises(InputError, match=r"tokens_per_batch is 16, but sample a-0/0 alone has 39"):
        trainings.again(lr=0.5, tokens_per_batch=16)
    assert sorted(p for p in run.root.rglob("*") if p.name != ".lock") == before
    assert run.records() == records


def test_what_changed_is_named(trainings: Trainings, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainings.run
    trainings.again(lr=0.5, epochs=3, clip=2.0, noise=0.1)
    told = "(train.epochs: 10, now 3; train.lr: 0.0, now 0.5; train.clip: 1.0, now 2.0; 1 more)"
    assert f"train: inputs changed {told}, made again" in capsys.readouterr().err

    draft = run.recipe.draft.model_copy(update={"aux_layers": [1, 2, 3]})
    other = replace(run, recipe=run.recipe.model_copy(update={"draft": draft}))
    named = r"train needs stage harvest, which had other inputs \(layers: \[2, 15, 27, 30\], now \[1, 2, 3, 30\]\) in "
    with pytest.raises(InputError, match=named) as e:
        run_stages(other, "train", "train")
    assert (e.value.fix or "").endswith("for everything, or set the inputs back")

    (run.dir.root.parent / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "good morning"}\n')
    with pytest.raises(InputError, match=r"stage prepare, which had other inputs \(prompts changed\) in "):
        run_stages(run, "train", "train")
    run_stages(run, "prepare", "prepare")
    with pytest.raises(InputError, match=r"harvest, which had other inputs \(an earlier stage was made again\) in "):
        run_stages(run, "train", "train")
    for name, record in run.dir.records().items():  # as before records said what a stage was made from
        run.dir.write_record(name, replace(record, made_from={}))
    with pytest.raises(InputError, match=r"stage harvest, which had other inputs in "):
        run_stages(other, "train", "train")


def test_checkpoints_whose_record_is_lost_stay(trainings: Trainings) -> None:
    trainings.run.dir.run_json.unlink()
    trainings.again("prepare", lr=0.0)
    assert trainings.counts["continued"] is True
    assert not trainings.aside


@pytest.fixture
def run(tmp_path: Path, smollm2: Path) -> Run:
    made = {"run_dir": str(tmp_path / "run"), "target": {"path": str(smollm2)}, "data": {"prompts": "p.jsonl"}}
    return Run(Recipe.model_validate(made), resolve_target(str(smollm2)), RunDir(tmp_path / "run"), Progress())


def stage(work: Callable[[Run], dict[str, Any]], *, resumes: bool = False) -> Stage:
    return Stage("verify", lambda r: None, work, lambda d: [d.verify_json], lambda d: [d.verify_json], resumes)


def seconds_of(run: Run) -> float:
    record = run.dir.record("verify")
    assert record is not None
    return record.seconds


def test_a_stages_seconds_are_those_of_all_sessions(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(run: Run) -> dict[str, Any]:
        time.sleep(0.2)
        raise KeyboardInterrupt

    def done(run: Run) -> dict[str, Any]:
        time.sleep(0.2)
        return {}

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            _run_one(run, stage(stopped), "f")
    _run_one(run, stage(done), "f")
    assert 0.6 <= seconds_of(run) < 2
    assert "s of them now)" in capsys.readouterr().err
    _run_one(run, stage(done), "f")  # it was done: made again from the beginning
    assert 0.2 <= seconds_of(run) < 0.6
    with pytest.raises(KeyboardInterrupt):
        _run_one(run, stage(stopped), "g")
    assert 0.2 <= seconds_of(run) < 0.6


def test_a_killed_session_leaves_its_seconds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "SECONDS_KEPT_EVERY", 0.05)
    kept: list[float] = []

    def work(run: Run) -> dict[str, Any]:
        time.sleep(0.3)
        kept.append(seconds_of(run))  # what a kill -9 would leave
        return {}

    _run_one(run, stage(work), "f")
    assert 0.1 < kept[0] <= seconds_of(run)


def test_a_new_attempt_does_not_leave_the_old_result(run: Run) -> None:
    def failing(run: Run) -> dict[str, Any]:
        assert not run.dir.verify_json.exists()
        write_json(run.dir.verify_json, {})
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011
            _run_one(run, stage(failing), "f")
    with pytest.raises(AssertionError):
        _run_one(run, stage(failing, resumes=True), "f")
    assert {s.name for s in STAGES if s.resumes} == {"harvest", "train"}


def test_an_engine_that_this_machine_has_no_room_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "good day"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "this_machine", lambda root: Machine(2, 1 << 34, (), 1 << 34))
    many = run.recipe.engine.model_copy(update={"tensor_parallel": 8})
    run = replace(run, recipe=run.recipe.model_copy(update={"engine": many}))
    with pytest.raises(InputError, match=r"has 0 GPUs .*, the recipe needs 8 .* for harvest and verify"):
        run_stages(run, "prepare", "verify")
    assert run.dir.records() == {}  # nothing was started
    monkeypatch.setattr(pipeline, "STAGES", tuple(replace(s, work=lambda run: {}) for s in STAGES))
    monkeypatch.setattr(pipeline, "write_report", lambda *_: None)
    assert list(run_stages(run, "prepare", "prepare")) == ["prepare"]


def test_a_full_disk_is_an_error_and_a_bug_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as full, _reported(False), written_aside(tmp_path / "a"):  # noqa: PT012
        (tmp_path / "a").touch()
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.exit_code == 1
    assert f"error: No space left on device: {tmp_path / 'a'}" in capsys.readouterr().err
    assert disk_error(RuntimeError("I/O error: Permission denied (os error 13)")) is not None
    for bug in (ValueError("x"), FileNotFoundError(errno.ENOENT, "none", "x")):
        assert disk_error(bug) is None


@pytest.mark.parametrize("as_json", [False, True])
def test_a_bug_is_told_with_its_traceback(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, _reported(as_json) as told:  # noqa: PT012
        told["run_dir"] = "r"
        raise KeyError("x")
    assert ended.value.exit_code == 1
    out = capsys.readouterr()
    assert "Traceback" in out.err
    assert "error: unexpected KeyError: 'x'\n  fix: this is a fault of eyas" in out.err
    if as_json:
        assert json.loads(out.out) == {
            "ok": False,
            "error": {"message": "unexpected KeyError: 'x'", "fix": A_FAULT, "exit_code": 1},
            "run_dir": "r",
        }
    else:
        assert out.out == ""


@pytest.mark.parametrize("how", [typer.Exit(2), BrokenPipeError()])
def test_what_is_no_bug_passes(how: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(how)), _reported(True):
        raise how
    assert capsys.readouterr() == ("", "")
