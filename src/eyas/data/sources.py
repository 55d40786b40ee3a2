"""Rows out of files, directories and data sets, one at a time: memory does not grow with the file."""

import csv
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.data.json_values import JsonValues, broken_json, decode
from eyas.data.shapes import NO_SHAPE, RowError, is_messages, read_row, without_nulls
from eyas.errors import InputError, first_line

KINDS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_BLOCK = 1 << 20
_LONGEST_ROW = 64 << 20
"""characters after which one element of a JSON array counts as broken"""
_IN_MEMORY = 8 << 20
"""characters up to which a JSON object that may be one row, or hold the list of rows, is read at once"""
_LONGEST_RECORD = 1000
"""lines after which a CSV record is taken for a quote that was never closed"""
_SWALLOWED = 8
"""lines inside one CSV record that each look like a record: from here on they are taken for swallowed rows"""


@dataclass(frozen=True)
class Row:
    """One row as it was found; `broken` says why it could not even be parsed."""

    source: str
    """file name or data set id"""
    place: str
    """for people: "prompts.jsonl, line 7" """
    value: Any = None
    broken: str | None = None
    ends: bool = False
    """broken in such a way that what follows in its file cannot be told: it cannot be left out alone"""
    left_out: str | None = None
    """why there is nothing here, where that is no fault (an empty file of a directory): counted, never refused"""

    @property
    def kind(self) -> str:
        """The reason under which a broken row is counted."""
        return "broken JSON" if ".json" in self.source.lower() or ".ndjson" in self.source.lower() else "broken row"


def refusal(row: Row) -> InputError:
    """The error for a broken row that is not to be left out."""
    fix = (
        "repair the file there, or write it as JSON Lines: there a broken row costs only itself"
        if row.ends
        else "correct or delete that row, or set data.broken_rows: drop to leave such rows out, counted"
    )
    return InputError(f"{row.place}: {row.kind}: {row.broken}", fix=fix)


def open_source(name: str) -> Iterator[Row]:
    """The rows of a file, of every known file below a directory, or of a hub data set's train split.

    Raises InputError at once when there is nothing to read under that name.
    """
    path = Path(name)
    if path.is_dir():
        files = _readable_files(path)
        return (row for file in files for row in _read(file, alone=False))
    if path.exists():
        return _read(path)
    if _kind(path) in KINDS or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise InputError(f"prompts file {name} does not exist", fix="correct data.prompts in the recipe")
    return _read_hub(name)


def data_files(directory: Path) -> list[Path]:
    """The files of a directory that are read, in order."""
    return [p for p in _visible(directory) if _kind(p) in KINDS]


def _visible(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file() and not p.name.startswith("."))


def _readable_files(directory: Path) -> list[Path]:
    """`data_files`. Raises InputError if there is none, or if data would be passed over because it is packed."""
    packed = [
        p for p in _visible(directory) if p.suffix.lower() in _PACKED and Path(p.stem).suffix.lower() in (*KINDS, "")
    ]
    if packed:
        raise InputError(
            f"directory {shown(directory)} holds {shown(packed[0].name)}: packed files are not read",
            fix="unpack it, or move it out of the directory",
        )
    files = data_files(directory)
    if not files:
        raise InputError(
            f"directory {shown(directory)} holds no {', '.join(KINDS)} file", fix="point data.prompts at the files"
        )
    return files


def count_rows(name: str, at_least: int) -> int:
    """Rows of a source, broken ones included; of a hub data set only `at_least`, for it is known only once read."""
    path = Path(name)
    if not path.exists():
        return at_least
    total = 0
    for file in data_files(path) if path.is_dir() else [path]:
        rows = _read(file, alone=False)  # says what is wrong with a file that cannot be opened
        if _kind(file) == ".parquet" and file.stat().st_size:
            with _open_parquet(file) as table:
                total += table.metadata.num_rows
        elif _kind(file) in (".jsonl", ".ndjson"):
            with open(file, "rb") as f:
                total += sum(1 for line in f if not line.isspace())
        else:
            total += sum(1 for _ in rows)
    return total


def _read(path: Path, alone: bool = True) -> Iterator[Row]:
    kind = _kind(path)
    if kind not in KINDS:
        packed = "; unpack it first" if kind in _PACKED else ""
        raise InputError(
            f"{shown(path)}: cannot read {path.suffix or 'a file without an extension'}",
            fix=f"give {', '.join(KINDS)}{packed}",
        )
    try:
        empty = path.stat().st_size == 0
        with open(path, "rb"):
            pass
    except OSError as e:
        raise InputError(f"{shown(path)} cannot be read: {e.strerror}", fix="check its permissions") from None
    if empty and alone:
        raise InputError(f"prompts file {shown(path)} is empty", fix="give a file with at least one row")
    if empty:
        return iter([Row(shown(path.name), shown(path.name), left_out="empty file")])
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".json": _read_json,
        ".parquet": _read_parquet,
        ".csv": _read_csv,
    }
    return readers[kind](path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    name = shown(path.name)
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            place = f"{name}, line {number}"
            if number == 1:
                if line.startswith(_UTF16):
                    yield Row(name, place, broken=_IS_UTF16, ends=True)
                    return
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.isspace() or not line:
                continue
            try:
                yield Row(name, place, decode(line.rstrip(b"\r\n").decode()))
            except UnicodeDecodeError as e:
                yield Row(name, place, broken=f"byte {e.start} is not UTF-8")
            except (ValueError, RecursionError) as e:
                yield Row(name, place, broken=broken_json(e))


def _read_json(path: Path) -> Iterator[Row]:
    """A list of rows, one object that is a row or holds one list of objects ({"data": [...]}), or values in a row."""
    name = shown(path.name)
    if _is_utf16(path):
        yield Row(name, f"{name}, line 1", broken=_IS_UTF16, ends=True)
        return
    with open(path, encoding="utf-8-sig") as f:
        values = JsonValues(f, _BLOCK, _LONGEST_ROW)
        try:
            if values.peek() == "{":
                yield from _object_first(name, path, values)
            else:
                yield from _values(name, values, 0)
        except UnicodeDecodeError as e:
            yield Row(name, f"{name}, after line {values.line}", broken=f"not UTF-8: {e.reason}", ends=True)
        except (ValueError, RecursionError) as e:
            broken = values.explained(e)
            yield Row(name, f"{name}, line {values.line}", broken=broken, ends=True)


def _values(name: str, values: JsonValues, number: int) -> Iterator[Row]:
    """Values one after the other: a list's elements are rows, any other value is one."""
    while head := values.peek():
        if head not in "[{":
            raise values.unexpected("expected a JSON list of rows, or objects")
        for value, twice in values.elements() if head == "[" else [values.value()]:
            number += 1
            yield Row(name, f"{name}, row {number} (line {values.began})", value, twice)


def _object_first(name: str, path: Path, values: JsonValues) -> Iterator[Row]:
    """A file that begins with an object: if nothing follows, it may be a row or hold the rows."""
    if not values.fits(_IN_MEMORY):
        yield from _large_object(name, path, values)
        return
    value, twice = values.value()
    if values.peek() or twice is not None:
        yield Row(name, f"{name}, row 1 (line {values.began})", value, twice)
        yield from _values(name, values, 1)
        return
    lists = {k: v for k, v in value.items() if _objects(v)}
    known = _known(value)
    if known:  # a list under one of its keys may still be the rows: {"messages": [{"messages": [...]}, ...]}
        lists = {k: v for k, v in lists.items() if _readable(v[0])}
    if not lists:
        yield Row(name, f"{name}, row 1 (line {values.began})", value)
        return
    if _readable(value):
        raise InputError(
            f"{name} is one object that is itself a row and holds rows under {', '.join(lists)}",
            fix="write the list of rows, or the one row, as a file of its own",
        )
    key = _only(name, list(lists))
    for number, element in enumerate(lists[key], 1):
        yield Row(name, f"{name}, row {number} of {key}", element)


def _large_object(name: str, path: Path, values: JsonValues) -> Iterator[Row]:
    """An object too large to be a row: read once to see which list it holds, and once for that list's elements."""
    key = _only(name, [key for key, elements in values.members() if _objects([v for v, _ in islice(elements, 1)])])
    if values.peek():
        raise values.unexpected("expected the end of the file after the object")
    with open(path, encoding="utf-8-sig") as f:
        again = JsonValues(f, _BLOCK, _LONGEST_ROW)
        again.peek()
        for found, elements in again.members():
            if found != key:
                continue
            for number, (value, twice) in enumerate(elements, 1):
                yield Row(name, f"{name}, row {number} of {key} (line {again.began})", value, twice)
            return


def _objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _known(value: dict[str, Any]) -> bool:
    """Whether it has the keys of a row, good or bad."""
    try:
        read_row(value)
    except RowError as e:
        return e.reason != NO_SHAPE
    return True


def _readable(value: Any) -> bool:
    try:
        read_row(value)
    except RowError:
        return False
    return True


def _only(name: str, keys: list[str]) -> str:
    if len(keys) == 1:
        return keys[0]
    raise InputError(
        f"{name} is one object with {'several lists' if keys else 'no list'} of rows{': ' if keys else ''}"
        f"{', '.join(keys)}",
        fix="write the list of rows that is meant as a file of its own",
    )


class _Lines:
    """The lines of a file for the csv module; `latest` is what it took since `start`."""

    def __init__(self, f: IO[str]) -> None:
        self._file = f
        self.number = 0
        self.latest: list[str] = []

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = next(self._file)
        self.number += 1
        self.latest.append(line)
        return line


def _read_csv(path: Path) -> Iterator[Row]:
    name = shown(path.name)
    if _is_utf16(path):
        yield Row(name, f"{name}, line 1", broken=_IS_UTF16, ends=True)
        return
    csv.field_size_limit(_LONGEST_ROW)
    with open(path, encoding="utf-8-sig", newline="") as f:
        lines = _Lines(f)
        reader = csv.reader(lines, strict=True)
        header: list[str] = []
        number = 0
        while True:
            number += 1
            lines.latest.clear()
            place = f"{name}, row {number} (line {lines.number + 1})"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except UnicodeDecodeError as e:
                yield Row(name, place, broken=f"not UTF-8: {e.reason}", ends=True)
                return
            except csv.Error as e:
                # a record of one line with as many quotes opened as closed leaves the next line untouched
                whole = len(lines.latest) == 1 and lines.latest[0].count('"') % 2 == 0
                spans = "" if whole else f"; a quote opened there is not closed up to line {lines.number}"
                yield Row(name, place, broken=f"{e}{spans}", ends=not whole)
                if not whole:
                    return
                continue
            if not header:
                header = cells
                if twice := [c for c in header if header.count(c) > 1]:
                    raise InputError(f"{name}: the column {twice[0]!r} stands twice", fix="rename one of them")
            elif cells:
                wrong = _misread(cells, header, lines.latest)
                value = None if wrong else {k: _cell(v) for k, v in zip(header, cells, strict=True)}
                yield Row(name, place, value, wrong)


def _misread(cells: list[str], header: list[str], lines: list[str]) -> str | None:
    """Why these cells are not what the file's author meant, if that can be told."""
    if len(cells) != len(header):
        return f"{len(cells)} fields, not {len(header)} as the header has"
    if len(lines) > _LONGEST_RECORD:
        return f"{len(lines):,} lines in one record: a quote is not closed where it should be"
    inner = [line for line in lines[1:-1] if line.strip()]
    if len(header) > 1 and len(inner) >= _SWALLOWED:
        alike = sum(line.count(",") == len(header) - 1 for line in inner)
        if alike >= 0.9 * len(inner):
            return f"{len(inner):,} lines inside one quoted cell each look like a row: a quote is not closed"
    return None


def _cell(text: str) -> Any:
    """A cell that holds a JSON list of messages as that list."""
    if text.startswith("[{"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return value if is_messages(value) else text
    return text


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as e:
        raise InputError(f"{shown(path)} is not a Parquet file: {first_line(e)}", fix="write it again") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    name = shown(path.name)
    with _open_parquet(path) as file:
        number = 0
        try:
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(name, f"{name}, row {number}", without_nulls(value))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
            yield Row(name, f"{name}, after row {number}", broken=first_line(e), ends=True)


def _read_hub(name: str) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        rows = iter(load_dataset(name, split="train", streaming=True))
    except Exception as e:  # noqa: BLE001 - the hub client raises many kinds; all mean the same to the user
        raise InputError(
            f"{name} is neither a file, nor a directory, nor a data set that can be opened: {first_line(e)}",
            fix="correct data.prompts in the recipe",
        ) from None
    return (Row(name, f"{name}, row {number}", without_nulls(value)) for number, value in enumerate(rows, 1))


_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_IS_UTF16 = "the file is UTF-16, expected UTF-8 (iconv -f UTF-16 -t UTF-8 converts it)"


def _is_utf16(path: Path) -> bool:
    with open(path, "rb") as f:
        return f.read(2) in _UTF16


def _kind(path: Path) -> str:
    return path.suffix.lower()


def shown(name: str | Path) -> str:
    """A file name as text that can be written anywhere: bytes that are not UTF-8 as \\udcff."""
    return os.fspath(name).encode("utf-8", "backslashreplace").decode()
