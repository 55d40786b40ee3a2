"""The files of a harvest: which shard belongs to which part, and which are there. Imports no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.data.schema import part_files
from eyas.errors import EyasError
from eyas.rundir import RunDir

AGAIN = "delete it and run `eyas run RECIPE` again: what is missing is made again"


def shard_of(part: Path) -> str:
    """Name of the file inside states/ that holds a part's states."""
    return f"{part.stem}.safetensors"


def harvest_files(run: RunDir) -> list[Path]:
    """Files without which committed samples are lost: each part, its shard, and the part of each shard. Names alone are
    looked at, but for a part without a shard: it has none if all of its answers were dropped."""
    found = set(part_files(run.samples))
    parts = found | {run.samples / f"{shard.stem}.parquet" for shard in run.states.glob("[!.]*.safetensors")}
    shards = [run.states / shard_of(part) for part in found]
    needed = [s for p, s in zip(found, shards, strict=True) if s.exists() or _has_states(p)]
    return sorted([*parts, *needed]) or [run.samples / "*.parquet"]


def _has_states(part: Path) -> bool:
    try:
        return any(i >= 0 for i in read_part(part, ["index"])["index"].to_pylist())
    except EyasError:
        return True


def read_part(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A sample file, or some of its columns; its pages are checked by their checksums. Raises EyasError on damage."""
    try:
        table = pq.read_table(path, columns=columns, memory_map=False, page_checksum_verification=True)
        if missing := set(columns or ()) - set(table.column_names):
            raise EyasError(f"{path} has no column {', '.join(sorted(missing))}", fix=AGAIN)
        return table
    except (pa.ArrowException, OSError) as e:
        raise _damaged(path, e) from None


def part_batches(path: Path, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
    """The same, `rows` of it in memory at a time."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield from file.iter_batches(rows, columns=columns)
    except (pa.ArrowException, OSError) as e:
        raise _damaged(path, e) from None


def _damaged(path: Path, e: Exception) -> EyasError:
    return EyasError(f"{path} is not a whole file of samples: {' '.join(str(e).split())}", fix=AGAIN)


def write_part(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, write_page_checksum=True)
