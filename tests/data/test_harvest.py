"""Harvest against a tiny target: exact ids, turns in order, resume, precision, and every planted fault caught."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from eyas.data import harvest as module
from eyas.data.harvest import COMPLETE, REPRODUCED, harvest
from eyas.data.parts import write_part
from eyas.data.prepare import prepare
from eyas.data.schema import HARVESTED, part_files
from eyas.engine.base import Engine, Request
from eyas.errors import EngineError, EyasError, InputError, ProofError
from eyas.progress import Progress
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.states.shard import ShardSample
from eyas.states.store import HarvestStore
from eyas.target.resolve import resolve_target
from eyas.target.tokenizer import load_tokenizer

from .conftest import write_prompts
from .tiny import LAYERS, TinyEngine, all_states, recipe


class Bench:
    """One run directory with prepared prompts."""

    def __init__(self, tiny: Path, root: Path, n: int = 12, turns: int = 1, **data: Any) -> None:
        self.tiny, self.target, self.run = tiny, resolve_target(str(tiny)), RunDir(root / "run")
        self.prompts = write_prompts(root / "p.jsonl", n, turns)
        self.recipe: Recipe = recipe(self.run.root, tiny, [self.prompts], **data)
        self.run.states.mkdir(parents=True)
        self.prepare()

    def prepare(self, **data: Any) -> None:
        if data:
            self.recipe = self.recipe.model_copy(update={"data": self.recipe.data.model_copy(update=data)})
        prepare(self.recipe, self.target, self.run, Progress(quiet=True))

    def engine(self, **options: Any) -> TinyEngine:
        return TinyEngine(self.tiny, self.run.states, **options)

    def harvest(self, engine: TinyEngine, layers: list[int] = LAYERS) -> dict[str, Any]:
        return harvest(self.recipe, self.target, self.run, layers, Progress(quiet=True), lambda: engine)

    def rows(self) -> list[dict[str, Any]]:
        """By id, as the store gives them."""
        found = [row for part in part_files(self.run.samples) for row in pq.read_table(part).to_pylist()]
        return sorted(found, key=lambda row: str(row["id"]))

    def files(self) -> set[str]:
        return {p.name for p in [*self.run.samples.iterdir(), *self.run.states.iterdir()]}


@pytest.fixture
def bench(tiny: Path, tmp_path: Path) -> Callable[..., Bench]:
    return lambda **options: Bench(tiny, tmp_path, **options)


def test_regenerated_samples_are_the_engines_own(bench: Callable[..., Bench]) -> None:
    b = bench()
    engine = b.engine()
    counts = b.harvest(engine)
    rows = b.rows()
    assert counts["samples"] == len(rows) == 12
    assert all(pq.read_schema(p).remove_metadata().equals(HARVESTED) for p in part_files(b.run.samples))
    store = HarvestStore(b.run)
    refs = store.samples()
    assert len(store.samples("train")) + len(store.samples("holdout")) == 12
    assert store.layers() == LAYERS
    for ref, row in zip(refs, rows, strict=True):
        sample = store.load(ref)
        n = len(row["token_ids"])
        assert row["id"] == f"{row['conversation']}/{row['turn']}"
        assert row["loss_mask"] == [i >= row["prompt_length"] for i in range(n)]
        assert len(row["logprobs"]) == row["supervised"] == n - row["prompt_length"]
        assert (row["rows"], ref.tokens) == (n - 1, n)
        states, logits = all_states(engine.model, row["token_ids"][:-1])
        torch.testing.assert_close(sample.states, states[:, LAYERS])
        assert logits.argmax(-1)[row["prompt_length"] - 1 :].tolist() == row["token_ids"][row["prompt_length"] :]
    proofs = {p.name: p for p in b.run.proofs()}
    assert proofs[REPRODUCED].ok
    assert proofs[COMPLETE].ok
    assert f"over {counts['supervised_tokens']:,} tokens of 12 samples" in proofs[REPRODUCED].found
    assert counts["worst_logprob_difference"] < 1e-4


def test_nothing_missing_opens_no_engine(bench: Callable[..., Bench]) -> None:
    b = bench()
    first, before = b.harvest(b.engine()), b.files()
    engine = b.engine()
    again = b.harvest(engine)
    assert engine.opened == 0
    assert b.files() == before
    assert again["samples"] == first["samples"]
    assert again["worst_logprob_difference"] == first["worst_logprob_difference"]


def test_the_engine_is_shown_once_all_is_proven(bench: Callable[..., Bench]) -> None:
    b = bench()
    shown: list[tuple[Engine, int, int]] = []

    def at_end(engine: Engine) -> None:
        shown.append((engine, len(b.rows()), len(b.run.proofs())))

    engine = b.engine()
    for _ in range(2):  # the second time nothing is missing, and no engine is opened
        harvest(b.recipe, b.target, b.run, LAYERS, Progress(quiet=True), lambda: engine, at_end=at_end)
    assert shown == [(engine, 12, 2)]


@pytest.mark.parametrize("owner", ["run.json", "target.json"])
@pytest.mark.parametrize("inner", ["states", "."])
def test_shards_in_another_runs_directory_stay_there(
    bench: Callable[..., Bench], tmp_path: Path, owner: str, inner: str
) -> None:
    b = bench()
    other = tmp_path / "other"
    (other / "states").mkdir(parents=True)
    (other / owner).write_text("{}")
    engine = TinyEngine(b.tiny, other / inner)
    with pytest.raises(InputError) as e:
        b.harvest(engine)
    for said in (f"in {(other / inner).resolve()}, which", f"the run {other}", str(b.run.states), "`eyas plan RECIPE`"):
        assert said in str(e.value)
    assert not b.rows()
    assert not part_files(b.run.samples)


@pytest.mark.parametrize("inner", ["elsewhere", "run/elsewhere"])
def test_shards_in_a_directory_of_no_other_run_are_moved(
    bench: Callable[..., Bench], tmp_path: Path, inner: str
) -> None:
    b = bench()
    b.run.target_json.write_text("{}")
    (tmp_path / inner).mkdir()
    assert b.harvest(TinyEngine(b.tiny, tmp_path / inner))["samples"] == 12
    assert not list((tmp_path / inner).iterdir())
    assert len(HarvestStore(b.run).samples()) == 12


def test_kept_conversations_are_read_not_answered(bench: Callable[..., Bench]) -> None:
    b = bench(turns=2, responses="keep")
    counts = b.harvest(b.engine())
    rows = b.rows()
    assert counts["samples"] == 12
    assert counts["finish_reasons"] == {"kept": 12}
    wanted = {r["id"]: r for r in pq.read_table(b.run.prepared).to_pylist()}
    for row in rows:
        assert row["token_ids"] == wanted[row["conversation"]]["prompt_ids"]
        assert row["loss_mask"] == wanted[row["conversation"]]["loss_mask"]
        assert len(row["logprobs"]) == sum(row["loss_mask"])
    store = HarvestStore(b.run)
    sample = store.load(store.samples()[0])
    assert len(sample.states) == len(sample.token_ids) - 1


def test_turns_are_answered_in_order_with_the_targets_own_answers(bench: Callable[..., Bench]) -> None:
    b = bench(n=6, turns=3, max_tokens=7)
    engine = b.engine(stop_after=lambda request: 4)
    counts = b.harvest(engine)
    assert counts["samples"] == 18
    tokenizer = load_tokenizer(b.target)
    rows = {r["id"]: r for r in b.rows()}
    for conversation in {r["conversation"] for r in rows.values()}:
        history: list[dict[str, str]] = []
        prepared = next(r for r in pq.read_table(b.run.prepared).to_pylist() if r["id"] == conversation)
        for turn, message in enumerate(json.loads(prepared["messages"])):
            row = rows[f"{conversation}/{turn}"]
            history.append(message)
            prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
            assert row["token_ids"][: row["prompt_length"]] == prompt
            answer = tokenizer.decode(row["token_ids"][row["prompt_length"] :], skip_special_tokens=True)
            history.append({"role": "assistant", "content": answer})
    assert len({r["split"] for r in rows.values() if r["conversation"] == conversation}) == 1


def test_a_cut_answer_ends_its_conversation(bench: Callable[..., Bench]) -> None:
    b = bench(n=6, turns=3, max_tokens=5)
    counts = b.harvest(b.engine())
    assert counts["samples"] < 18
    cut = counts["finish_reasons"]["length"]
    assert cut
    assert counts["ended"] == {"later turns not asked: the answer before was cut by length": 18 - counts["samples"]}


def test_turns_without_room_are_counted_one_by_one(bench: Callable[..., Bench]) -> None:
    """Also those after the first that had none."""
    b = bench(n=6, turns=4, max_tokens=7, max_length=110)
    counts = b.harvest(b.engine(stop_after=lambda r: 3))
    assert counts["samples"] < 24
    assert counts["ended"] == {"later turns not asked: no room within data.max_length": 24 - counts["samples"]}


def test_a_grown_limit_asks_only_for_the_new_ones_and_moves_splits(bench: Callable[..., Bench]) -> None:
    b = bench(n=40, limit=10, holdout=0.2)
    b.harvest(b.engine())
    b.prepare(limit=40)
    engine = b.engine()
    b.harvest(engine)
    assert len(engine.asked) == 30
    prepared = {r["id"]: r["split"] for r in pq.read_table(b.run.prepared).to_pylist()}
    assert {r["conversation"]: r["split"] for r in b.rows()} == prepared
    b.prepare(limit=5)
    engine = b.engine()
    counts = b.harvest(engine)
    assert engine.opened == 0
    assert counts["samples"] == 5
    assert len(HarvestStore(b.run).samples()) == 5
    b.prepare(limit=40)  # the others were kept, unused
    assert b.harvest(engine)["samples"] == 40
    assert engine.opened == 0
    assert {r["conversation"]: r["split"] for r in b.rows()} == prepared


def test_a_server_of_another_precision_is_refused(bench: Callable[..., Bench]) -> None:
    b = bench()
    part = b.recipe.engine.model_copy(update={"dtype": "bfloat16"})
    b.recipe = b.recipe.model_copy(update={"engine": part})
    with pytest.raises(InputError, match=r"computes in float32, expected bfloat16 \(engine\.dtype\)"):
        b.harvest(b.engine())
    assert not part_files(b.run.samples)


def test_turns_after_an_answer_that_is_dropped_are_kept_unused(bench: Callable[..., Bench]) -> None:
    b = bench(n=6, turns=2, max_tokens=5)
    b.harvest(b.engine(stop_after=lambda r: 4))
    whole = b.rows()
    assert len(whole) == 12
    for part in part_files(b.run.samples):  # as if every first answer had been cut
        table = pq.read_table(part)
        reasons = ["length" if turn == 0 else "stop" for turn in table["turn"].to_pylist()]
        column = table.schema.get_field_index("finish_reason")
        write_part(table.set_column(column, table.schema.field(column), pa.array(reasons)), part)
    b.prepare(cut_answers="drop")
    engine = b.engine()
    with pytest.raises(EyasError, match="all 6 answers were dropped"):
        b.harvest(engine)
    assert [r["split"] for r in b.rows()] == ["dropped", "unused"] * 6
    b.prepare(cut_answers="keep")
    assert b.harvest(engine)["samples"] == 12
    assert engine.opened == 0
    assert [r["split"] for r in b.rows()] == [r["split"] for r in whole]


def test_other_settings_are_not_mixed(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.harvest(b.engine())
    engine = b.engine(layers=[1, 3])
    assert b.harvest(engine, [1, 3])["samples"] == 12
    assert len(engine.asked) == 12
    assert HarvestStore(b.run).layers() == [1, 3]


@pytest.mark.parametrize(
    ("states", "dtype"), [("bf16", torch.bfloat16), ("f32", torch.float32), ("engine", torch.float32)]
)
def test_stored_precision(bench: Callable[..., Bench], states: str, dtype: torch.dtype) -> None:
    b = bench(states=states)
    counts = b.harvest(b.engine(lose=lambda r: r.id.startswith(("0", "1", "2", "3")) and not seen(r)))
    store = HarvestStore(b.run)
    assert counts["samples"] == 12
    assert {store.load(ref).states.dtype for ref in store.samples()} == {dtype}


_SEEN: set[str] = set()


def seen(request: Request) -> bool:
    """True from the second time on."""
    if request.id in _SEEN:
        return True
    _SEEN.add(request.id)
    return False


def test_lost_replies_are_asked_again(bench: Callable[..., Bench]) -> None:
    b = bench()
    _SEEN.clear()
    counts = b.harvest(b.engine(lose=lambda r: not seen(r) and int(r.id[0], 16) % 2 == 0))
    assert counts["samples"] == len({r["id"] for r in b.rows()}) == 12
    assert counts["asked_again"] > 0


def test_a_late_reply_for_a_settled_shard_changes_nothing(bench: Callable[..., Bench]) -> None:
    b = bench()
    engine = b.engine()
    inner = engine.generate

    def twice(requests: Any, sampling: Any) -> Any:
        kept = []
        for completion in inner(requests, sampling):
            kept.append(completion)
            yield completion
        yield from kept

    engine.generate = twice  # type: ignore[method-assign]
    assert b.harvest(engine)["samples"] == len(b.rows()) == 12


# ---- failure 7 of the design: states that are not what they should be ----


def changed(**what: Any) -> Callable[[ShardSample], ShardSample]:
    return lambda s: dataclasses.replace(s, **{k: f(s) for k, f in what.items()})


def _row(states: torch.Tensor, row: Any, value: float) -> torch.Tensor:
    states = states.clone()
    states[row] = value
    return states


def _normed(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    h = states[:, -1]
    states[:, -1] = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    return states


FAULTS: list[tuple[str, Callable[[ShardSample], ShardSample], str]] = [
    ("all zero", changed(states=lambda s: torch.zeros_like(s.states)), "a row of zeros"),
    ("one zero row", changed(states=lambda s: _row(s.states, 5, 0.0)), "a row of zeros"),
    ("one zero row of one layer", changed(states=lambda s: _row(s.states, (5, 1), 0.0)), "zeros in layer number 1"),
    ("constant", changed(states=lambda s: s.states[:1].expand_as(s.states).contiguous()), "the same in every row"),
    ("NaN", changed(states=lambda s: _row(s.states, 3, float("nan"))), "not finite"),
    ("infinity", changed(states=lambda s: _row(s.states, -1, float("inf"))), "not finite"),
    ("too short", changed(states=lambda s: s.states[:-1], tokens=lambda s: s.tokens[:-1]), "rows of states, expected"),
    ("missing rows", changed(missing_rows=lambda s: 3), "3 rows were never captured"),
    ("prefix cut off", changed(prompt_length=lambda s: s.prompt_length - 1), "of a prompt of"),
    ("layers in reverse", changed(states=lambda s: s.states.flip(1)), "log probabilities from the stored states"),
    ("layer before the last", changed(states=lambda s: s.states[:, [0, 1, 1]]), "log probabilities from the stored"),
    ("shifted by one row", changed(states=lambda s: s.states.roll(1, 0)), "log probabilities from the stored states"),
    ("too few layers", changed(states=lambda s: s.states[:, :2]), "states of shape"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_planted_faults_are_caught(
    bench: Callable[..., Bench], fault: Callable[[ShardSample], ShardSample], message: str
) -> None:
    b = bench()
    engine = b.engine(spoil=lambda samples: [fault(s) for s in samples])
    with pytest.raises(ProofError, match=message) as e:
        b.harvest(engine)
    assert "expected: every sample's states whole" in e.value.message
    assert e.value.fix
    assert [p.ok for p in b.run.proofs()] == [False, False]
    assert not b.rows(), "nothing bad is committed"
    assert not [f for f in b.files() if f.endswith(".safetensors")]


@pytest.mark.parametrize("states", ["engine", "bf16"])
@pytest.mark.parametrize("what", ["final norm applied", "other request's", "layer before the last"])
def test_planted_faults_are_caught_at_any_precision(bench: Callable[..., Bench], what: str, states: str) -> None:
    b = bench(states=states)
    engine = b.engine()
    weight = engine.model.model.norm.weight.detach()

    def spoil(samples: list[ShardSample]) -> list[ShardSample]:
        if what == "final norm applied":
            return [dataclasses.replace(s, states=_normed(s.states, weight)) for s in samples]
        if what == "layer before the last":
            return [dataclasses.replace(s, states=s.states[:, [0, 1, 1]]) for s in samples]
        return samples[1:] + samples[:1]

    engine.spoil = spoil
    with pytest.raises(ProofError, match=r"of other tokens|of a prompt of|log probabilities from the stored"):
        b.harvest(engine)
    assert not b.rows()


def test_states_of_another_request_with_this_ones_tokens(bench: Callable[..., Bench]) -> None:
    b = bench()

    def spoil(samples: list[ShardSample]) -> list[ShardSample]:
        n = min(len(s.states) for s in samples)
        moved = samples[1:] + samples[:1]
        return [
            dataclasses.replace(s, states=torch.cat([m.states[:n], s.states[n:]]))
            for s, m in zip(samples, moved, strict=True)
        ]

    with pytest.raises(ProofError, match="log probabilities from the stored states differ"):
        b.harvest(b.engine(spoil=spoil))


def test_a_fault_that_goes_away_is_asked_again(bench: Callable[..., Bench]) -> None:
    b = bench()
    times: list[int] = []

    def once(samples: list[ShardSample]) -> list[ShardSample]:
        times.append(1)
        return [changed(states=lambda s: _row(s.states, 2, 0.0))(s) for s in samples] if len(times) == 1 else samples

    engine = b.engine(spoil=once)
    counts = b.harvest(engine)
    assert counts["samples"] == 12
    assert (counts["asked_again"], counts["left_out"]) == (5, 0)
    assert all(p.ok for p in b.run.proofs())


def test_a_few_bad_ones_are_left_out_and_named(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BAD_SHARE", 0.2)
    b = bench()
    victim = pq.read_table(b.run.prepared)["prompt_ids"].to_pylist()[3]

    def spoil(samples: list[ShardSample]) -> list[ShardSample]:
        n = len(victim)
        return [changed(missing_rows=lambda s: 1)(s) if s.tokens[:n].tolist() == victim else s for s in samples]

    counts = b.harvest(b.engine(spoil=spoil))
    assert (counts["samples"], counts["left_out"]) == (11, 1)
    id_ = pq.read_table(b.run.prepared)["id"].to_pylist()[3]
    assert (b.run.samples / "bad.tsv").read_text() == f"{id_}/0\t1 rows were never captured\n"
    assert b.harvest(b.engine())["samples"] == 12, "the next run asks for it again"
    assert not (b.run.samples / "bad.tsv").exists()


def test_wrong_log_probabilities_are_caught(bench: Callable[..., Bench]) -> None:
    b = bench()
    engine = b.engine()
    inner = engine.generate

    def off(requests: Any, sampling: Any) -> Any:
        for c in inner(requests, sampling):
            yield dataclasses.replace(c, output_logprobs=[x - 0.01 for x in c.output_logprobs])

    engine.generate = off  # type: ignore[method-assign]
    with pytest.raises(ProofError, match=r"by up to 0\.01"):
        b.harvest(engine)


def test_no_states_at_all(bench: Callable[..., Bench]) -> None:
    b = bench()
    engine = b.engine()
    inner = engine.generate
    engine.generate = lambda r, s: (dataclasses.replace(c, captured=None) for c in inner(r, s))  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no hidden states"):
        b.harvest(engine)


def test_a_file_is_not_trusted_because_it_exists(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.harvest(b.engine())
    shards = sorted(b.run.states.glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-100])
    shards[1].unlink()
    parts = part_files(b.run.samples)
    lost = len(pq.read_table(parts[0])) + len(pq.read_table(parts[1]))
    (b.run.states / "left-over.safetensors").write_bytes(b"x")
    (b.run.states / ".aside.part").write_bytes(b"x")
    engine = b.engine()
    assert b.harvest(engine)["samples"] == 12
    assert len(engine.asked) == lost
    assert {p.stem for p in b.run.states.iterdir()} == {p.stem for p in part_files(b.run.samples)}
