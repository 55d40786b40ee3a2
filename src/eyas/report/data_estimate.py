"""How many samples and tokens the data will give: measured in the run directory, else estimated from the first rows."""

import io
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eyas.data.dropped import Dropped, judge
from eyas.data.lengths import SHARES, check_room, length_summary, longest_sample, share_bin, share_summary
from eyas.data.mix import Mix
from eyas.data.parts import read_part
from eyas.data.schema import LEFT_OUT, part_files
from eyas.data.shapes import Conversation, Message, RowError, answered, asked, read_row
from eyas.data.sources import Row, count_rows, open_source, refusal
from eyas.errors import EyasError
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo
from eyas.target.tokens import chat_template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 400
"""rows of each source read for an estimate"""


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
    shapes: dict[str, int]
    """of the rows that were looked at, the usable ones by the shape they were recognised as"""
    dropped: dict[str, int]
    """of the rows that were looked at, the others by reason"""
    prompt_lengths: dict[str, Any]
    """min, median, p95, max, histogram (eyas.data.lengths), of the samples that were looked at"""
    answer_lengths: dict[str, Any]
    supervised_shares: dict[str, int]


def estimate_data(recipe: Recipe, target: TargetInfo, run: RunDir) -> DataEstimate:
    """Raises InputError when a source cannot be read, and for what prepare would refuse in the rows that are read."""
    record = run.record("harvest")
    if record is not None and record.status == "done":
        found = _harvested(run)
        if found is not None:
            return found
    first = _FirstRows(recipe, _Lengths(recipe, target))
    whole = first.read()
    names = [source.path for source in recipe.data.sources]
    rows = sum(first.rows)
    if whole:
        judge(names, rows, first.used.total(), first.duplicates, first.dropped, _FIX)
    counted = first.rows if whole else [count_rows(name, n) for name, n in zip(names, first.rows, strict=True)]
    share = first.used.total() / rows
    conversations = sum(
        round(total * (first.used[i] / n if n else share))
        for i, (total, n) in enumerate(zip(counted, first.rows, strict=True))
    )
    if recipe.data.limit is not None:
        conversations = min(conversations, recipe.data.limit)
    scale = conversations * recipe.data.samples_per_prompt / first.used.total()
    what = (
        "at most: every answer as long as engine.sampling.max_tokens"
        if recipe.data.responses == "regenerate"
        else "kept answers, masked as prepare does"
    )
    looked_at = np.array(first.samples)
    tokens, answers = looked_at[:, 0], looked_at[:, 1]
    return DataEstimate(
        conversations,
        round(len(tokens) * scale),
        round(int(tokens.sum()) * scale),
        round(int(answers.sum()) * scale),
        f"first {rows:,} of {sum(counted):,} rows, rendered through the target's chat template; {what}",
        dict(first.shapes),
        dict(first.dropped.counts),
        *_histograms(tokens, answers),
    )


_FIX = "correct the file; the README lists the shapes of rows that are read"


class _FirstRows:
    """The rows that prepare would read first, and what became of them."""

    def __init__(self, recipe: Recipe, lengths: "_Lengths") -> None:
        self._recipe, self._lengths = recipe, lengths
        self.rows = [0] * len(recipe.data.sources)
        """read of each source"""
        self.used: Counter[int] = Counter()
        """conversations by their source"""
        self.duplicates = 0
        self.dropped = Dropped(io.StringIO())
        self.shapes: Counter[str] = Counter()
        self.samples: list[tuple[int, int]] = []
        """tokens and answer tokens of each"""

    def read(self) -> bool:
        """Until ROWS for each source are read of which most are good; whether that was all there are."""
        data, seen = self._recipe.data, set[str]()
        mix = Mix([open_source(s.path) for s in data.sources], [s.weight for s in data.sources])
        for number, row in mix:
            good = self.used.total() + self.duplicates
            enough = sum(self.rows) >= ROWS * len(data.sources) and good >= self.dropped.total
            if enough or self.used.total() == data.limit:
                return False
            self.rows[number] += 1
            if row.broken is not None and (row.ends or data.broken_rows == "refuse"):
                raise refusal(row)
            try:
                conversation = _conversation(row, keep=data.responses == "keep")
                if conversation.id in seen:
                    self.duplicates += 1
                    mix.give_back(number)
                    continue
                seen.add(conversation.id)
                self.samples += self._lengths.of(conversation)
            except RowError as e:
                self.dropped.add(e.reason, row.place, e.detail)
                mix.give_back(number)
                continue
            self.used[number] += 1
            self.shapes[conversation.shape] += 1
        return True


def _conversation(row: Row, keep: bool) -> Conversation:
    if row.left_out is not None:
        raise RowError(row.left_out)
    if row.broken is not None:
        raise RowError(row.kind, row.broken)
    found = read_row(row.value)
    return answered(found) if keep else asked(found)[0]


def _histograms(tokens: np.ndarray, answers: np.ndarray) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    shares = np.bincount(share_bin(answers, np.maximum(tokens, 1)), minlength=SHARES)
    return length_summary(tokens - answers), length_summary(answers), share_summary(shares)


class _Lengths:
    """Tokens of samples, rendered and masked as prepare does; answers not there yet are as long as they may be."""

    def __init__(self, recipe: Recipe, target: TargetInfo) -> None:
        from eyas.data.render import Renderer

        self._keep = recipe.data.responses == "keep"
        self._longest = longest_sample(recipe, target)
        self._max_tokens = recipe.engine.sampling.max_tokens
        self._render = Renderer(_tokenizer(recipe, target), target.eos_token_ids)

    def of(self, conversation: Conversation) -> list[tuple[int, int]]:
        """(tokens, answer tokens) of each sample that the conversation gives. Raises RowError."""
        if self._keep:
            from eyas.data.masks import kept_samples

            samples = kept_samples(self._render, conversation, self._longest, Counter())
            return [(len(s.ids), sum(s.mask)) for s in samples]
        found: list[tuple[int, int]] = []
        history: list[Message] = []
        answers = 0
        for message in conversation.messages:
            history.append(message)
            if message["role"] != "user":
                continue
            prompt = len(self._render.prompt(history, conversation.tools)) + answers
            if not found:
                check_room(prompt, self._longest)
            answer = min(self._max_tokens, self._longest - prompt)
            if answer < 1:
                break
            found.append((prompt + answer, answer))
            answers += answer
            history.append({"role": "assistant", "content": "a"})
        return found


def _tokenizer(recipe: Recipe, target: TargetInfo) -> "PreTrainedTokenizerBase":
    """Of a checkpoint with tokenizer.json without the model's own class, for which transformers imports torch."""
    from eyas.target.tokenizer import load_tokenizer

    template = chat_template_text(target.path)
    if not template or not (target.path / "tokenizer.json").is_file():
        return load_tokenizer(target, recipe.target.remote_code)
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(target.path), local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return load_tokenizer(target, recipe.target.remote_code)
    tokenizer.chat_template = tokenizer.chat_template or template
    return tokenizer


def _harvested(run: RunDir) -> DataEstimate | None:
    conversations: set[str] = set()
    tokens, answers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for file in part_files(run.samples):
        try:
            table = read_part(file, ["conversation", "rows", "supervised", "split"])
        except EyasError:  # the harvest throws it away and asks its samples again
            continue
        table = table.filter(pc.invert(pc.is_in(table["split"], pa.array(LEFT_OUT))))
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
        {},
        {},
        *_histograms(all_, supervised),
    )
