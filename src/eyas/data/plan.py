"""What a harvest still has to ask: requests made lazily from the prepared conversations, turn after turn."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from eyas.data.committed import Committed
from eyas.data.history import next_prompt
from eyas.data.lengths import LEAST_ANSWER
from eyas.data.render import Renderer
from eyas.data.schema import LENGTH, sample_id
from eyas.data.shapes import RowError
from eyas.data.wanted import REPETITIVE
from eyas.engine.base import Request
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo

ENDED_CUT = "later turns not asked: the answer before was cut by length"
ENDED_REPETITIVE = "later turns not asked: the answer before was repetitive and dropped"
ENDED_LONG = "later turns not asked: no room within data.max_length"
ENDED_REFUSED = "later turns not asked: the chat template refuses the history"
ENDED_BAD = "later turns not asked: the answer before could not be used"


@dataclass(frozen=True)
class Asked:
    """What the commit needs to know about a request that is out."""

    conversation: str
    turn: int
    source: str
    split: str
    prompt_ids: list[int]
    loss_mask: list[bool] | None


class Plan:
    """The prepared conversations as requests. `out` holds what was asked and is not settled yet."""

    def __init__(
        self, recipe: Recipe, target: TargetInfo, run: RunDir, committed: Committed, render: Renderer | None
    ) -> None:
        self.keep = recipe.data.responses == "keep"
        self.max_length = min(recipe.data.max_length, target.max_position_embeddings)
        self.max_tokens = recipe.engine.sampling.max_tokens
        self.answers, self.seed = recipe.data.samples_per_prompt, recipe.engine.sampling.seed
        self.run, self.committed, self.render = run, committed, render
        self.out: dict[str, Asked] = {}
        turns = pq.read_table(run.prepared, columns=["turns"])["turns"].to_numpy()
        self.rounds = int(turns.max(initial=0))
        self.total = int(turns.sum()) * self.answers

    def splits(self) -> dict[str, str]:
        """The split of each prepared conversation."""
        table = pq.read_table(self.run.prepared, columns=["id", "split"])
        return dict(zip(table["id"].to_pylist(), table["split"].to_pylist(), strict=True))

    def requests(self, turn: int, ended: Counter[str]) -> Iterator[Request]:
        """The missing requests of one round. Counts in `ended` the turns of this round that are not asked, and why."""
        columns = ["id", "turn", "turns", "source", "split"]
        columns += ["prompt_ids", "loss_mask"] if turn == 0 else ["messages", "tools"]
        with pq.ParquetFile(self.run.prepared) as file:
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    if self.keep or turn < row["turns"]:
                        for answer in range(self.answers):
                            if (request := self._request(row, turn, answer, ended)) is not None:
                                yield request

    def _request(self, row: dict[str, Any], turn: int, answer: int, ended: Counter[str]) -> Request | None:
        """None if it is committed or out already, or the conversation ended before."""
        number = row["turn"] if self.keep else turn
        id_ = sample_id(row["id"], number, answer)
        if id_ in self.committed or id_ in self.out:
            return None
        prompt = row["prompt_ids"] if turn == 0 else self._later(row, turn, answer, ended)
        if prompt is None:
            return None
        mask = row.get("loss_mask") if self.keep else None
        self.out[id_] = Asked(row["id"], number, row["source"], row["split"], prompt, mask)
        room = 1 if self.keep else min(self.max_tokens, self.max_length - len(prompt))
        seed = None if self.seed is None else self.seed + answer
        return Request(id_, prompt, room, prompt_logprobs=self.keep, seed=seed)

    def _later(self, row: dict[str, Any], turn: int, number: int, ended: Counter[str]) -> list[int] | None:
        """The prompt of a turn after the first, or None where the conversation ended before."""
        prompt = self._prompt_or_end(row, turn, number)
        if isinstance(prompt, str):
            ended[prompt] += 1
            return None
        return prompt

    def _prompt_or_end(self, row: dict[str, Any], turn: int, number: int) -> list[int] | str:
        """The prompt of a turn after the first, or why the conversation ended before it."""
        assert self.render is not None
        answers = []
        for before in range(turn):
            id_ = sample_id(row["id"], before, number)
            if id_ not in self.committed:
                why = self._prompt_or_end(row, before, number) if before else ENDED_BAD
                return why if isinstance(why, str) else ENDED_BAD
            answer, reason = self.committed.answer(id_)
            if reason in (LENGTH, REPETITIVE):
                return ENDED_CUT if reason == LENGTH else ENDED_REPETITIVE
            answers.append(answer)
        try:
            tools = None if row["tools"] is None else json.loads(row["tools"])
            prompt = next_prompt(self.render, json.loads(row["messages"]), tools, answers)
        except RowError:
            return ENDED_REFUSED
        return prompt if len(prompt) + LEAST_ANSWER <= self.max_length else ENDED_LONG
