"""The files of a harvest: which shard belongs to which part, and which are there. Imports no torch."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.data.schema import part_files
from eyas.rundir import RunDir


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
        return any(i >= 0 for i in pq.read_table(part, columns=["index"])["index"].to_pylist())
    except (pa.ArrowException, OSError, KeyError):
        return True
