"""Shapes are recognised row by row, every container reads the same, and the split is right and stable."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.data.prepare import prepare
from eyas.data.schema import PREPARED
from eyas.data.shapes import asked, read_row
from eyas.data.sources import open_source
from eyas.errors import InputError
from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.target.resolve import resolve_target

from .conftest import write_prompts
from .tiny import recipe

U, A, S = "user", "assistant", "system"

SHAPES: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    ("messages", {"messages": [{"role": "user", "content": "q"}]}, [(U, "q")]),
    (
        "messages",
        {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"}]},
        [("developer", "s"), (U, "q")],
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        [(U, "a\nb")],
    ),
    (
        "conversations",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        [(U, "q"), (A, "a")],
    ),
    (
        "conversations",
        {"conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "q"}]},
        [(S, "s"), (U, "q")],
    ),
    ("instruction", {"instruction": "q", "input": "i", "output": "a"}, [(U, "q\n\ni"), (A, "a")]),
    ("instruction", {"instruction": "q", "input": "", "output": "a"}, [(U, "q"), (A, "a")]),
    ("prompt", {"prompt": "q", "response": "a"}, [(U, "q"), (A, "a")]),
    ("prompt", {"prompt": "q", "completion": "a", "system": "s"}, [(S, "s"), (U, "q"), (A, "a")]),
    (
        "prompt",
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
        [(U, "q"), (A, "a")],
    ),
    ("question", {"question": "q", "answer": "a"}, [(U, "q"), (A, "a")]),
    ("turns", {"question_id": 3, "turns": ["q", "r"], "reference": ["x"]}, [(U, "q"), (U, "r")]),
    ("text", {"text": "q"}, [(U, "q")]),
    (
        "conversations",
        {"system": "s", "conversations": [{"from": "human", "value": "q"}]},
        [(S, "s"), (U, "q")],
    ),
    ("messages", {"system": "", "messages": [{"role": "user", "content": "q"}]}, [(U, "q")]),
    (
        "messages",
        {"system": "s", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
        [(S, "s"), (U, "q")],
    ),
    ("question", {"system_prompt": "s", "question": "q", "response": "a"}, [(S, "s"), (U, "q"), (A, "a")]),
    (
        "instruction",
        {"instruction": "q", "input": "", "output": "a", "history": [["p", "b"]], "system": "s"},
        [(S, "s"), (U, "p"), (A, "b"), (U, "q"), (A, "a")],
    ),
    ("instruction", {"instruction": "q", "input": 4, "output": "a", "history": []}, [(U, "q\n\n4"), (A, "a")]),
    ("prompt", {"prompt": "q", "response": 4}, [(U, "q")]),
]


@pytest.mark.parametrize(("shape", "row", "expected"), SHAPES)
def test_shapes(shape: str, row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    found = read_row(row)
    assert found.shape == shape
    assert [(m["role"], m["content"]) for m in found.messages] == expected


def test_a_table_of_tools_reads_as_its_rows(tmp_path: Path) -> None:
    """Parquet gives every object the keys of all others."""

    def tool(name: str, **properties: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}

    def call(**arguments: Any) -> dict[str, Any]:
        return {"role": A, "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    question = {"role": U, "content": "q"}
    rows: list[dict[str, Any]] = [
        {"messages": [question, call(city="p")], "tools": [tool("w", city={"enum": ["a", None]})]},
        {"messages": [{**question, "name": "n"}, call(a=1)], "tools": [tool("add", a={"type": "integer"})]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tables, lines = ([read_row(r.value) for r in open_source(str(tmp_path / f"a.{k}"))] for k in ("parquet", "jsonl"))
    assert tables == lines
    assert tables[0].tools == rows[0]["tools"]
    assert [c.id for c in tables] == [c.id for c in lines]
    meant = tool("f", a={"default": None, "const": None, "title": None})
    found = read_row({"prompt": "q", "tools": [meant]}).tools
    assert found == [tool("f", a={"default": None, "const": None})]


def test_old_calls_and_other_names_of_thinking() -> None:
    answer = {"role": A, "content": "b", "reasoning_content": None, "thinking": "t"}
    old = {"role": A, "content": "c", "function_call": {"name": "f", "arguments": '{"a": null}'}}
    found = read_row({"messages": [{"role": U, "content": "q"}, answer, old]}).messages
    assert found[1]["reasoning_content"] == "t"
    assert found[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": None}}}]


def test_tools_calls_and_reasoning_come_through() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "tools": json.dumps(tools),
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "7", "tool_call_id": "1"},
            {"role": "user", "content": "r"},
        ],
    }
    found = read_row(row)
    assert found.tools == tools
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert found.messages[1]["reasoning_content"] == "hm"
    assert found.messages[2] == {"role": "tool", "content": "7", "tool_call_id": "1"}
    cut, turns, note = asked(found)
    assert (turns, note) == (1, "cut before tool results")
    assert [m["role"] for m in cut.messages] == ["user"]


def test_asked_keeps_turns_and_drops_answers() -> None:
    row = {
        "messages": [{"role": r, "content": c} for r, c in [(S, "s"), (U, "a"), (A, "x"), (U, "b"), (U, "c"), (A, "y")]]
    }
    found, turns, note = asked(read_row(row))
    assert [(m["role"], m["content"]) for m in found.messages] == [(S, "s"), (U, "a"), (U, "b\n\nc")]
    assert (turns, note) == (2, None)
    other = {"messages": [{**m, "content": "z"} if m["role"] == A else m for m in row["messages"]]}
    assert asked(read_row(other))[0].id == found.id, "another answer in the file is the same prompt"


def test_turns_are_asked_one_after_the_other() -> None:
    found, turns, note = asked(read_row({"turns": ["a", "b"]}))
    assert [(m["role"], m["content"]) for m in found.messages] == [(U, "a"), (U, "b")]
    assert (turns, note) == (2, None)


ROWS = [{"prompt": f"q{i}\nnext line, “quoted”", "response": f"a{i}"} for i in range(5)]


def write(path: Path) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\ufeff" + "\n\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS), encoding="utf-8")
    elif path.stem == "wrapped":
        path.write_text(json.dumps({"version": "1", "data": ROWS}))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=2))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        with open(path, "w", encoding="utf-8", newline="") as f:
            writer = csv.DictWriter(f, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "wrapped.json", "a.parquet", "a.csv"])
def test_every_container_reads_the_same(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.data.sources._BLOCK", 7)  # elements of a JSON list across many blocks
    write(tmp_path / name)
    rows = list(open_source(str(tmp_path / name)))
    assert [r.value for r in rows] == ROWS
    assert [r.broken for r in rows] == [None] * 5


R = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
M = {"messages": [{"role": "user", "content": "q"}]}
JSONS: list[tuple[str, str, list[Any]]] = [
    ("lists one after the other", json.dumps(R[:2]) + "\n" + json.dumps(R[2:]), R),
    ("a list of tags first", json.dumps({"tags": ["a"], "data": R}), R),
    ("a bracket in text", json.dumps({"about": "see [1]", "data": R}), R),
    ("lines", "\n".join(map(json.dumps, R)), R),
    ("lines and lists", json.dumps(R[0]) + json.dumps(R[1:]), R),
    ("one row", json.dumps(M), [M]),
    ("one bad row", json.dumps({"messages": [{"role": "x"}]}), [{"messages": [{"role": "x"}]}]),
    ("rows under a row's key", json.dumps({"conversations": [M, M]}), [M, M]),
    ("no rows at all", json.dumps({"a": 1}), [{"a": 1}]),
]


@pytest.mark.parametrize("size", [7, 1 << 20])
@pytest.mark.parametrize(("text", "expected"), [c[1:] for c in JSONS], ids=[c[0] for c in JSONS])
def test_json_files(tmp_path: Path, text: str, expected: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.data.sources._BLOCK", size)
    (tmp_path / "a.json").write_text(text)
    assert [r.value for r in open_source(str(tmp_path / "a.json"))] == expected


@pytest.mark.parametrize("odd", ['{"n": 2, "about": "see [1]", "tags": ["a"], "data": %s}', '{"data": %s, "x": {}}'])
def test_a_large_object_is_not_held(tmp_path: Path, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.data.sources._BLOCK", 7)
    monkeypatch.setattr("eyas.data.sources._IN_MEMORY", 20)
    (tmp_path / "a.json").write_text(odd % json.dumps(R, indent=1))
    rows = list(open_source(str(tmp_path / "a.json")))
    assert [r.value for r in rows] == R
    assert rows[1].place == "a.json, row 2 of data (line 5)"


def test_a_key_that_stands_twice_costs_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"prompt": "a"}, {"prompt": "b", "prompt": "c"}, {"prompt": "d"}]')
    rows = list(open_source(str(tmp_path / "a.json")))
    assert [r.broken for r in rows] == [None, "the key 'prompt' stands twice in one object", None]
    assert not any(r.ends for r in rows)


def test_lists_in_cells_are_messages_only_if_they_have_roles(tmp_path: Path) -> None:
    cells = ['[{"a": 1}]', '[{"a": 1}] what is this?', '[{"role": "user", "content": "q"}]']
    with open(tmp_path / "a.csv", "w", newline="") as f:
        csv.writer(f).writerows([["prompt"], *([c] for c in cells)])
    rows = [r.value["prompt"] for r in open_source(str(tmp_path / "a.csv"))]
    assert rows == [*cells[:2], json.loads(cells[2])]


def test_a_directory_reads_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.parquet", "sub/c.csv"):
        write(tmp_path / name)
    (tmp_path / "README.md").write_text("not data")
    assert [r.source for r in open_source(str(tmp_path))][::5] == ["a.parquet", "b.jsonl", "c.csv"]


def test_a_hub_id_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **kwargs: Any) -> None:
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(InputError, match=r"owner/name is neither a file, .*: no route\n"):
        open_source("owner/name")


def test_a_hub_id_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load(name: str, **kwargs: Any) -> list[dict[str, str]]:
        seen.update(kwargs, name=name)
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    assert [r.value for r in open_source("owner/name")] == ROWS
    assert seen == {"name": "owner/name", "split": "train", "streaming": True}


def prepared(
    tiny: Path, root: Path, prompts: list[Path], quiet: Progress, **data: Any
) -> tuple[dict[str, Any], list[Any]]:
    run = RunDir(root)
    counts = prepare(recipe(root, tiny, prompts, **data), resolve_target(str(tiny)), run, quiet)
    table = pq.read_table(run.prepared)
    assert table.schema.equals(PREPARED)
    return counts, table.to_pylist()


@pytest.mark.parametrize(
    ("n", "holdout", "limit", "expected"),
    [
        (100, 0.05, None, 5), (100, 0.05, 10, 1), (100, 0.5, 10, 5), (100, 7, None, 7), (100, 16, 10, 5),
        (100, 0, None, 0), (100, 0.001, None, 1), (2, 0.05, None, 1), (700, 0.1, 600, 60),
    ],
)  # fmt: skip
def test_holdout_counts(
    tiny: Path, tmp_path: Path, quiet: Progress, n: int, holdout: float, limit: int | None, expected: int
) -> None:
    path = write_prompts(tmp_path / "p.jsonl", n)
    counts, rows = prepared(tiny, tmp_path / "run", [path], quiet, holdout=holdout, limit=limit)
    assert sum(r["split"] == "holdout" for r in rows) == counts["holdout"] == expected
    assert len(rows) == counts["conversations"] == (limit or n)
    assert counts["train"] == len(rows) - expected


def test_the_split_depends_on_content_alone(tiny: Path, tmp_path: Path, quiet: Progress) -> None:
    path = write_prompts(tmp_path / "p.jsonl", 60)
    _, rows = prepared(tiny, tmp_path / "a", [path], quiet, holdout=0.2)
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    _, again = prepared(tiny, tmp_path / "b", [path], quiet, holdout=0.2)
    assert {r["id"]: r["split"] for r in rows} == {r["id"]: r["split"] for r in again}
    assert [r["id"] for r in rows] == [r["id"] for r in again][::-1]


def test_duplicates_and_two_sources(tiny: Path, tmp_path: Path, quiet: Progress) -> None:
    a, b = write_prompts(tmp_path / "a.jsonl", 6), tmp_path / "b.jsonl"
    b.write_text(
        "".join(json.dumps({"prompt": f"other {i}", "source": "mine"}) + "\n" for i in range(6)) + a.read_text()
    )
    counts, rows = prepared(tiny, tmp_path / "run", [a, b], quiet)
    assert counts["duplicates"] == 6
    assert counts["sources"] == {"a.jsonl": 6, "mine": 6}
    assert counts["shapes"] == {"messages": 6, "prompt": 6}
    assert counts["dropped"] == {}
    counts, rows = prepared(tiny, tmp_path / "few", [a, b], quiet, limit=4)
    assert [r["source"] for r in rows] == ["a.jsonl", "mine"] * 2, "a limit takes from every source"


def test_regenerate_prompts_and_kept_masks(tiny: Path, tmp_path: Path, quiet: Progress) -> None:
    path = write_prompts(tmp_path / "p.jsonl", 3, turns=2)
    _, rows = prepared(tiny, tmp_path / "a", [path], quiet)
    tokenizer = resolve_tokenizer(tiny)
    assert tokenizer.decode(rows[0]["prompt_ids"]).endswith("question 0.0<|im_end|>\n<|im_start|>assistant\n")
    assert (rows[0]["turns"], rows[0]["loss_mask"]) == (2, None)
    _, rows = prepared(tiny, tmp_path / "b", [path], quiet, responses="keep")
    on = [i for i, m in zip(rows[1]["prompt_ids"], rows[1]["loss_mask"], strict=True) if m]
    assert tokenizer.decode(on) == "answer 1.0<|im_end|>answer 1.1<|im_end|>"


def test_rows_with_tools_do_not_spoil_the_batch(tiny: Path, tmp_path: Path, quiet: Progress) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"prompt": f"q{i}", **({"tools": tools} if i % 2 else {})} for i in range(6)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, found = prepared(tiny, tmp_path / "run", [tmp_path / "p.jsonl"], quiet)
    assert [r["tools"] is not None for r in found] == [False, True] * 3


def resolve_tokenizer(tiny: Path) -> Any:
    from eyas.target.tokenizer import load_tokenizer

    return load_tokenizer(resolve_target(str(tiny)))
