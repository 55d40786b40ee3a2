"""`eyas show RUN_DIR samples`: harvested (or prepared) samples as tokens in the terminal, supervised ones marked."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.text import Text

from eyas.data.parts import part_batches
from eyas.data.schema import part_files
from eyas.errors import InputError
from eyas.rundir import RunDir

OPEN, CLOSE = "⟦", "⟧"
"""around each run of supervised tokens; colour only adds to it"""
_COLUMNS = ["id", "source", "split", "token_ids", "prompt_length", "loss_mask", "finish_reason", "shard", "index"]


@dataclass(frozen=True)
class Shown:
    """One sample as it is shown."""

    id: str
    about: str
    ids: list[int]
    mask: list[bool]


def show_samples(run: RunDir, tokenizer: Any, console: Console, *, id: str | None = None, limit: int = 5) -> int:
    """Prints up to `limit` samples (or the one named); returns how many. Falls back to prepared ones before a harvest.

    Raises InputError when there is nothing to show or no such id.
    """
    found = [s for s, _ in zip(_samples(run, id), range(1 if id is not None else limit), strict=False)]
    if not found:
        what = "no samples" if id is None else f"no sample {id}"
        raise InputError(f"{run.samples} holds {what}", fix="run the prepare or harvest stage first, or check the id")
    console.print(
        Text(f"{OPEN}supervised{CLOSE} tokens stand in brackets; ", style="dim")
        + Text("<|special|>", style="reverse")
        + Text(" tokens are shown as they are, line ends as ⏎", style="dim")
    )
    for sample in found:
        console.print(header(sample), markup=False, highlight=False, style="bold", soft_wrap=True)
        console.print(marked(sample.ids, sample.mask, tokenizer), soft_wrap=True)
        console.print()
    return len(found)


def header(sample: Shown) -> str:
    """Id, where it comes from, lengths and the supervised share."""
    n, supervised = len(sample.ids), sum(sample.mask)
    return f"{sample.id}  {sample.about}  {n:,} tokens, {supervised:,} supervised ({supervised / max(n, 1):.0%})"


def marked(ids: Sequence[int], mask: Sequence[bool], tokenizer: Any) -> Text:
    """The tokens as text: brackets around supervised runs, special tokens visible and reversed."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    text = Text()
    inside, at = False, 0
    while at < len(ids):
        if mask[at] != inside:
            text.append(OPEN if mask[at] else CLOSE, style="bold green")
            inside = mask[at]
        end = at + 1
        if ids[at] not in special:  # decoded together: one character may take several tokens
            while end < len(ids) and mask[end] == inside and ids[end] not in special:
                end += 1
        piece = tokenizer.decode(list(ids[at:end]), skip_special_tokens=False).replace("\n", "⏎\n")
        style = "reverse" if ids[at] in special else ("green" if inside else "")
        text.append(piece, style=style)
        at = end
    if inside:
        text.append(CLOSE, style="bold green")
    return text


def _samples(run: RunDir, id_: str | None) -> Iterator[Shown]:
    parts = part_files(run.samples) if run.samples.is_dir() else []
    for part in parts:
        for row in _rows(part, _COLUMNS, id_):
            where = f"states/{row['shard']}[{row['index']}]"
            about = f"{row['source']}, {row['split']}, finished: {row['finish_reason']}, {where}"
            yield Shown(row["id"], about, row["token_ids"], row["loss_mask"])
    if not parts and run.prepared.exists():
        for row in _rows(
            run.prepared, ["id", "turn", "turns", "source", "split", "messages", "prompt_ids", "loss_mask"], id_
        ):
            ids = row["prompt_ids"]
            mask = row["loss_mask"] or [False] * len(ids)
            turns = len(json.loads(row["messages"]))
            about = f"{row['source']}, {row['split']}, prepared, {turns} messages"
            yield Shown(f"{row['id']}/{row['turn']}", about, ids, mask)


def _rows(path: Any, columns: list[str], id_: str | None) -> Iterator[dict[str, Any]]:
    """Rows of one file, one row group at a time; `id_` also matches the conversation of a sample."""
    for batch in part_batches(path, columns, 256):
        if id_ is not None:
            names = batch.column("id").to_pylist()
            batch = batch.filter(pa.array([n == id_ or n.split("/")[0] == id_.split("/")[0] for n in names]))
        for row in batch.to_pylist():
            full = row["id"] if "/" in row["id"] else f"{row['id']}/{row['turn']}"
            if id_ is None or full == id_ or row["id"].split("/")[0] == id_:
                yield row
