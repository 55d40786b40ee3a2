"""Which answers are asked for and kept: several to a prompt, cut ones, repetitive ones; and the sources' weights."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eyas.data.inputs import prompts_fingerprint
from eyas.data.marks import Marks
from eyas.data.mix import Mix
from eyas.data.repetition import LEAST, PERIOD, looped_tokens
from eyas.data.schema import answer_number, part_files, sample_id
from eyas.data.sources import Row
from eyas.engine.base import Request
from eyas.errors import EyasError, InputError
from eyas.pipeline import STAGES, Run
from eyas.progress import Progress
from eyas.recipe import PromptSource, Recipe, load_recipe
from eyas.states.store import HarvestStore
from eyas.target.tokenizer import load_tokenizer

from .test_harvest import Bench
from .tiny import TinyEngine

# ---- the rule ----


@pytest.mark.parametrize(
    ("ids", "looped"),
    [
        ([1, 2, 3], 0),
        ([], 0),
        ([5] * (LEAST - 1), 0),
        ([1, 2] + [5] * LEAST, LEAST),
        ([1, 2] + [5] * LEAST + [99], LEAST),
        ([1, 2] + [5] * LEAST + [6], 0),
        (list(range(1000, 1020)) * 3, 0),
        ([7, *list(range(1000, 1020)) * 4], 80),
        ([7, *list(range(1000, 1020)) * 4, 1000, 1001, 1002], 83),
        ([7, *list(range(1000, 1020)) * 4, 1000, 1001, 3], 0),
        (list(range(1000, 1000 + PERIOD)) * 4, 4 * PERIOD),
        (list(range(1000, 1001 + PERIOD)) * 4, 0),
        ([1, 2, 3, 4, 5, 6, 7, 8] * 4 + [9] * 8, 0),
        (list(range(4000)), 0),
    ],
)
def test_a_loop_at_the_end(ids: list[int], looped: int) -> None:
    assert looped_tokens(ids, frozenset({99})) == looped


# ---- weights ----


def rows(name: str, n: int) -> Iterator[Row]:
    return (Row(name, f"{name}, {i}", {"prompt": f"{name} {i}"}) for i in range(n))


def test_shares_follow_the_weights() -> None:
    mix = iter(Mix([rows("a", 1000), rows("b", 1000), rows("c", 10)], [3.0, 1.0, 0.5]))
    taken = Counter(next(mix)[1].source for _ in range(90))
    assert taken == {"a": 60, "b": 20, "c": 10}
    assert Counter(row.source for _, row in mix) == {"a": 940, "b": 980}, "everything comes in the end, once"


def test_shares_are_of_usable_rows() -> None:
    mix = Mix([rows("a", 1000), rows("b", 1000)], [1.0, 1.0])
    used: Counter[str] = Counter()
    for i, (number, row) in enumerate(mix):
        if row.source == "a" and i % 3:
            mix.give_back(number)
        else:
            used[row.source] += 1
        if used.total() == 100:
            break
    assert abs(used["a"] - used["b"]) <= 1


def test_a_limit_takes_from_sources_by_weight(tiny: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = [json.dumps({"prompt": f"{name} {i}"}) for i in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    b = Bench(tiny, tmp_path, n=2, limit=40)
    sources = [PromptSource(path=str(tmp_path / "a.jsonl"), weight=3.0), str(tmp_path / "b.jsonl")]
    b.prepare(prompts=sources)
    assert Counter(pq.read_table(b.run.prepared)["source"].to_pylist()) == {"a.jsonl": 30, "b.jsonl": 10}


def test_marks() -> None:
    marks = Marks()
    values = [(i * 2654435761 * 40503) % 2**64 for i in range(100_000)]
    assert all(marks.add(v) for v in values)
    assert not any(marks.add(v) for v in values[::7])
    assert len(marks) == 100_000
    assert marks._sorted.nbytes >= 8 * 65_536


# ---- the recipe ----


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("prompts: [{path: b, wieght: 2}]", 'did you mean "data.prompts.0.weight"?'),
        ("prompts: [{path: b, weight: 0}]", "data.prompts.0.weight: expected a number above 0, found 0"),
        ("prompts: [{weight: 1}]", "key data.prompts.0.path is missing"),
        ("prompts: [a, 3]", "data.prompts.1: expected text, found 3"),
        ("prompts: a, samples_per_prompt: 2", "gives the same answer every time"),
        ("prompts: a, responses: keep, cut_answers: drop", "data.cut_answers: drop is about answers that the target"),
        ("prompts: a, responses: keep, samples_per_prompt: 3", "data.samples_per_prompt: 3 is about answers"),
    ],
)
def test_recipes_that_cannot_mean_anything(tmp_path: Path, data: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"run_dir: r\ntarget: {{path: t}}\ndata: {{{data}}}\n")
    with pytest.raises(InputError) as e:
        load_recipe(path)
    assert message in str(e.value)


def test_weights_and_answer_keys_make_their_own_stage_stale(tiny: Path, tmp_path: Path) -> None:
    b = Bench(tiny, tmp_path, n=4, temperature=1.0)

    def made_from(**data: Any) -> dict[str, Any]:
        recipe = b.recipe.model_copy(update={"data": b.recipe.data.model_copy(update=data)})
        run = Run(recipe, b.target, b.run, Progress(quiet=True))
        run = dataclasses.replace(run, recipe=Recipe.model_validate(recipe.model_dump(by_alias=True)))
        return {s.name: s.made_from(run) for s in STAGES[:1]} | {"harvest": harvest_part(run)}

    def harvest_part(run: Run) -> Any:
        small = run.recipe.draft.model_copy(update={"aux_layers": [1, 2]})
        return STAGES[1].made_from(dataclasses.replace(run, recipe=run.recipe.model_copy(update={"draft": small})))

    plain = made_from()
    for change in ({"samples_per_prompt": 2}, {"cut_answers": "drop"}, {"repetitive_answers": "drop"}):
        changed = made_from(**change)
        assert changed["prepare"] == plain["prepare"]
        assert changed["harvest"] != plain["harvest"]
    weighted = made_from(prompts=[PromptSource(path=str(b.prompts), weight=2.0)])
    assert weighted["prepare"] != plain["prepare"]
    one = [PromptSource(path=str(b.prompts), weight=1.0)]
    assert prompts_fingerprint(one) == plain["prepare"]["prompts"]


# ---- several answers to a prompt ----


def test_several_answers_to_a_prompt(tiny: Path, tmp_path: Path) -> None:
    b = Bench(tiny, tmp_path, n=6, turns=2, temperature=1.0, max_tokens=8, samples_per_prompt=3)

    def stop(request: Request) -> int:
        return 5

    engine = b.engine(stop_after=stop)
    counts = b.harvest(engine)
    found = {r["id"]: r for r in b.rows()}
    tokenizer = load_tokenizer(b.target)
    conversations = pq.read_table(b.run.prepared)["id"].to_pylist()
    assert set(found) == {sample_id(c, t, k) for c in conversations for t in range(2) for k in range(3)}
    assert counts["samples"] == 36
    assert [answer_number(sample_id("c", 1, k)) for k in range(3)] == [0, 1, 2]
    assert {r.seed for r in engine.asked} == {0, 1, 2}
    answers = {tuple(r["token_ids"][r["prompt_length"] :]) for r in found.values() if r["turn"] == 0}
    assert len(answers) > 6, "other seeds, other answers"
    for c in conversations:
        assert len({found[sample_id(c, t, k)]["split"] for t in range(2) for k in range(3)}) == 1
        for k in range(3):  # each answer is in the history of its own second turn
            first, second = found[sample_id(c, 0, k)], found[sample_id(c, 1, k)]
            said = tokenizer.decode(first["token_ids"][first["prompt_length"] :], skip_special_tokens=True)
            assert said in tokenizer.decode(second["token_ids"][: second["prompt_length"]])
    fewer = b.recipe.data.model_copy(update={"samples_per_prompt": 2})
    b.recipe = b.recipe.model_copy(update={"data": fewer})
    engine = b.engine(stop_after=stop)
    assert b.harvest(engine)["samples"] == 24
    assert engine.opened == 0
    more = b.recipe.data.model_copy(update={"samples_per_prompt": 4})
    b.recipe = b.recipe.model_copy(update={"data": more})
    engine = b.engine(stop_after=stop)
    assert b.harvest(engine)["samples"] == 48
    assert len(engine.asked) == 12, "only the fourth answers: the third ones were kept, unused"


# ---- cut and repetitive answers ----


def again(b: Bench, engine: TinyEngine, **data: str) -> dict[str, Any]:
    b.recipe = b.recipe.model_copy(update={"data": b.recipe.data.model_copy(update=data)})
    return b.harvest(engine)


def stops(request: Request) -> int | None:
    """Half of the answers stop; the others are cut."""
    return 3 if request.prompt_ids[-16] % 2 else None


def test_cut_answers_are_dropped_and_not_asked_again(tiny: Path, tmp_path: Path) -> None:
    b = Bench(tiny, tmp_path, n=12, states="bf16", cut_answers="drop")
    counts = b.harvest(b.engine(stop_after=stops))
    cut = counts["answers"]["cut"]
    assert 0 < cut < 12
    assert counts["answers"] == {"cut": cut, "repetitive": 0, "cut_and_repetitive": 0, "dropped": cut}
    assert counts["samples"] == len(HarvestStore(b.run).samples()) == 12 - cut
    assert set(counts["finish_reasons"]) == {"stop"}
    dropped = [r for r in b.rows() if r["split"] == "dropped"]
    assert [(r["shard"], r["index"]) for r in dropped] == [("", -1)] * cut
    store = HarvestStore(b.run)
    assert all(len(store.load(ref).states) == ref.rows for ref in store.samples()), "indices moved with the shard"
    engine = b.engine(stop_after=stops)
    assert again(b, engine)["answers"]["dropped"] == cut
    assert engine.opened == 0
    engine = b.engine(stop_after=stops)
    assert again(b, engine, cut_answers="keep")["samples"] == 12
    assert len(engine.asked) == cut, "exactly the dropped ones"
    engine = b.engine(stop_after=stops)
    assert again(b, engine, cut_answers="drop")["samples"] == 12 - cut
    assert again(b, engine, cut_answers="keep")["samples"] == 12
    assert engine.opened == 0, "what has its states comes back without asking"


def test_a_shard_of_dropped_answers_alone(tiny: Path, tmp_path: Path) -> None:
    b = Bench(tiny, tmp_path, n=6, cut_answers="drop")
    with pytest.raises(EyasError, match="all 6 answers were dropped: 6 cut by length, 0 repetitive"):
        b.harvest(b.engine())
    assert not list(b.run.states.iterdir())
    engine = b.engine()
    with pytest.raises(EyasError, match="all 6 answers"):
        b.harvest(engine)
    assert engine.opened == 0
    assert sum(len(pq.read_table(p)) for p in part_files(b.run.samples)) == 6


def test_a_repetitive_answer_ends_its_conversation(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = Bench(tiny, tmp_path, n=8, turns=2, max_tokens=8)
    b.harvest(b.engine(stop_after=lambda r: 4))
    victims = pq.read_table(b.run.prepared)["id"].to_pylist()[:3]
    chosen = {tuple(r["token_ids"][r["prompt_length"] :]) for r in b.rows() if r["id"] in [f"{v}/0" for v in victims]}
    monkeypatch.setattr("eyas.data.committer.looped_tokens", lambda ids, stop_ids: 4 if tuple(ids) in chosen else 0)
    (tmp_path / "fresh").mkdir()
    b = Bench(tiny, tmp_path / "fresh", n=8, turns=2, max_tokens=8, repetitive_answers="drop")
    counts = b.harvest(b.engine(stop_after=lambda r: 4))
    dropped = [r["id"] for r in b.rows() if r["split"] == "dropped"]
    assert {f"{v}/0" for v in victims} <= set(dropped)
    assert counts["answers"]["dropped"] == counts["answers"]["repetitive"] == len(dropped)
    assert not {r["id"] for r in b.rows()} & {f"{v}/1" for v in victims}
    assert sum(n for why, n in counts["ended"].items() if "repetitive" in why) >= 3
