"""What the pipeline asks of an engine: answers to token ids, with log probabilities and, if asked, hidden states."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eyas.recipe import SamplingPart


@dataclass(frozen=True)
class Request:
    """One prompt as token ids. `max_tokens` = 1 is a prefill: the prompt's states, one token that is thrown away."""

    id: str
    prompt_ids: list[int]
    max_tokens: int
    prompt_logprobs: bool = False
    """also return the log probability of every prompt token but the first (kept answers)"""
    seed: int | None = None
    """in place of the sampling's"""


@dataclass(frozen=True)
class Captured:
    """Where a request's states lie: entry `index` of the shard (eyas.states.shard), `rows` rows."""

    shard: Path
    index: int
    rows: int


@dataclass(frozen=True)
class Completion:
    """What the engine consumed and produced, as the engine's own ids."""

    id: str
    prompt_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    """log probability of each output token under the unmodified (temperature 1) distribution"""
    prompt_logprobs: list[float] | None
    """of prompt tokens 1..; None unless asked for"""
    finish_reason: str
    captured: Captured | None


class Engine(Protocol):
    """A context manager; inside it, `generate` may be called many times."""

    def __enter__(self) -> "Engine": ...

    def __exit__(self, *exc: object) -> None: ...

    def generate(self, requests: Iterable[Request], sampling: SamplingPart) -> Iterator[Completion]:
        """Yields completions as they finish, at most the engine's concurrency in flight; `requests` is read lazily."""
        ...
