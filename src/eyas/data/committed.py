"""What earlier harvests committed: cleaned of leftovers, checked against what is prepared now, looked up by id."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow as pa

from eyas.data.checks import EXACT, Difference, Tolerance
from eyas.data.parts import read_part, shard_of, write_part
from eyas.data.schema import DROPPED, HARVESTED, UNUSED, answer_number, part_files
from eyas.data.set_aside import FOLDER, bring_back, set_aside
from eyas.data.wanted import REPETITIVE, Wanted
from eyas.errors import EyasError
from eyas.files import written_aside
from eyas.rundir import RunDir
from eyas.states.shard import Shard
from eyas.states.store import Recent
from eyas.units import size

_SETTINGS, _PROOF = b"eyas.harvest", b"eyas.proof"


@dataclass(frozen=True)
class _Unusable:
    """Why a part cannot be used, of how many samples (0: not known), and the other settings that it was made with."""

    why: str
    samples: int = 0
    settings: str | None = None


@dataclass(frozen=True)
class Reconciled:
    """How many rows are unused now, and how many were taken out."""

    unused: int
    removed: int


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
            lambda p: read_part(p, ["token_ids", "prompt_length", "finish_reason", "looped", "split"]), 16
        )

    def __contains__(self, id_: object) -> bool:
        return id_ in self._where

    def __len__(self) -> int:
        return len(self._where)

    def recover(self) -> list[str]:
        """Takes over what a run that ended anyhow left behind; returns lines about what was done with it.

        Samples that were harvested with other settings (target, layers, sampling, precision, lengths) are not mixed
        with new ones: they are set aside, and taken up again when those settings are back.
        """
        again: Counter[str] = Counter()
        lost: Counter[str] = Counter()
        aside = aside_bytes = 0
        notes = []
        for unfinished in [*self.run.samples.glob(".*.part"), *self.run.states.glob(".*.part")]:
            unfinished.unlink(missing_ok=True)
        if back := bring_back(self.run, self.settings):
            notes.append(f"harvest: taking up {back:,} sample files of these settings that were set aside")
        shards = set()
        for part in part_files(self.run.samples):
            unusable = self._take(part)
            if unusable is None:
                shards.add(shard_of(part))
            elif unusable.settings is not None:
                aside += unusable.samples
                aside_bytes += set_aside(self.run, part, unusable.settings)
            else:
                again[unusable.why] += 1
                lost[unusable.why] += unusable.samples
                part.unlink()
        if aside_bytes:
            notes.append(
                f"harvest: {aside:,} samples of other settings ({size(aside_bytes)}) are set aside: put those back and "
                f"they are taken up again; delete {self.run.samples / FOLDER} and {self.run.states / FOLDER} to free "
                "the disk"
            )
        for reason, n in again.items():
            of = f" of {lost[reason]:,} samples" if lost[reason] else ""
            notes.append(f"harvest: {n} sample files{of} are harvested again: {reason}")
        if self.run.states.is_dir():
            left = [p for p in self.run.states.iterdir() if p.is_file() and p.name not in shards]
            for p in left:
                p.unlink()
            if left:
                notes.append(f"harvest: removed {len(left)} files of states that were never committed")
        return notes

    def _take(self, part: Path) -> "_Unusable | None":
        """Adds one part found on disk, with its rows' splits as prepared now; None if that could be done."""
        try:
            table = read_part(part)
        except EyasError as e:
            return _Unusable(e.message)
        meta = table.schema.metadata or {}
        if not table.schema.remove_metadata().equals(HARVESTED):
            return _Unusable("their columns are another version's", len(table))
        made_with = meta.get(_SETTINGS, b"").decode(errors="replace")
        if made_with != self.settings:
            return _Unusable("they were made with other settings", len(table), made_with)
        last = max(table["index"].to_pylist(), default=-1)
        if last >= 0:  # else: all of its answers were dropped, and their states with them
            path = self.run.states / shard_of(part)
            if not path.exists():
                return _Unusable("their states are gone", len(table))
            try:
                shard = Shard(path)
            except EyasError as e:
                return _Unusable(e.message, len(table))
            if shard.layers != self.layers or last >= len(shard):
                return _Unusable(f"{path.name} holds layers {shard.layers}, {len(shard)} samples", len(table))
        self.parts.append(part)
        proof = json.loads(meta[_PROOF])
        self.proof += Difference(proof["worst"], proof["total"], proof["n"])
        self._allow(Tolerance(*proof["allowed"]))
        self._index(table["id"].to_pylist(), table["split"].to_pylist())
        return None

    def reconcile(self, splits: dict[str, str], wanted: Wanted) -> Reconciled:
        """Gives every row its split: its conversation's in `splits`, DROPPED if it is not `wanted`, UNUSED if it is not
        asked for now: its conversation is not there, it is a further answer than are wanted, or a turn after a dropped
        one. Unused rows are not among the samples here, and come back when they are asked for.

        Takes out dropped rows without states that are wanted now (they are asked again), turns after those, and
        doubles. Data that grew or shrank since moves conversations between the splits.
        """
        ends: dict[tuple[str, int], tuple[int, bool]] = {}
        """of a chain of turns: the first one that is dropped or asked again, and whether it is asked again"""
        keys = ["id", "conversation", "turn", "finish_reason", "looped", "index"]
        for part in self.parts:
            for row in read_part(part, keys).to_pylist():
                unwanted = wanted.why_not(row["finish_reason"], row["looped"]) is not None
                if unwanted or row["index"] < 0:
                    chain = (row["conversation"], answer_number(row["id"]))
                    end = (row["turn"], not unwanted)
                    ends[chain] = min(ends.get(chain, end), end)
        unused = removed = 0
        old, self.parts, self._where = self.parts, [], {}
        for part in old:
            table = read_part(part)
            want: list[str] = []
            for row in table.select(keys).to_pylist():
                split, answer = splits.get(row["conversation"]), answer_number(row["id"])
                end, again = ends.get((row["conversation"], answer), (row["turn"], False))
                if row["id"] in self._where or (row["turn"] > end and again):
                    want.append("")
                elif split is None or answer >= wanted.answers or row["turn"] > end:
                    want.append(UNUSED)
                elif wanted.why_not(row["finish_reason"], row["looped"]) is not None:
                    want.append(DROPPED)
                else:
                    want.append(split if row["index"] >= 0 else "")
            unused, removed = unused + want.count(UNUSED), removed + want.count("")
            if want != table["split"].to_pylist():
                column = table.schema.get_field_index("split")
                table = table.set_column(column, HARVESTED.field("split"), pa.array(want, pa.string()))
                table = table.filter(pa.array([w != "" for w in want]))
                with written_aside(part) as aside:
                    write_part(table, aside)
            self.parts.append(part)
            self._index(table["id"].to_pylist(), table["split"].to_pylist())
        return Reconciled(unused, removed)

    def commit(self, stem: str, rows: list[dict[str, Any]], proof: Difference, allowed: Tolerance) -> Path:
        """Writes one part; its rename is the moment from which the samples count. Call `add` then."""
        bounds = [allowed.worst, allowed.mean]
        proven = json.dumps({"worst": proof.worst, "total": proof.total, "n": proof.n, "allowed": bounds}).encode()
        schema = HARVESTED.with_metadata({_SETTINGS: self.settings.encode(), _PROOF: proven})
        path = self.run.samples / f"{stem}.parquet"
        with written_aside(path) as aside:
            write_part(pa.Table.from_pylist(rows, schema=schema), aside)
        return path

    def add(self, part: Path, ids: Iterable[str], proof: Difference, allowed: Tolerance) -> None:
        self.parts.append(part)
        self.proof += proof
        self._allow(allowed)
        self._index(ids)

    def answer(self, id_: str) -> tuple[list[int], str]:
        """Output ids and finish reason of a committed regenerated sample; REPETITIVE if it was dropped as such."""
        part, row = divmod(self._where[id_], 1 << 32)
        found = self._answers(self.parts[part]).slice(row, 1).to_pylist()[0]
        repetitive = found["split"] == DROPPED and found["looped"]
        return found["token_ids"][found["prompt_length"] :], REPETITIVE if repetitive else found["finish_reason"]

    def columns(self, names: list[str]) -> Iterator[pa.Table]:
        """These columns of every part, one part at a time."""
        for part in self.parts:
            yield read_part(part, names)

    def _allow(self, allowed: Tolerance) -> None:
        self.allowed = max(self.allowed, allowed, key=lambda t: t.worst)

    def _index(self, ids: Iterable[str], splits: Iterable[str] = repeat("")) -> None:
        base = (len(self.parts) - 1) << 32
        for row, (id_, split) in enumerate(zip(ids, splits, strict=False)):
            if split != UNUSED:
                self._where.setdefault(id_, base + row)
