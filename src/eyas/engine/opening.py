"""Opens the engine that the recipe names: a server of ours, running servers, or transformers in this process."""

from contextlib import AbstractContextManager

from eyas.engine.base import Engine
from eyas.progress import Progress
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo

MARGIN = 8
"""tokens of context beyond the longest sample: a prefill of a whole kept sample still makes one token"""


def longest_context(recipe: Recipe, target: TargetInfo) -> int:
    """Positions that a server which captures for this recipe must have."""
    return min(target.max_position_embeddings, recipe.data.max_length + MARGIN)


def open_engine(
    recipe: Recipe, target: TargetInfo, run: RunDir, layers: list[int], progress: Progress
) -> AbstractContextManager[Engine]:
    """An engine that captures `layers` of `target` into run.states; whatever it started ends with the block."""
    if recipe.engine.kind == "hf":
        from eyas.engine.hf import HfEngine

        return HfEngine(recipe.engine, target, layers, run.states)
    from eyas.engine.vllm import VllmEngine

    return VllmEngine(
        recipe.server,
        target,
        layers,
        run.states,
        log_file=run.logs / "harvest-server.log",
        max_model_len=longest_context(recipe, target),
        progress_say=progress.say,
    )
