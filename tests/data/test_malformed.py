"""Malformed input, one case a line: each ends in a clear error or in a counted drop that names its place."""

import json
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
    ("a string", "text", "not an object", "a str"),
    ("null", None, "not an object", "nothing"),
    ("empty object", {}, "no known shape", "its keys: none"),
    ("unknown keys", {"foo": 1, "bar": 2}, "no known shape", "bar, foo"),
    ("empty messages", {"messages": []}, "no messages", ""),
    ("messages text", {"messages": "hi"}, "messages are not a list", "text"),
    ("messages object", {"messages": {"role": "user"}}, "messages are not a list", "a dict"),
    ("message text", {"messages": ["hi"]}, "message is not an object", "message 0"),
    ("no role", {"messages": [{"content": "a"}]}, "unknown role", "None"),
    ("odd role", {"messages": [{"role": "narrator", "content": "a"}]}, "unknown role", "narrator"),
    ("number role", {"messages": [{"role": 3, "content": "a"}]}, "unknown role", "3"),
    ("only system", {"messages": [{"role": "system", "content": "a"}]}, "no user turn", ""),
    ("only assistant", {"messages": [{"role": "assistant", "content": "a"}]}, "no user turn", ""),
    ("no content", {"messages": [{"role": "user"}]}, "empty user turn", "message 0"),
    ("blank content", user(" \n"), "empty user turn", "message 0"),
    ("number content", user(7), "content is not text", "a int"),
    ("image part", user([{"type": "image_url", "image_url": {}}]), "content part is not text", "image_url"),
    ("odd part", user([5]), "content part is not text", "a int"),
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
    ("turns number", {"turns": 3}, "messages are not a list", "turns is a int"),
    ("tool result first", {"messages": [{"role": "tool", "content": "a"}, *user("b")["messages"]]}, "no user turn", ""),
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
    ("json number", "p.json", b"5", "expected a JSON list of rows"),
    ("json cut short", "p.json", b'[\n{"text": ', "broken JSON .first: p.json, row 1 .line 2"),
    ("json object", "p.json", b'{"a": 1}', "expected a JSON list of rows"),
    ("csv header only", "p.csv", b"prompt,response\n", "holds no row"),
    ("csv too many fields", "p.csv", b"prompt\na,b\n", "not 1 fields"),
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


def test_a_broken_json_list_keeps_what_came_before(go: Any, tmp_path: Path) -> None:
    text = "[\n" + ",\n".join(json.dumps(r) for r in GOOD) + ',\n{"messages": oops}]'
    (tmp_path / "p.json").write_text(text)
    counts, dropped = go(tmp_path / "p.json")
    assert counts["conversations"] == 4
    assert dropped[0]["place"] == "p.json, row 5 (line 6)"
    assert "at line 6" in dropped[0]["detail"]


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
