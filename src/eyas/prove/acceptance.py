"""Predicted acceptance: a walk over known sequences with the exported drafter, as the engine would make it.

A request begins with one sampled token (after its prompt). Each draft proposes K tokens after the last known token; the
matching prefix is accepted, and the target adds one token of its own (the bonus), so the walk jumps by accepted + 1.
It ends when the last token of the sequence is reached. vLLM's counters are sums over drafts:
    acceptance length   = 1 + accepted tokens / drafts
    rate at position i  = drafts that accepted at least i + 1 tokens / drafts        (not conditional)

At the end the engine counts on: in the last draft it accepts or rejects proposals beyond the final token, although they
are thrown away (scheduler.update_from_output counts before it trims). The sequence does not say what the target would
have produced there, so after an end by length these acceptances are estimated with the walk's own conditional rates
(`beyond_end`); after a stop token they are taken as none, since a drafter is never trained to go on there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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
    stopped: bool
    """the answer ended with a stop token (else: by its length)"""


@dataclass
class Acceptance:
    """Sums over all drafts of a walk, in the sense of vLLM's counters."""

    drafts: int
    accepted_per_position: list[int]
    """drafts that accepted at least i + 1 known tokens"""
    beyond_end: list[float] = field(default_factory=list)
    """estimated further acceptances past the ends of sequences, per position"""

    def __post_init__(self) -> None:
        if not self.beyond_end:
            self.beyond_end = [0.0] * len(self.accepted_per_position)

    @property
    def rate_per_position(self) -> list[float]:
        """Accepted at position i / drafts; zeros without drafts."""
        sums = [a + b for a, b in zip(self.accepted_per_position, self.beyond_end, strict=True)]
        return [s / self.drafts if self.drafts else 0.0 for s in sums]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of one target step, bonus token included; 1 without drafts."""
        return 1.0 + sum(self.rate_per_position)


@dataclass(frozen=True)
class Draft:
    """One draft of a walk: `accepted` of the `known` proposals that the sequence can judge (at most K)."""

    accepted: int
    known: int
    stopped: bool
    """the sequence ends with a stop token"""


def predict_acceptance(drafter: ReferenceDrafter, samples: Iterable[Sequence], tokens: int) -> Acceptance:
    """The acceptance that an engine would count with `tokens` speculative tokens on these requests."""
    drafts = [d for sample in samples for d in walk(proposals(drafter, sample, tokens), sample)]
    return count(drafts, tokens)


def proposals(drafter: ReferenceDrafter, sample: Sequence, tokens: int) -> Tensor:
    """[answer - 1, K]: what would be proposed after each answer token but the last; row i comes after answer token i.

    Rows hold token x[t+1] and states of t at position t, so the proposal after x[p] is row p - 1.
    """
    n, first = sample.token_ids.numel(), sample.prompt_length
    if n - first < 2:
        return torch.empty(0, tokens, dtype=torch.long)
    device = sample.aux_states.device
    rows = torch.arange(first - 1, n - 2, device=device)
    positions = torch.arange(n - 2, device=device)
    prefix = drafter.prefill(sample.token_ids[1 : n - 1].to(device), sample.aux_states[: n - 2], positions)
    return drafter.draft(prefix, rows, tokens).cpu()


def walk(proposed: Tensor, sample: Sequence) -> Iterator[Draft]:
    """The drafts of one request. proposed [answer - 1, K] as `proposals` gives them."""
    answer = sample.token_ids[sample.prompt_length :].tolist()
    guesses: list[list[int]] = proposed.tolist()
    at = 0
    while at < len(answer) - 1:
        truth = answer[at + 1 :]
        known = min(len(guesses[at]), len(truth))
        accepted = 0
        while accepted < known and guesses[at][accepted] == truth[accepted]:
            accepted += 1
        yield Draft(accepted, known, sample.stopped)
        at += accepted + 1


def count(drafts: list[Draft], tokens: int) -> Acceptance:
    """Sums drafts; where all known proposals were accepted and the length cut the rest, the rest is estimated."""
    accepted = [sum(d.accepted > i for d in drafts) for i in range(tokens)]
    reached = [sum(d.known > i and d.accepted >= i for d in drafts) for i in range(tokens)]
    onward = [a / r if r else 0.0 for a, r in zip(accepted, reached, strict=True)]
    beyond = [0.0] * tokens
    for draft in drafts:
        if draft.accepted == draft.known and not draft.stopped:
            chance = 1.0
            for i in range(draft.known, tokens):
                chance *= onward[i]
                beyond[i] += chance
    return Acceptance(len(drafts), accepted, beyond)
