"""Malformed input, one case a line: each ends in a clear error or in a counted drop that names its place."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.data.prepare import prepare
from eyas.errors import InputError
from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.target.resolve import resolve_target

from .tiny import recipe

GOOD = [
    {"messages": [{"role": "user", "content": f"good {i}"}, {"role": "assistant", "content": "fine"}]} for i in range(4)
]


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def assistant(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **message}]}


# a bad line among good ones of a JSON Lines file: the reason it is counted under, and what its place says
BAD_LINES: list[tuple[str, bytes | Any, str, str]] = [
    ("cut inside a text", b'{"text": "a', "broken JSON", "Unterminated string starting at column 10"),
    ("truncated", b'{"messages": [{"role": "user"', "broken JSON", "line 3"),
    ("no JSON", b"hello there", "broken JSON", "line 3: Expecting value at column 1"),
    ("two objects", b'{"text": "a"} {"text": "b"}', "broken JSON", "Extra data"),
    ("not UTF-8", b'{"text": "\xff\xfe"}', "broken JSON", "UTF-8"),
    ("control character", b'{"text": "a\x01b"}', "broken JSON", "Invalid control character at column 12"),
    ("deep nesting", b"[" * 200_000, "broken JSON", "line 3"),
    ("a list", [1, 2], "not an object", "a list"),
    ("a string", "text", "not an object", "found text"),
    ("null", None, "not an object", "nothing"),
    ("empty object", {}, "no known shape", "its keys: none"),
    ("unknown keys", {"foo": 1, "bar": 2}, "no known shape", "bar, foo"),
    ("empty messages", {"messages": []}, "no messages", ""),
    ("messages text", {"messages": "hi"}, "messages are not a list", "text"),
    ("messages object", {"messages": {"role": "user"}}, "messages are not a list", "an object"),
    ("message text", {"messages": ["hi"]}, "message is not an object", "message 0"),
    ("no role", {"messages": [{"content": "a"}]}, "unknown role", "None"),
    ("odd role", {"messages": [{"role": "narrator", "content": "a"}]}, "unknown role", "narrator"),
    ("number role", {"messages": [{"role": 3, "content": "a"}]}, "unknown role", "3"),
    ("only system", {"messages": [{"role": "system", "content": "a"}]}, "no user turn", ""),
    ("only assistant", {"messages": [{"role": "assistant", "content": "a"}]}, "no user turn", ""),
    ("no content", {"messages": [{"role": "user"}]}, "empty user turn", "message 0"),
    ("blank content", user(" \n"), "empty user turn", "message 0"),
    ("number content", user(7), "content is not text", "a number"),
    ("image part", user([{"type": "image_url", "image_url": {}}]), "content part is not text", "image_url"),
    ("odd part", user([5]), "content part is not text", "a number"),
    ("half a surrogate", user("a\ud800b"), "text is not valid Unicode", "surrogate"),
    ("calls no list", assistant(tool_calls="f()"), "tool calls are not a list", "message 1"),
    ("call no function", assistant(tool_calls=[{"id": 1}]), "tool call without a function", "message 1"),
    (
        "broken arguments",
        assistant(tool_calls=[{"function": {"name": "f", "arguments": "{x"}}]),
        "tool call arguments are not JSON",
        "message 1",
    ),
    ("tools text", {**user("a"), "tools": "no"}, "tools are not a list", ""),
    ("tools numbers", {**user("a"), "tools": [1]}, "tools are not a list", ""),
    ("reasoning list", assistant(content="b", reasoning_content=["c"]), "content is not text", "reasoning"),
    ("too long", user("x" * 500), "prompt leaves no room for an answer", "max_length 400"),
    ("conversation of numbers", {"conversations": [1]}, "message is not an object", "message 0"),
    ("turns number", {"turns": 3}, "messages are not a list", "turns is a number"),
    ("tool result first", {"messages": [{"role": "tool", "content": "a"}, *user("b")["messages"]]}, "no user turn", ""),
    ("a key twice", b'{"text": "a", "text": "b"}', "broken JSON", "the key 'text' stands twice"),
    (
        "deep tools",
        b'{"prompt": "a", "tools": [{"a": ' + b"[" * 800 + b"]" * 800 + b"}]}",
        "nested too deeply",
        "line 3",
    ),
    ("NaN", b'{"prompt": NaN}', "broken JSON", "NaN is not JSON"),
    ("system list", {"prompt": "a", "system": ["b"]}, "system is not text", "system is a list"),
    ("two systems", {"prompt": "a", "system": "b", "system_prompt": "c"}, "more than one system prompt", "and"),
    (
        "system beside another",
        {"system": "b", "messages": [{"role": "system", "content": "c"}, *user("a")["messages"]]},
        "more than one system prompt",
        "in system and messages",
    ),
    ("odd history", {"instruction": "a", "history": [["b"]]}, "history is not [question, answer] pairs", "item 0"),
    ("history beside messages", {**user("a"), "history": [["b", "c"]]}, "history beside messages", "messages"),
    ("input object", {"instruction": "a", "input": {"b": 1}}, "input is not text", "input is an object"),
]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


@pytest.fixture
def go(tiny: Path, tmp_path: Path, quiet: Progress) -> Any:
    def run(path: Path, **data: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        directory = RunDir(tmp_path / "run")
        counts = prepare(recipe(directory.root, tiny, [path], **data), resolve_target(str(tiny)), directory, quiet)
        lines = (directory.samples / "dropped.jsonl").read_text().splitlines()
        return counts, [json.loads(line) for line in lines]

    return run


@pytest.mark.parametrize(("row", "reason", "place"), [c[1:] for c in BAD_LINES], ids=[c[0] for c in BAD_LINES])
def test_a_bad_line_is_a_counted_drop(go: Any, tmp_path: Path, row: Any, reason: str, place: str) -> None:
    counts, dropped = go(jsonl(tmp_path / "p.jsonl", [*GOOD[:2], row, *GOOD[2:]]))
    assert counts["dropped"] == {reason: 1}
    assert counts["conversations"] == 4
    assert counts["rows"] == 5
    assert dropped[0]["reason"] == reason
    assert "p.jsonl, line 3" in dropped[0]["place"]
    assert place in f"{dropped[0]['place']}: {dropped[0]['detail']}"


@pytest.mark.parametrize(("row", "reason", "place"), [c[1:] for c in BAD_LINES], ids=[c[0] for c in BAD_LINES])
def test_nothing_but_a_bad_line_is_an_error_that_names_it(
    go: Any, tmp_path: Path, row: Any, reason: str, place: str
) -> None:
    with pytest.raises(InputError, match=r"no usable row in .*p.jsonl") as e:
        go(jsonl(tmp_path / "p.jsonl", [b"", b" ", row]))
    assert f"1 x {reason} (first: p.jsonl, line 3" in e.value.message
    assert e.value.exit_code == 2


# what the kept answers must bring along
KEEP = [
    ("no answer", user("a"), "no answer to keep"),
    ("empty answer", assistant(content=""), "empty answer"),
    ("plain text", {"text": "a"}, "no answer to keep"),
    ("answer first", {"messages": assistant(content="a")["messages"][::-1]}, "no answer to keep"),
    ("too long", assistant(content="x" * 500), "longer than data.max_length"),
    ("number", {"prompt": "a", "response": 4}, "answer is not text"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), [c[1:] for c in KEEP], ids=[c[0] for c in KEEP])
def test_a_bad_kept_row_is_a_counted_drop(go: Any, tmp_path: Path, row: Any, reason: str) -> None:
    counts, dropped = go(jsonl(tmp_path / "p.jsonl", [*GOOD, row]), responses="keep")
    assert counts["dropped"] == {reason: 1}
    assert "line 5" in dropped[0]["place"]


FILES: list[tuple[str, str, bytes | None, str]] = [
    ("missing", "p.jsonl", None, "p.jsonl does not exist"),
    ("empty jsonl", "p.jsonl", b"", "p.jsonl is empty"),
    ("empty json", "p.json", b"", "p.json is empty"),
    ("blank lines", "p.jsonl", b"\n \n", "holds no row"),
    ("empty list", "p.json", b"[]", "holds no row"),
    ("json number", "p.json", b"5", "expected a JSON list of rows, or objects, found '5' at line 1 column 1"),
    ("json cut short", "p.json", b'[\n{"text": ', "p.json, line 2: broken JSON: Expecting value at line 2 column 10"),
    ("json object", "p.json", b'{"a": 1}', "no known shape .first: p.json, row 1 .line 1.: its keys: a"),
    ("json rest", "p.json", b'[{"text": "a"}]\n x', "found 'x' at line 2 column 2"),
    ("json no comma", "p.json", b'[{"text": "a"}\n{"text": "b"}]', "expected ',' or ']', found '{' at line 2"),
    ("json last comma", "p.json", b'[{"text": "a"},]', "Expecting value at line 1 column 16"),
    ("json two lists", "p.json", b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "several lists .*train, test"),
    ("json a row with rows", "p.json", b'{"text": "a", "data": [{"text": "b"}]}', "itself a row and holds rows .*data"),
    ("json UTF-16", "p.json", '[{"text": "a"}]'.encode("utf-16"), "UTF-16, expected UTF-8"),
    ("jsonl UTF-16", "p.jsonl", '{"text": "a"}'.encode("utf-16"), "UTF-16, expected UTF-8"),
    ("csv UTF-16", "p.csv", "text\na\n".encode("utf-16"), "UTF-16, expected UTF-8"),
    ("csv open quote", "p.csv", b'prompt\na\n"b\nc\n', r"p.csv, row 3 .line 3.: .* not closed up to line 4"),
    ("csv quote late", "p.csv", b'prompt\na\n"b\n"c" d\n', r"p.csv, row 3 .line 3.: .* not closed up to line 4"),
    ("csv column twice", "p.csv", b"prompt,prompt\na,b\n", "the column 'prompt' stands twice"),
    ("packed", "p.jsonl.gz", b"x", "cannot read .gz"),
    ("csv header only", "p.csv", b"prompt,response\n", "holds no row"),
    ("csv too many fields", "p.csv", b"prompt\na,b\n", "2 fields, not 1 as the header has"),
    ("csv not UTF-8", "p.csv", b"prompt\n\xff\xff\n", "not UTF-8"),
    ("not parquet", "p.parquet", b"PAR1 no", "not a Parquet file"),
    ("unknown extension", "p.txt", b"hello", "cannot read .txt"),
    ("all broken", "p.jsonl", b"{\n{\n", "2 x broken JSON .first: p.jsonl, line 1: Expecting property name"),
]


@pytest.mark.parametrize(("name", "content", "message"), [c[1:] for c in FILES], ids=[c[0] for c in FILES])
def test_a_bad_file_is_one_clear_error(go: Any, tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as e:
        go(tmp_path / name)
    assert e.value.exit_code == 2


UNREADABLE = [
    ("p.json", b'[{"text": "a"},\n{"text": "b"},\n{"text": oops},\n{"text": "c"}]', "p.json, line 3: .* column 10"),
    ("p.json", b'{"data": [{"text": "a"},\n{"text": oops}]}', "p.json, line 2: .*Expecting value at line 2 column 10"),
    ("p.csv", b'prompt\na\nb\n"c\nd\n', "p.csv, row 4 .line 4.: broken row: unexpected end of data"),
    ("p.csv", b"prompt\na\nb\n\xff\nd\n", "not UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE)
def test_where_reading_cannot_go_on_nothing_is_left_out(
    go: Any, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as e:
        go(tmp_path / name, broken_rows="drop")
    assert "as JSON Lines" in (e.value.fix or "")
    assert (tmp_path / "run" / "samples" / "dropped.jsonl").exists()


def test_a_broken_row_group(go: Any, tmp_path: Path) -> None:
    file = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": [f"question {i} " * 50 for i in range(1000)]}), file, row_group_size=250)
    content = bytearray(file.read_bytes())
    begin = pq.read_metadata(file).row_group(2).column(0).dictionary_page_offset
    content[begin : begin + 200] = b"\xff" * 200
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"p.parquet, after row \d+: broken row"):
        go(file)


def test_rows_of_a_csv_that_are_broken_alone(go: Any, tmp_path: Path) -> None:
    swallowed = "".join(f"question {i},x\n" for i in range(50))
    text = f'prompt,response\na,b\n"c"d "",e\nf\ng,"yes\n{swallowed}and,no"\nh,i\nj,"k\nl, m"\nn,o\np,q\n'
    (tmp_path / "p.csv").write_text(text)
    counts, dropped = go(tmp_path / "p.csv")
    assert counts["conversations"] == 5
    assert [d["detail"] for d in dropped] == [
        "',' expected after '\"'",
        "1 fields, not 2 as the header has",
        "50 lines inside one quoted cell each look like a row: a quote is not closed",
    ]
    assert dropped[-1]["place"] == "p.csv, row 5 (line 5)"


def test_a_record_of_very_many_lines(go: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.data.sources._LONGEST_RECORD", 3)
    (tmp_path / "p.csv").write_text('prompt\na\n"b\nc\nd"\n"e\nf\ng\nh"\n')
    counts, dropped = go(tmp_path / "p.csv")
    assert counts["conversations"] == 2
    assert dropped[0]["detail"] == "4 lines in one record: a quote is not closed where it should be"


def test_half_a_surrogate_as_a_key(go: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"its keys: \\ud800"):
        go(jsonl(tmp_path / "p.jsonl", [{"\ud800": 1}]))


def test_half_a_surrogate_as_the_source(go: Any, tmp_path: Path) -> None:
    counts, _ = go(jsonl(tmp_path / "p.jsonl", [*GOOD, {"prompt": "a", "source": "\ud800"}]))
    assert counts["sources"] == {"p.jsonl": 5}


def test_duplicates_are_good_rows(go: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", [*GOOD[:2] * 3, *[{"foo": i} for i in range(5)]])
    assert go(path)[0]["dropped"] == {"no known shape": 5}


def test_an_odd_directory(go: Any, tmp_path: Path) -> None:
    (tmp_path / "d" / "x.jsonl").mkdir(parents=True)
    (tmp_path / "d" / "a.jsonl").write_text("")
    jsonl(tmp_path / "d" / "b.NDJSON", GOOD[:2])
    odd = Path(os.fsdecode(os.fsencode(tmp_path / "d") + b"/\xff.JSONL"))
    jsonl(odd, GOOD[2:])
    counts, dropped = go(tmp_path / "d")
    assert counts["dropped"] == {"empty file": 1}
    assert dropped[0]["place"] == "a.jsonl"
    assert counts["sources"] == {"b.NDJSON": 2, "\\udcff.JSONL": 2}
    (tmp_path / "d" / "c.jsonl.gz").write_bytes(b"x")
    with pytest.raises(InputError, match=r"holds c.jsonl.gz: packed files are not read"):
        go(tmp_path / "d")


def test_an_empty_directory(go: Any, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(InputError, match=r"holds no .jsonl"):
        go(tmp_path / "d")


def test_more_bad_rows_than_good_ones(go: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", [*GOOD[:2], b"{", {"foo": 1}, {"foo": 2}])
    with pytest.raises(InputError, match=r"more bad rows than good ones in .*: 3 of 5") as e:
        go(path)
    assert "2 x no known shape (first: p.jsonl, line 4: its keys: foo)" in e.value.message
    assert "1 x broken JSON (first: p.jsonl, line 3" in e.value.message
    assert (tmp_path / "run" / "samples" / "dropped.jsonl").read_text().count("\n") == 3
    assert not (tmp_path / "run" / "samples" / "prepared.parquet").exists()
    assert not list((tmp_path / "run" / "samples").glob(".*"))


def test_one_conversation_cannot_be_split(go: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none can be held out"):
        go(jsonl(tmp_path / "p.jsonl", GOOD[:1]))
    counts, _ = go(jsonl(tmp_path / "p.jsonl", GOOD[:1]), holdout=0)
    assert counts["train"] == 1


def test_columns_of_the_wrong_type(go: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [1, 2]}), tmp_path / "p.parquet")
    with pytest.raises(InputError, match=r"2 x content is not text .first: p.parquet, row 1"):
        go(tmp_path / "p.parquet")


def test_a_line_that_cannot_be_parsed_ends_the_job_unless_the_recipe_drops_it(go: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", [*GOOD[:2], b'{"messages": [', *GOOD[2:]])
    with pytest.raises(InputError, match=r"p.jsonl, line 3: broken JSON: .* at column \d+") as e:
        go(path, broken_rows="refuse")
    assert "data.broken_rows: drop" in (e.value.fix or "")
    assert go(path, broken_rows="drop")[0]["dropped"] == {"broken JSON": 1}
