"""How many samples and tokens the data will give: measured in the run directory, else estimated from the first rows."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

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


def estimate_data(recipe: Recipe, target: TargetInfo, run: RunDir) -> DataEstimate:
    """Raises InputError when a source cannot be read or its first rows are all unusable."""
    record = run.record("harvest")
    if record is not None and record.status == "done":
        found = _harvested(run)
        if found is not None:
            return found
    count_tokens, counted_by = _token_counter(target.path)
    longest = min(recipe.data.max_length, target.max_position_embeddings)
    used = rows = samples = tokens = answers = 0
    total = 0
    for name in recipe.data.prompts:
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
            samples += len(turns)
            tokens += sum(all_ for all_, _ in turns)
            answers += sum(answer for _, answer in turns)
    if not used:
        raise InputError(
            f"data.prompts: none of the first {rows} rows of {', '.join(recipe.data.prompts)} is usable",
            fix="the README lists the shapes of rows that are read",
        )
    conversations = round(total * used / rows)
    if recipe.data.limit is not None:
        conversations = min(conversations, recipe.data.limit)
    scale = conversations / used
    what = (
        "at most: every answer as long as engine.sampling.max_tokens"
        if recipe.data.responses == "regenerate"
        else "kept answers"
    )
    return DataEstimate(
        conversations,
        round(samples * scale),
        round(tokens * scale),
        round(answers * scale),
        f"first {rows:,} of {total:,} rows, {counted_by}; {what}",
    )


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
    samples = tokens = answers = 0
    for file in sorted(run.samples.glob("*.parquet")):
        if file.name == run.prepared.name:
            continue
        table = pq.read_table(file, columns=["conversation", "rows", "prompt_length"])
        conversations.update(table["conversation"].to_pylist())
        samples += table.num_rows
        rows, prompts = table["rows"].to_numpy(), table["prompt_length"].to_numpy()
        tokens += int((rows + 1).sum())
        answers += int((rows + 1 - prompts).sum())
    if not samples:
        return None
    return DataEstimate(len(conversations), samples, tokens, answers, "harvested in this run directory")
