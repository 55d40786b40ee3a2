"""What earlier harvests committed: cleaned of leftovers, checked against what is prepared now, looked up by id."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.data.checks import EXACT, Difference, Tolerance
from eyas.data.schema import HARVESTED, part_files
from eyas.errors import EyasError
from eyas.files import written_aside
from eyas.rundir import RunDir
from eyas.states.shard import Shard
from eyas.states.store import Recent

_SETTINGS, _PROOF = b"eyas.harvest", b"eyas.proof"


class Committed:
    """The committed samples of a run. Memory: one entry of a dictionary for each sample."""

    def __init__(self, run: RunDir, settings: str, layers: list[int]) -> None:
        self.run, self.settings, self.layers = run, settings, layers
        self.parts: list[Path] = []
        self.proof = Difference()
        self.allowed = EXACT
        """the widest tolerance that a committed sample was proven with"""
        self._where: dict[str, int] = {}
        self._answers: Recent[Path, pa.Table] = Recent(
            lambda p: pq.read_table(p, columns=["token_ids", "prompt_length", "finish_reason"]), 16
        )

    def __contains__(self, id_: object) -> bool:
        return id_ in self._where

    def __len__(self) -> int:
        return len(self._where)

    def recover(self) -> list[str]:
        """Takes over what a run that ended anyhow left behind; returns lines about what was thrown away.

        Samples that were harvested with other settings (target, layers, sampling, precision, lengths) are not mixed
        with new ones: they go.
        """
        again: Counter[str] = Counter()
        notes = []
        for aside in [*self.run.samples.glob(".*.part"), *self.run.states.glob(".*.part")]:
            aside.unlink(missing_ok=True)
        shards = set()
        for part in part_files(self.run.samples):
            reason = self._take(part)
            if reason is None:
                shards.add(f"{part.stem}.safetensors")
            else:
                again[reason] += 1
                part.unlink()
        notes += [f"harvest: {n} sample files are harvested again: {reason}" for reason, n in again.items()]
        if self.run.states.is_dir():
            left = [p for p in self.run.states.iterdir() if p.is_file() and p.name not in shards]
            for p in left:
                p.unlink()
            if left:
                notes.append(f"harvest: removed {len(left)} files of states that were never committed")
        return notes

    def _take(self, part: Path) -> str | None:
        """Adds one part found on disk, with its rows' splits as prepared now. Returns why it cannot be used."""
        try:
            table = pq.read_table(part)
        except (pa.ArrowException, OSError) as e:
            return f"it cannot be read ({e})"
        meta = table.schema.metadata or {}
        if not table.schema.remove_metadata().equals(HARVESTED):
            return "its columns are another version's"
        if meta.get(_SETTINGS) != self.settings.encode():
            return "it was made with other settings"
        try:
            shard = Shard(self.run.states / f"{part.stem}.safetensors")
        except EyasError as e:
            return e.message
        if shard.layers != self.layers or max(table["index"].to_pylist(), default=0) >= len(shard):
            return f"its states are of layers {shard.layers}, {len(shard)} samples"
        self.parts.append(part)
        proof = json.loads(meta[_PROOF])
        self.proof += Difference(proof["worst"], proof["total"], proof["n"])
        self._allow(Tolerance(*proof["allowed"]))
        self._index(table["id"].to_pylist())
        return None

    def reconcile(self, splits: dict[str, str]) -> int:
        """Gives every row the split of its conversation in `splits`; drops rows whose conversation is not there.

        Returns how many rows were dropped. Data that grew or shrank since moves conversations between the splits.
        """
        dropped = 0
        old, self.parts, self._where = self.parts, [], {}
        for part in old:
            table = pq.read_table(part)
            want = [splits.get(c) for c in table["conversation"].to_pylist()]
            fresh = [w is not None and i not in self._where for w, i in zip(want, table["id"].to_pylist(), strict=True)]
            if want != table["split"].to_pylist() or not all(fresh):
                dropped += fresh.count(False)
                column = table.schema.get_field_index("split")
                table = table.set_column(
                    column, HARVESTED.field("split"), pa.array(["" if w is None else w for w in want])
                )
                table = table.filter(pa.array(fresh))
                with written_aside(part) as aside:
                    pq.write_table(table, aside)
            self.parts.append(part)
            self._index(table["id"].to_pylist())
        return dropped

    def commit(self, stem: str, rows: list[dict[str, Any]], proof: Difference, allowed: Tolerance) -> Path:
        """Writes one part; its rename is the moment from which the samples count. Call `add` then."""
        bounds = [allowed.worst, allowed.mean]
        proven = json.dumps({"worst": proof.worst, "total": proof.total, "n": proof.n, "allowed": bounds}).encode()
        schema = HARVESTED.with_metadata({_SETTINGS: self.settings.encode(), _PROOF: proven})
        path = self.run.samples / f"{stem}.parquet"
        with written_aside(path) as aside:
            pq.write_table(pa.Table.from_pylist(rows, schema=schema), aside)
        return path

    def add(self, part: Path, ids: Iterable[str], proof: Difference, allowed: Tolerance) -> None:
        self.parts.append(part)
        self.proof += proof
        self._allow(allowed)
        self._index(ids)

    def answer(self, id_: str) -> tuple[list[int], str]:
        """Output ids and finish reason of a committed regenerated sample."""
        part, row = divmod(self._where[id_], 1 << 32)
        found = self._answers(self.parts[part]).slice(row, 1).to_pylist()[0]
        return found["token_ids"][found["prompt_length"] :], found["finish_reason"]

    def columns(self, names: list[str]) -> Iterator[pa.Table]:
        """These columns of every part, one part at a time."""
        for part in self.parts:
            yield pq.read_table(part, columns=names)

    def _allow(self, allowed: Tolerance) -> None:
        self.allowed = max(self.allowed, allowed, key=lambda t: t.worst)

    def _index(self, ids: Iterable[str]) -> None:
        base = (len(self.parts) - 1) << 32
        for row, id_ in enumerate(ids):
            self._where.setdefault(id_, base + row)


def clear_harvest(run: RunDir) -> None:
    """Deletes every harvested sample of a run (never what was prepared). Parts go first: they make shards count."""
    for path in [*part_files(run.samples), *(run.states.iterdir() if run.states.is_dir() else ())]:
        if path.is_file():
            os.unlink(path)
