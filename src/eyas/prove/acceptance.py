"""Predicted acceptance: a walk over known sequences with the exported drafter, as the engine would make it.

A request begins with one sampled token (after its prompt). Each draft proposes K tokens after the last known token; the
matching prefix is accepted, and the target adds one token of its own (the bonus), so the walk jumps by accepted + 1.
It ends when the last token of the sequence is reached. vLLM's counters are sums over drafts:
    acceptance length   = 1 + accepted tokens / drafts
    rate at position i  = drafts that accepted at least i + 1 tokens / drafts        (not conditional)

At the end the engine counts on: in the last draft it accepts or rejects proposals beyond the last token asked for,
although they are thrown away (scheduler.update_from_output counts before it trims). So the last K known tokens of an
answer that ended by its length are not asked for again (`Sequence.asked`): they judge the last draft exactly. After a
stop token nothing is taken as accepted, since a drafter is never trained to go on there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.export.reference import ReferenceDrafter


@dataclass(frozen=True)
class Sequence:
    """One answered request of the target, greedy."""

    token_ids: Tensor
    """[n] int64, prompt and answer"""
    prompt_length: int
    aux_states: Tensor
    """[n - 1 or more, A * hidden]: row t is about position t"""
    asked: int
    """answer tokens that are requested; those that are known beyond them only judge the last draft"""


@dataclass(frozen=True)
class Acceptance:
    """Sums over all drafts of a walk, in the sense of vLLM's counters."""

    drafts: int
    accepted_per_position: list[int]
    """drafts that accepted at least i + 1 tokens"""

    @property
    def rate_per_position(self) -> list[float]:
        """Accepted at position i / drafts; zeros without drafts."""
        return [a / self.drafts if self.drafts else 0.0 for a in self.accepted_per_position]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of one target step, bonus token included; 1 without drafts."""
        return 1.0 + sum(self.rate_per_position)


def predict_acceptance(drafter: ReferenceDrafter, samples: Iterable[Sequence], tokens: int) -> Acceptance:
    """The acceptance that an engine would count with `tokens` speculative tokens on these requests."""
    accepted = [a for sample in samples for a in walk(proposals(drafter, sample, tokens), sample)]
    return Acceptance(len(accepted), [sum(a > i for a in accepted) for i in range(tokens)])


def proposals(drafter: ReferenceDrafter, sample: Sequence, tokens: int) -> Tensor:
    """[asked - 1, K]: what would be proposed after each answer token but the last one asked for.

    Row i comes after answer token i. Rows of the prefix hold token x[t+1] and states of t at position t, so the
    proposal after x[p] is row p - 1.
    """
    first, end = sample.prompt_length, sample.prompt_length + sample.asked
    if sample.asked < 2:
        return torch.empty(0, tokens, dtype=torch.long)
    device = sample.aux_states.device
    rows = torch.arange(first - 1, end - 2, device=device)
    positions = torch.arange(end - 2, device=device)
    prefix = drafter.prefill(sample.token_ids[1 : end - 1].to(device), sample.aux_states[: end - 2], positions)
    return drafter.draft(prefix, rows, tokens).cpu()


def walk(proposed: Tensor, sample: Sequence) -> Iterator[int]:
    """The accepted tokens of each draft of one request. proposed [asked - 1, K] as `proposals` gives them."""
    answer = sample.token_ids[sample.prompt_length :].tolist()
    guesses: list[list[int]] = proposed.tolist()
    at = 0
    while at < sample.asked - 1:
        truth = answer[at + 1 : at + 1 + len(guesses[at])]
        accepted = 0
        while accepted < len(truth) and guesses[at][accepted] == truth[accepted]:
            accepted += 1
        yield accepted
        at += accepted + 1
