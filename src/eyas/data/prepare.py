"""The prepare stage: conversations in, token ids and a split out (samples/prepared.parquet), as a stream."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from eyas.data.dropped import Dropped, judge
from eyas.data.lengths import SHARES, check_room, length_summary, longest_sample, share_bin, share_summary
from eyas.data.marks import Marks
from eyas.data.masks import kept_samples
from eyas.data.mix import Mix
from eyas.data.render import Renderer
from eyas.data.schema import PREPARED
from eyas.data.shapes import Conversation, RowError, answered, asked, read_row
from eyas.data.sources import Row, open_source, refusal
from eyas.errors import InputError
from eyas.files import written_aside
from eyas.progress import Progress
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo

BATCH = 256
"""conversations rendered at once, and rows of a Parquet row group"""

_Pending = tuple[int, Row, Conversation, int]


def prepare(
    recipe: Recipe,
    target: TargetInfo,
    run: RunDir,
    progress: Progress,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, Any]:
    """Reads `recipe.data.prompts`, writes prepared.parquet and dropped.jsonl; returns counts.

    Raises InputError when a source cannot be read, when no row is usable, or when more rows are bad than good.
    """
    if tokenizer is None:
        from eyas.target.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(target, recipe.target.remote_code)
    render = Renderer(tokenizer, target.eos_token_ids)
    sources = recipe.data.sources
    mix = Mix([open_source(s.path) for s in sources], [s.weight for s in sources])
    aside = run.samples / ".prepared.unsplit.part"
    try:
        refused: InputError | None = None
        with written_aside(run.samples / "dropped.jsonl") as path, open(path, "w", encoding="utf-8") as file:
            work = _Preparation(recipe, target, render, Dropped(file), mix)
            with (
                pq.ParquetWriter(aside, PREPARED, write_statistics=False) as writer,
                progress.task("prepare", total=None, unit="rows") as task,
            ):
                try:
                    for rows, read, tokens in work.batches():
                        writer.write_table(pa.Table.from_pylist(rows, schema=PREPARED))
                        task.advance(read, tokens=tokens)
                except InputError as e:  # what was dropped before it is still written
                    refused = e
        work.dropped.print(progress.console)
        if refused is not None:
            raise refused
        work.judge([s.path for s in sources])
        held_out = _holdout(recipe, len(work.marks), progress)
        _write_split(aside, run.prepared, work.marks, held_out)
    finally:
        aside.unlink(missing_ok=True)
    counts = work.counts(held_out)
    for note, n in counts["notes"].items():
        progress.say(f"prepare: {n:,} {note}")
    progress.say(
        f"prepare: {counts['conversations']:,} conversations ({counts['train']:,} to train on, {held_out:,} held out), "
        f"{counts['tokens']:,} tokens, longest {counts['lengths']['max']:,}; "
        f"{counts['duplicates']:,} duplicates and {work.dropped.total:,} bad rows left out"
    )
    return counts


class _Preparation:
    """Rows to table rows, with everything that is counted on the way."""

    def __init__(self, recipe: Recipe, target: TargetInfo, render: Renderer, dropped: Dropped, mix: Mix) -> None:
        self.keep = recipe.data.responses == "keep"
        self.limit = recipe.data.limit
        self.refuse_broken = recipe.data.broken_rows == "refuse"
        self.max_length = longest_sample(recipe, target)
        self.render, self.dropped, self.mix = render, dropped, mix
        self.read = self.duplicates = 0
        self.marks = np.empty(0, np.uint64)
        """of each conversation, in order: the first 64 bits of its id"""
        self._seen = Marks()
        """of every row that was understood"""
        self.shapes: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.lengths: list[np.ndarray] = []
        self.supervised = 0
        self.shares = np.zeros(SHARES, np.int64)
        """kept conversations by their supervised share"""

    def batches(self) -> Iterator[tuple[list[dict[str, Any]], int, int]]:
        """Yields table rows of up to BATCH conversations, how many rows of the sources they took, and their tokens."""
        pending: list[_Pending] = []
        before = 0
        for number, row in self.mix:
            self.read += 1
            if (item := self._understood(number, row)) is None:
                self.mix.give_back(number)
            else:
                pending.append(item)
            if len(pending) >= min(BATCH, BATCH if self.limit is None else self.limit - len(self.marks)):
                yield self._rendered(pending, before)
                pending, before = [], self.read
                if self.limit is not None and len(self.marks) >= self.limit:
                    return
        yield self._rendered(pending, before)

    def _understood(self, number: int, row: Row) -> _Pending | None:
        if row.left_out is not None:
            self.dropped.add(row.left_out, row.place, "")
            return None
        if row.broken is not None:
            if self.refuse_broken or row.ends:
                raise refusal(row)
            self.dropped.add(row.kind, row.place, row.broken)
            return None
        try:
            conversation = read_row(row.value)
            turns, note = 1, None
            if self.keep:
                conversation = answered(conversation)
            else:
                conversation, turns, note = asked(conversation)
        except RowError as e:
            self.dropped.add(e.reason, row.place, e.detail, row.value)
            return None
        if not self._seen.add(_mark(conversation.id)):
            self.duplicates += 1
            return None
        if note:
            self.notes[f"conversations {note}"] += 1
        return number, row, conversation, turns

    def _rendered(self, pending: list[_Pending], before: int) -> tuple[list[dict[str, Any]], int, int]:
        prompts: list[list[int] | RowError] = []
        if not self.keep:
            prompts = self.render.first_prompts([c for _, _, c, _ in pending], self.notes)
        table: list[dict[str, Any]] = []
        fresh: list[int] = []
        for i, (number, row, conversation, turns) in enumerate(pending):
            try:
                samples = self._kept(conversation) if self.keep else self._asked(prompts[i])
            except RowError as e:
                self.dropped.add(e.reason, row.place, e.detail, row.value)
                self.mix.give_back(number)
                continue
            source = _source(row)
            fresh.append(_mark(conversation.id))
            self.shapes[conversation.shape] += 1
            self.sources[source] += 1
            messages = json.dumps(conversation.messages, ensure_ascii=False)
            tools = None if conversation.tools is None else json.dumps(conversation.tools, ensure_ascii=False)
            for turn, ids, mask in samples:
                if mask is not None:
                    self.supervised += sum(mask)
                    self.shares[share_bin(sum(mask), len(mask))] += 1
                values = (conversation.id, turn, turns, source, "train", messages, tools, ids, mask)
                table.append(dict(zip(PREPARED.names, values, strict=True)))
        self.marks = np.concatenate([self.marks, np.array(fresh, np.uint64)])
        lengths = np.array([len(r["prompt_ids"]) for r in table], np.int32)
        self.lengths.append(lengths)
        return table, self.read - before, int(lengths.sum())

    def _asked(self, prompt: list[int] | RowError) -> list[tuple[int, list[int], list[bool] | None]]:
        if isinstance(prompt, RowError):
            raise prompt
        check_room(len(prompt), self.max_length)
        return [(0, prompt, None)]

    def _kept(self, conversation: Conversation) -> list[tuple[int, list[int], list[bool] | None]]:
        samples = kept_samples(self.render, conversation, self.max_length, self.notes)
        return [(s.turn, s.ids, s.mask) for s in samples]

    def judge(self, names: list[str]) -> None:
        judge(names, self.read, len(self.marks), self.duplicates, self.dropped, _FIX)

    def counts(self, held_out: int) -> dict[str, Any]:
        lengths = np.concatenate(self.lengths)
        return {
            "rows": self.read,
            "conversations": len(self.marks),
            "samples": len(lengths),
            "train": len(self.marks) - held_out,
            "holdout": held_out,
            "duplicates": self.duplicates,
            "dropped": dict(self.dropped.counts),
            "shapes": dict(self.shapes),
            "sources": dict(self.sources),
            "notes": {k: n for k, n in self.notes.items() if n},
            "tokens": int(lengths.sum(dtype=np.int64)),
            "supervised_tokens": self.supervised if self.keep else None,
            "lengths": length_summary(lengths),
            "supervised_shares": share_summary(self.shares) if self.keep else None,
        }


_FIX = "correct the file, or see samples/dropped.jsonl in the run directory for the rows and the README for the shapes"


def _source(row: Row) -> str:
    """The row's own `source` where it has a plain one, else its file or data set."""
    named = row.value.get("source")
    return named if isinstance(named, str) and 0 < len(named) <= 100 and _is_unicode(named) else row.source


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _mark(id_: str) -> int:
    return int(id_[:16], 16)


def _holdout(recipe: Recipe, conversations: int, progress: Progress) -> int:
    """How many conversations are held out: at least one if any is asked for, at most half of them."""
    asked_for = recipe.data.holdout
    if asked_for == 0:
        return 0
    if conversations < 2:
        raise InputError(
            "only one usable conversation: none can be held out", fix="give more prompts, or set data.holdout: 0"
        )
    count = max(1, round(asked_for * conversations) if asked_for < 1 else int(asked_for))
    if count > conversations // 2:
        progress.say(
            f"prepare: {conversations // 2:,} conversations are held out, not {count:,} (data.holdout {asked_for}): "
            f"there are only {conversations:,}"
        )
    return min(count, conversations // 2)


def _write_split(aside: Path, path: Path, marks: np.ndarray, held_out: int) -> None:
    """Copies the rows with their split: the `held_out` conversations whose ids come first are held out."""
    last = np.partition(marks, held_out - 1)[held_out - 1] if held_out else None
    column = PREPARED.get_field_index("split")
    with written_aside(path) as whole, pq.ParquetWriter(whole, PREPARED, write_statistics=False) as writer:
        file = pq.ParquetFile(aside)
        for group in range(file.num_row_groups):  # not iter_batches, which keeps what it has read until its end
            table = file.read_row_group(group)
            out = [last is not None and _mark(i) <= last for i in table["id"].to_pylist()]
            split = pa.array(["holdout" if o else "train" for o in out], pa.string())
            writer.write_table(table.set_column(column, PREPARED.field(column), split))
