"""verify's bookkeeping, with a fake engine in place of vLLM (the real one: the end-to-end test)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from export import tiny_drafter as tiny
from eyas.data.schema import HARVESTED
from eyas.engine.base import Completion, Request
from eyas.engine.spec_counters import SpecCounters
from eyas.errors import EngineError, InputError, ProofError
from eyas.export.reference import ReferenceDrafter
from eyas.export.vllm import export_vllm
from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.prove import served, verify
from eyas.prove.acceptance import predict_acceptance
from eyas.prove.answers import chosen, harvested
from eyas.prove.rates import measure_baseline
from eyas.recipe import Recipe
from eyas.rundir import Proof, RunDir
from eyas.states.shard import ShardSample, write_shard
from eyas.states.store import HarvestStore
from eyas.target.info import TargetInfo

LAYERS = [*tiny.AUX, tiny.TARGET_LAYERS]
EMBEDDING = torch.randn(tiny.VOCAB, tiny.HIDDEN, generator=torch.Generator().manual_seed(1))


def harvest(run: RunDir, splits: list[str], layers: list[int] = LAYERS) -> None:
    generator = torch.Generator().manual_seed(3)
    samples, rows = [], []
    for i, split in enumerate(splits):
        prompt, n = 4 + i, 4 + i + 12
        tokens = torch.randint(3, tiny.VOCAB, (n,), generator=generator)
        if i % 2:
            tokens[-1] = 2  # the stop token
        states = torch.randn(n - 1, len(layers), tiny.HIDDEN, generator=generator)
        samples.append(ShardSample(states, tokens, prompt, 0))
        rows.append(
            {
                "id": f"c{i}/0",
                "conversation": f"c{i}",
                "turn": 0,
                "source": "p.jsonl",
                "split": split,
                "token_ids": tokens.tolist(),
                "prompt_length": prompt,
                "loss_mask": [False] * prompt + [True] * 12,
                "logprobs": [-1.0] * 12,
                "finish_reason": "stop" if i % 2 else "length",
                "shard": "s.safetensors",
                "index": i,
                "rows": n - 1,
                "supervised": 12,
            }
        )
    write_shard(run.states / "s.safetensors", layers, samples, [r["id"] for r in rows])
    run.samples.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, HARVESTED), run.samples / "s.parquet")


class FakeEngine:
    """Answers as the harvest did; counts what the reference drafter predicts, plus `extra` accepted tokens."""

    extra = 0
    spoil = False
    asked: ClassVar[list[tuple[bool, list[str]]]] = []
    """(timed, ids) of each call"""

    def __init__(self, engine: Any, target: TargetInfo, layers: Any, states_dir: Any, **options: Any) -> None:
        self.run = RunDir(options["drafter"].parent.parent)
        store = HarvestStore(self.run)
        self.tokens = options["speculative_tokens"]
        self.answers = {a.id: a.sparing(self.tokens) for a in harvested(store, store.samples(), target)}
        self.drafter = ReferenceDrafter(options["drafter"], EMBEDDING)
        self.counters = SpecCounters(5, 15, 1, (1, 0, 0))
        self.asked.clear()

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *exc: object) -> None:
        return

    def generate(self, requests: Iterator[Request], sampling: Any, *, timed: bool = False) -> Iterator[Completion]:
        assert sampling.temperature == 0.0
        requests = list(requests)
        self.asked.append((timed, [r.id for r in requests]))
        for r in requests:
            if "warm-up" in r.id:
                continue
            answer = self.answers[r.id]
            if answer.stopped:
                assert r.max_tokens >= len(answer.output_ids)
            else:
                assert r.max_tokens == len(answer.output_ids) - self.tokens
            found = predict_acceptance(self.drafter, [answer.sequence()], self.tokens)
            accepted = tuple(a + self.extra for a in found.accepted_per_position)
            self.counters += SpecCounters(found.drafts, found.drafts * self.tokens, sum(accepted), accepted)
            output = [1, *answer.expected[1:]] if self.spoil else answer.expected
            yield Completion(r.id, r.prompt_ids, output, [-1.0] * len(output), None, "stop", None)

    def spec_counters(self) -> SpecCounters:
        return self.counters


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    torch.set_num_threads(1)
    run = RunDir(tmp_path)
    made = tiny.config()
    tiny.save_trained(run, made, tiny.trained_tensors(tiny.model(made)))
    export_vllm(run, tiny.target_info(tmp_path), tiny.recipe(run))
    harvest(run, ["train", "train", "holdout", "train", "holdout"])
    monkeypatch.setattr(served, "VllmEngine", FakeEngine)
    monkeypatch.setattr(served, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(verify, "load_embedding", lambda target: EMBEDDING)
    monkeypatch.setattr(verify, "installed_vllm", lambda python: type("V", (), {"version": "0.32.0"}))

    class FakeTeacher:
        def __init__(self, target: TargetInfo) -> None: ...

        def logits(self, states: torch.Tensor) -> torch.Tensor:
            return torch.arange(64.0).expand(len(states), 64)

    monkeypatch.setattr(verify, "Teacher", FakeTeacher)
    return run


def test_all_is_well(run: RunDir) -> None:
    counts = verify.verify(tiny.recipe(run), tiny.target_info(run.root), run, Progress(quiet=True))
    assert counts["lossless"] == "yes"
    found = read_json(run.verify_json)
    assert found["lossless"] is True
    assert (found["engine"], found["engine_version"], found["num_speculative_tokens"]) == ("vllm", "0.32.0", 3)
    for group, prompts in (("seen", 3), ("held_out", 2)):
        entry = found[group]
        assert entry["prompts"] == prompts
        assert entry["drafts"] == entry["predicted_drafts"] > 0  # the warm-up and what came before are not counted
        assert entry["acceptance_length"] == pytest.approx(1 + sum(entry["acceptance_rate_per_position"]))
        assert abs(entry["acceptance_length"] - entry["predicted_acceptance_length"]) < 0.05
        assert entry["tokens_per_s"] > 0
        assert entry["baseline_tokens_per_s"] is None  # the harvest of this test measured nothing
    assert "not measured" in found["baseline_source"]
    assert [p.ok for p in run.proofs()] == [True] * 4


class PlainEngine:
    """The harvest's server at its end."""

    def __init__(self, run: RunDir) -> None:
        store = HarvestStore(run)
        self.answers = {a.id: a for a in harvested(store, store.samples(), tiny.target_info(run.root))}

    def generate(self, requests: Iterator[Request], sampling: Any, *, timed: bool) -> Iterator[Completion]:
        assert timed
        assert sampling.temperature == 0.0
        for r in requests:
            output = self.answers[r.id].output_ids[: r.max_tokens]
            yield Completion(r.id, r.prompt_ids, output, [-1.0] * len(output), None, "length", None)


def timing(run: RunDir, prompts: int, **engine: Any) -> Recipe:
    recipe = tiny.recipe(run, engine=engine)
    return recipe.model_copy(update={"verify": recipe.verify.model_copy(update={"timed_prompts": prompts})})


def test_rates_are_of_the_same_prompts(run: RunDir) -> None:
    target, quiet, recipe = tiny.target_info(run.root), Progress(quiet=True), timing(run, 1)
    rates = measure_baseline(recipe, target, run, PlainEngine(run), quiet)  # type: ignore[arg-type]
    assert [rates[g].ids for g in ("seen", "held_out")] == [["c0/0"], ["c2/0"]]
    assert rates["seen"].tokens == 12 - 3  # the last ones judge the last draft only
    for prompts in (1, 4):  # the harvest's choice holds
        verify.verify(timing(run, prompts), target, run, quiet)
        found = read_json(run.verify_json)
        assert "no drafter, no states kept" in found["baseline_source"]
        for group in ("seen", "held_out"):
            assert found[group]["timed_prompts"] == 1
            assert found[group]["baseline_tokens_per_s"] == rates[group].tokens_per_s
    calls = [(True, ["c0/0"]), (False, ["c1/0", "c3/0"]), (True, ["c2/0"]), (False, ["c4/0"])]
    assert FakeEngine.asked[1:] == calls  # after the warm-up


def test_a_rate_under_other_settings_is_not_compared(run: RunDir) -> None:
    target, quiet = tiny.target_info(run.root), Progress(quiet=True)
    measure_baseline(timing(run, 1), target, run, PlainEngine(run), quiet)  # type: ignore[arg-type]
    verify.verify(timing(run, 2, concurrency=3), target, run, quiet)
    found = read_json(run.verify_json)
    assert found["seen"]["baseline_tokens_per_s"] is None
    assert found["seen"]["timed_prompts"] == 2
    assert found["seen"]["tokens_per_s"] > 0


def test_a_rate_that_cannot_be_is_doubted(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny.target_info(run.root)
    measure_baseline(timing(run, 1), target, run, PlainEngine(run), Progress(quiet=True))  # type: ignore[arg-type]
    found = read_json(run.baseline_json)
    found["rates"]["seen"]["seconds"] = 1e6  # as on a busy machine
    write_json(run.baseline_json, found)
    verify.verify(timing(run, 1), target, run, Progress())
    found = read_json(run.verify_json)
    assert all(found[group]["baseline_tokens_per_s"] > 0 for group in ("seen", "held_out"))
    assert "times as fast as without" in found["baseline_doubt"]
    assert "held_out:" not in found["baseline_doubt"]
    assert "not to be compared: seen: " in capsys.readouterr().err


def test_a_rate_that_cannot_be_measured_ends_nothing(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    class Dying(PlainEngine):
        def generate(self, requests: Any, sampling: Any, *, timed: bool) -> Iterator[Completion]:
            raise EngineError("gone")

    engine: Any = Dying(run)
    assert measure_baseline(timing(run, 1), tiny.target_info(run.root), run, engine, Progress()) == {}
    assert "not measured: gone" in capsys.readouterr().err


def test_acceptance_that_is_not_as_predicted_fails(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "extra", 2)
    with pytest.raises(ProofError, match="served acceptance as predicted, held out: found served"):
        verify.verify(tiny.recipe(run), tiny.target_info(run.root), run, Progress(quiet=True))
    assert read_json(run.verify_json)["lossless"] is True
    assert [p.ok for p in run.proofs()] == [True, True, False, False]


def test_changed_output_fails(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "spoil", True)
    with pytest.raises(ProofError, match="output unchanged by the drafter: found 0 of 5 answers equal"):
        verify.verify(tiny.recipe(run), tiny.target_info(run.root), run, Progress(quiet=True))
    found = read_json(run.verify_json)
    assert found["lossless"] is False
    assert found["comparison"]["differences"][0]["position"] == 0


def test_the_hf_engine_predicts_only(run: RunDir) -> None:
    run.write_proofs([Proof("verify: the drafter drafts", True, "", ""), Proof("of another stage", True, "", "")])
    counts = verify.verify(
        tiny.recipe(run, engine={"kind": "hf"}), tiny.target_info(run.root), run, Progress(quiet=True)
    )
    assert counts["mode"] == "replay"
    found = read_json(run.verify_json)
    assert found["lossless"] is None
    assert found["seen"]["acceptance_length"] is None
    assert found["seen"]["predicted_acceptance_length"] >= 1
    assert [p.name for p in run.proofs()] == ["of another stage"]  # what was proven of an older drafter is gone


def test_no_held_out_conversations(run: RunDir) -> None:
    (run.samples / "s.parquet").unlink()
    harvest(run, ["train", "train"])
    verify.verify(tiny.recipe(run), tiny.target_info(run.root), run, Progress(quiet=True))
    assert read_json(run.verify_json)["held_out"] is None


def test_another_harvest_than_the_drafters_is_refused(run: RunDir) -> None:
    harvest(run, ["train"], [1, 2, 5, 6])
    with pytest.raises(ProofError, match=r"layers \[1, 2, 5, 6\], the drafter reads \[1, 3, 5\]"):
        verify.verify(tiny.recipe(run), tiny.target_info(run.root), run, Progress(quiet=True))


def test_no_drafter(run: RunDir) -> None:
    (run.drafter / "vllm" / "config.json").unlink()
    with pytest.raises(InputError, match="no exported drafter"):
        verify.verify(tiny.recipe(run), tiny.target_info(run.root), run, Progress(quiet=True))


def test_choice_is_spread_and_bounded(run: RunDir) -> None:
    harvest(run, ["train"] * 10)
    ids = [r.id for r in chosen(HarvestStore(run), 4)["seen"]]
    assert ids == ["c0/0", "c2/0", "c5/0", "c7/0"]
    first = chosen(HarvestStore(run), 4, {"seen": ["c9/0", "c1/0", "gone"]})
    assert [r.id for r in first["seen"]] == ["c1/0", "c9/0", "c0/0", "c5/0"]
