"""Rows out of files, directories and data sets, one at a time: memory does not grow with the file."""

import csv
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import InputError

KINDS = (".jsonl", ".json", ".parquet", ".csv")
_BLOCK = 1 << 20
_LONGEST_ROW = 64 << 20
"""characters after which one element of a JSON array counts as broken"""


@dataclass(frozen=True)
class Row:
    """One row as it was found; `broken` says why it could not even be parsed."""

    source: str
    """file name or data set id"""
    place: str
    """for people: "prompts.jsonl, line 7" """
    value: Any = None
    broken: str | None = None


def open_source(name: str) -> Iterator[Row]:
    """The rows of a file, of every known file below a directory, or of a hub data set's train split.

    Raises InputError at once when there is nothing to read under that name.
    """
    path = Path(name)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in KINDS and p.is_file() and not p.name.startswith("."))
        if not files:
            raise InputError(
                f"directory {path} holds no {', '.join(KINDS)} file", fix="point data.prompts at the files"
            )
        return (row for file in files for row in _read(file))
    if path.exists():
        return _read(path)
    if path.suffix in KINDS or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise InputError(f"prompts file {name} does not exist", fix="correct data.prompts in the recipe")
    return _read_hub(name)


def _read(path: Path) -> Iterator[Row]:
    if path.suffix not in KINDS:
        raise InputError(
            f"{path}: cannot read {path.suffix or 'a file without an extension'}", fix=f"give {', '.join(KINDS)}"
        )
    try:
        empty = path.stat().st_size == 0
        with open(path, "rb"):
            pass
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}", fix="check its permissions") from None
    if empty:
        raise InputError(f"prompts file {path} is empty", fix="give a file with at least one row")
    return {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}[path.suffix](path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            place = f"{path.name}, line {number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield Row(path.name, place, json.loads(line.rstrip(b"\r\n")))
            except json.JSONDecodeError as e:
                yield Row(path.name, place, broken=f"{_what(e)} at column {e.colno}")
            except UnicodeDecodeError as e:
                yield Row(path.name, place, broken=f"byte {e.start} is not UTF-8")
            except RecursionError:
                yield Row(path.name, place, broken="nested too deeply")


def _read_json(path: Path) -> Iterator[Row]:
    """A JSON list of rows; also one object whose only list of objects is the rows ({"data": [...]})."""
    with open(path, encoding="utf-8-sig") as f:
        try:
            yield from _elements(path, f)
        except UnicodeDecodeError as e:
            yield Row(path.name, f"{path.name}, row ?", broken=f"not UTF-8: {e.reason}")


def _elements(path: Path, f: IO[str]) -> Iterator[Row]:
    decoder, text, number, lines = json.JSONDecoder(), "", 0, 1
    ended = False

    def more() -> None:
        nonlocal text, ended
        block = f.read(_BLOCK)
        text, ended = text + block, not block

    def skip(n: int) -> None:
        nonlocal text, lines
        lines += text.count("\n", 0, n)
        text = text[n:]

    def first() -> str:
        """The next character that is not white space, "" at the end; what lies before it is dropped."""
        while True:
            skip(len(text) - len(text.lstrip()))
            if text or ended:
                return text[:1]
            more()

    head = first()
    if head == "{":  # {"data": [...]}: walk to the first list
        while not ended and "[" not in text:
            more()
        if "[" not in text or len(text) > _LONGEST_ROW:
            yield Row(path.name, f"{path.name}, line {lines}", broken="expected a JSON list of rows")
            return
        skip(text.index("["))
        head = "["
    if head != "[":
        yield Row(path.name, f"{path.name}, line {lines}", broken="expected a JSON list of rows")
        return
    skip(1)
    while (char := first()) != "]":
        if char == ",":
            skip(1)
            continue
        number += 1
        place = f"{path.name}, row {number} (line {lines})"
        while True:
            try:
                value, end = decoder.raw_decode(text)
                if end < len(text) or ended:  # a number at the very end might go on
                    break
            except json.JSONDecodeError as e:
                if ended or len(text) > _LONGEST_ROW:
                    yield Row(path.name, place, broken=f"{_what(e)} at line {lines + e.lineno - 1}")
                    return
            except RecursionError:
                yield Row(path.name, place, broken="nested too deeply")
                return
            more()
        skip(end)
        yield Row(path.name, place, value)


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_ROW)
    with open(path, encoding="utf-8-sig", newline="") as f:
        reader = csv.DictReader(f, strict=True)
        number = 1
        while True:
            number += 1
            place = f"{path.name}, row {number}"
            try:
                values = next(reader)
            except StopIteration:
                return
            except UnicodeDecodeError as e:
                yield Row(path.name, place, broken=f"not UTF-8: {e.reason}")
                return
            except csv.Error as e:
                yield Row(path.name, place, broken=str(e))
                continue
            if None in values or None in values.values():
                yield Row(path.name, place, broken=f"not {len(reader.fieldnames or [])} fields, as the header has")
            else:
                yield Row(path.name, place, {k: _cell(v) for k, v in values.items()})


def _cell(text: str) -> Any:
    """A cell that holds a JSON list (messages written into a CSV) as that list."""
    if text.startswith("[{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    return text


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as e:
        raise InputError(f"{path} is not a Parquet file: {_first_line(e)}", fix="write it again") from None
    with closing(file):
        number = 0
        try:
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(path.name, f"{path.name}, row {number}", value)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
            yield Row(path.name, f"{path.name}, after row {number}", broken=_first_line(e))


def _read_hub(name: str) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        rows = iter(load_dataset(name, split="train", streaming=True))
    except Exception as e:  # noqa: BLE001 - the hub client raises many kinds; all mean the same to the user
        raise InputError(
            f"{name} is neither a file, nor a directory, nor a data set that can be opened: {_first_line(e)}",
            fix="correct data.prompts in the recipe",
        ) from None
    return (Row(name, f"{name}, row {number}", value) for number, value in enumerate(rows, 1))


def _what(e: json.JSONDecodeError) -> str:
    """The decoder's words; some end with the "at" of a place that follows."""
    return e.msg.removesuffix(" at")


def _first_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return lines[0] if lines else type(e).__name__
