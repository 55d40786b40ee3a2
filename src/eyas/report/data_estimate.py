"""How many samples and tokens the data will give: measured in the run directory, else estimated from the first rows."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eyas.data.lengths import SHARES, length_summary, share_bin, share_summary
from eyas.data.schema import DROPPED
from eyas.data.shapes import Conversation, RowError, answered, asked, read_row
from eyas.data.sources import open_source
from eyas.errors import InputError
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo

ROWS = 400
"""rows read for an estimate"""
_CHARACTERS_A_TOKEN = 4.0
_TEMPLATE_TOKENS = 6
"""of the chat template, for each message"""


@dataclass(frozen=True)
class DataEstimate:
    conversations: int
    samples: int
    """one for each answered turn"""
    tokens: int
    """of all samples, prompt and answer, at most"""
    answer_tokens: int
    """of them generated, or supervised in kept answers; at most"""
    source: str
    """where these numbers come from"""
    prompt_lengths: dict[str, Any]
    """min, median, p95, max, histogram (eyas.data.lengths), of the samples that were looked at"""
    answer_lengths: dict[str, Any]
    supervised_shares: dict[str, int]


def estimate_data(recipe: Recipe, target: TargetInfo, run: RunDir) -> DataEstimate:
    """Raises InputError when a source cannot be read or its first rows are all unusable."""
    record = run.record("harvest")
    if record is not None and record.status == "done":
        found = _harvested(run)
        if found is not None:
            return found
    count_tokens, counted_by = _token_counter(target.path)
    longest = min(recipe.data.max_length, target.max_position_embeddings)
    used = rows = 0
    looked_at: list[tuple[int, int]] = []
    total = 0
    for name in (source.path for source in recipe.data.sources):
        first = list(islice(open_source(name), ROWS))  # before counting: says what is wrong with a source
        total += len(first) if len(first) < ROWS else _count(name)
        for row in first:
            rows += 1
            if row.broken is not None:
                continue
            try:
                turns = list(_samples(read_row(row.value), recipe, count_tokens, longest))
            except RowError:
                continue
            used += 1
            looked_at += turns
    names = ", ".join(source.path for source in recipe.data.sources)
    if not rows:
        raise InputError(f"data.prompts: {names} holds no row", fix="give a file with at least one conversation")
    if not used:
        raise InputError(
            f"data.prompts: none of the first {rows} rows of {names} is usable",
            fix="the README lists the shapes of rows that are read",
        )
    conversations = round(total * used / rows)
    if recipe.data.limit is not None:
        conversations = min(conversations, recipe.data.limit)
    scale = conversations * recipe.data.samples_per_prompt / used
    what = (
        "at most: every answer as long as engine.sampling.max_tokens"
        if recipe.data.responses == "regenerate"
        else "kept answers"
    )
    return DataEstimate(
        conversations,
        round(len(looked_at) * scale),
        round(sum(n for n, _ in looked_at) * scale),
        round(sum(answer for _, answer in looked_at) * scale),
        f"first {rows:,} of {total:,} rows, {counted_by}; {what}",
        *_histograms(np.array([n for n, _ in looked_at]), np.array([answer for _, answer in looked_at])),
    )


def _histograms(tokens: np.ndarray, answers: np.ndarray) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    shares = np.bincount(share_bin(answers, np.maximum(tokens, 1)), minlength=SHARES)
    return length_summary(tokens - answers), length_summary(answers), share_summary(shares)


def _samples(
    conversation: Conversation, recipe: Recipe, count: Callable[[str], int], longest: int
) -> Iterator[tuple[int, int]]:
    """(tokens, answer tokens) of each sample that the conversation gives."""
    if recipe.data.responses == "keep":
        lengths = [(m["role"], _length(m, count)) for m in answered(conversation).messages]
        total = min(longest, sum(n for _, n in lengths))
        yield total, min(total, sum(n for role, n in lengths if role == "assistant"))
        return
    kept, _, _ = asked(conversation)
    before = 0
    for message in kept.messages:
        before += _length(message, count)
        if message["role"] == "user":
            answer = min(recipe.engine.sampling.max_tokens, longest - before)
            if answer < 1:
                return
            before += answer
            yield before, answer


def _length(message: dict[str, object], count: Callable[[str], int]) -> int:
    texts = [message.get("content"), message.get("reasoning_content")]
    return _TEMPLATE_TOKENS + sum(count(text) for text in texts if isinstance(text, str))


def _token_counter(path: Path) -> tuple[Callable[[str], int], str]:
    """The target's own fast tokenizer (transformers takes seconds to import), else characters."""
    if (path / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        return lambda text: len(
            tokenizer.encode(text, add_special_tokens=False).ids
        ), "counted by the target's tokenizer"
    return lambda text: round(len(text) / _CHARACTERS_A_TOKEN), f"{_CHARACTERS_A_TOKEN:.0f} characters a token"


def _count(name: str) -> int:
    """Rows of a source."""
    path = Path(name)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    total = 0
    for file in files:
        if file.suffix == ".parquet":
            total += pq.read_metadata(file).num_rows
        elif file.suffix in (".jsonl", ".csv"):
            with open(file, "rb") as f:
                last = b""
                while piece := f.read(1 << 22):
                    total += piece.count(b"\n")
                    last = piece[-1:]
                total += last not in (b"", b"\n")
            total -= file.suffix == ".csv"
        elif file.suffix == ".json":
            total += _count_json(file)
        elif not path.exists():  # a hub data set: its rows are only known once read
            total += sum(1 for _ in islice(open_source(name), ROWS))
    return total


def _count_json(file: Path) -> int:
    if file.stat().st_size > 1 << 28:
        return sum(1 for _ in open_source(str(file)))
    try:
        value = json.loads(file.read_bytes())
    except ValueError:
        return sum(1 for _ in open_source(str(file)))
    return len(value) if isinstance(value, list) else 1


def _harvested(run: RunDir) -> DataEstimate | None:
    conversations: set[str] = set()
    tokens, answers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for file in sorted(run.samples.glob("*.parquet")):
        if file.name == run.prepared.name:
            continue
        try:
            table = pq.read_table(file, columns=["conversation", "rows", "supervised", "split"])
        except (pa.ArrowException, OSError):  # the harvest throws it away and asks its samples again
            continue
        table = table.filter(pc.not_equal(table["split"], DROPPED))
        conversations.update(table["conversation"].to_pylist())
        tokens.append(table["rows"].to_numpy() + 1)
        answers.append(table["supervised"].to_numpy())
    all_, supervised = np.concatenate(tokens), np.concatenate(answers)
    if not len(all_):
        return None
    return DataEstimate(
        len(conversations),
        len(all_),
        int(all_.sum()),
        int(supervised.sum()),
        "harvested in this run directory",
        *_histograms(all_, supervised),
    )
