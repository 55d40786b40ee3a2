"""Before the first step: does the training fit into the GPU's memory, and if not, which settings would?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import InputError
from eyas.recipe import Recipe
from eyas.report.costs import TrainingMemory, drafter_sizes, training_memory
from eyas.states.store import SampleRef
from eyas.target.info import TargetInfo
from eyas.train.packing import Schedule, rows_of
from eyas.units import size

STEP = 256
"""suggested budgets are multiples of this many tokens"""


@dataclass(frozen=True)
class Load:
    """What the data asks of one rank."""

    ranks: int
    longest: int
    """rows of the longest sample: the least budget"""
    rows: int
    """supervised rows of the fullest pack"""

    @staticmethod
    def of(refs: Sequence[SampleRef], schedule: Schedule, ranks: int) -> "Load":
        packs = (pack for step in schedule.steps for rank in step for pack in rank)
        fullest = max((sum(refs[i].supervised for i in pack) for pack in packs), default=0)
        return Load(ranks, max(map(rows_of, refs)), fullest)


def check_memory(recipe: Recipe, target: TargetInfo, load: Load, free: int) -> None:
    """free: bytes of this rank's GPU, before anything of the training is on it.

    Raises InputError when the estimate is larger, with every single change of the recipe that would fit.
    """
    need = _need(recipe, target, load)
    if need.total <= free:
        return
    parts = ("weights", "gradients", "moments", "activations", "logits")
    said = ", ".join(f"{part} {size(getattr(need, part))}" for part in parts)
    ways = list(_ways(recipe, target, load, free))
    raise InputError(
        f"not enough GPU memory: training needs about {size(need.total)} ({said}), {size(free)} are free",
        fix=f"set {', or '.join(ways)}"
        if ways
        else "free the GPU, use a larger one, or set a smaller draft.intermediate_size or draft.vocab_size",
    )


def _need(recipe: Recipe, target: TargetInfo, load: Load, **changes: Any) -> TrainingMemory:
    """With other train settings; supervised rows go with the budget."""
    changed = recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
    rows = -(-load.rows * changed.train.tokens_per_batch // recipe.train.tokens_per_batch)
    drafter = drafter_sizes(target, changed)
    return training_memory(target, changed, drafter, cuda=True, ranks=load.ranks, rows=rows)


def _ways(recipe: Recipe, target: TargetInfo, load: Load, free: int) -> Iterator[str]:
    def fits(**changes: Any) -> bool:
        return _need(recipe, target, load, **changes).total <= free

    part = recipe.train
    least = -(-load.longest // STEP) * STEP
    fitting = [b for b in range(least, part.tokens_per_batch, STEP) if fits(tokens_per_batch=b)]
    if fitting:
        yield f"train.tokens_per_batch: {fitting[-1]}"
    if load.ranks > 1 and part.sharding == "none" and fits(sharding="fsdp"):
        yield "train.sharding: fsdp"
    steps = [t for t in range(1, part.ttt_steps) if fits(ttt_steps=t)]
    if steps:
        yield f"train.ttt_steps: {steps[-1]}"
