"""Which samples share a batch: bin packing into a fixed token budget, the same for the same seed and epoch."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.errors import InputError
from eyas.states.store import SampleRef

WINDOW = 8192
"""samples that are packed together; a shuffled epoch is cut into windows of this many"""
BALANCE_OVER = 8
"""steps whose packs are dealt out together, so that all ranks of a step have about as many supervised tokens"""

Pack = list[int]
"""numbers of the samples in one batch; empty: this rank has nothing here"""
Step = list[list[Pack]]
"""step[r][m]: rank r's pack in micro batch m; the gradients of all of them make one optimizer step"""


@dataclass(frozen=True)
class Schedule:
    """Every optimizer step of a run; epoch_ends[e] steps are done after epoch e."""

    steps: list[Step]
    epoch_ends: list[int]
    tokens: int
    """training rows of one epoch"""

    def epoch_of(self, step: int) -> int:
        """The epoch (from 0) of the step numbered `step` (from 0)."""
        return bisect_left(self.epoch_ends, step + 1)


def rows_of(ref: SampleRef) -> int:
    """Training rows of a sample of n tokens: n - 2 (the last row predicts the last token)."""
    return ref.tokens - 2


def trainable(refs: Sequence[SampleRef]) -> list[SampleRef]:
    """Samples with at least one supervised row; it takes two supervised tokens."""
    return [ref for ref in refs if ref.supervised >= 2 and rows_of(ref) >= 1]


def make_schedule(
    refs: Sequence[SampleRef], budget: int, epochs: int, seed: int, world: int, accumulate: int = 1
) -> Schedule:
    """Packs `refs` anew for each epoch. Raises InputError when a sample is longer than the budget.

    Which packs make a step depends on world * accumulate alone: two ranks take the steps that one rank takes with
    twice the micro batches.
    """
    check_budget(refs, budget)
    lengths, supervised = [rows_of(ref) for ref in refs], [ref.supervised for ref in refs]
    steps: list[Step] = []
    ends: list[int] = []
    for epoch in range(epochs):
        rng = np.random.default_rng([seed, epoch])
        packs = pack(lengths, budget, rng)
        groups = deal(packs, [sum(supervised[i] for i in p) for p in packs], world * accumulate, rng)
        steps += [share_out(group, world) for group in groups]
        ends.append(len(steps))
    return Schedule(steps, ends, sum(lengths))


def check_budget(refs: Sequence[SampleRef], budget: int) -> None:
    """Raises InputError naming the longest sample and the way out."""
    longest = max(refs, key=rows_of, default=None)
    if longest is not None and rows_of(longest) > budget:
        raise InputError(
            f"train.tokens_per_batch is {budget:,}, but sample {longest.id} alone has {rows_of(longest):,} "
            "training tokens",
            fix=f"set train.tokens_per_batch to at least {rows_of(longest)}, or harvest with a lower data.max_length",
        )


def pack(lengths: Sequence[int], budget: int, rng: np.random.Generator) -> list[Pack]:
    """Best fit, longest first, inside windows of a shuffled order; the packs come back shuffled."""
    order = rng.permutation(len(lengths))
    packs: list[Pack] = []
    for a in range(0, len(order), WINDOW):
        window = sorted(order[a : a + WINDOW].tolist(), key=lambda i: -lengths[i])
        packs += _best_fit(window, lengths, budget)
    return [packs[i] for i in rng.permutation(len(packs))]


def _best_fit(items: Sequence[int], lengths: Sequence[int], budget: int) -> list[Pack]:
    packs: list[Pack] = []
    free: list[tuple[int, int]] = []  # (room left, pack), ascending
    for item in items:
        need = lengths[item]
        at = bisect_left(free, (need, -1))
        if at == len(free):
            packs.append([item])
            insort(free, (budget - need, len(packs) - 1))
        else:
            room, number = free.pop(at)
            packs[number].append(item)
            insort(free, (room - need, number))
    return packs


def deal(packs: list[Pack], supervised: Sequence[int], size: int, rng: np.random.Generator) -> list[list[Pack]]:
    """Groups of `size` packs with about equally many supervised tokens, in descending order.

    The last group is filled up with empty packs.
    """
    if size == 1:
        return [[p] for p in packs]
    groups: list[list[Pack]] = []
    for a in range(0, len(packs), size * BALANCE_OVER):
        some = sorted(range(a, min(a + size * BALANCE_OVER, len(packs))), key=lambda i: -supervised[i])
        groups += [[packs[i] for i in some[j : j + size]] for j in range(0, len(some), size)]
    groups = [groups[i] for i in rng.permutation(len(groups))]
    return [g + [[]] * (size - len(g)) for g in groups]


def share_out(group: Sequence[Pack], world: int) -> Step:
    """Deals a group out to the ranks, every other micro batch in reverse, so that the ranks' sums are about equal."""
    micros = [list(group[a : a + world]) for a in range(0, len(group), world)]
    ordered = [m if number % 2 == 0 else m[::-1] for number, m in enumerate(micros)]
    return [[m[rank] for m in ordered] for rank in range(world)]
