"""The formats of a recipe: which can be made of its drafter, and making them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.draft.config import draft_config
from eyas.errors import InputError
from eyas.export.sglang import export_sglang, sglang_problems
from eyas.export.speculators import export_speculators
from eyas.export.vllm import export_vllm
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo

Exporter = Callable[[RunDir, TargetInfo, Recipe], Path]

EXPORTERS: dict[str, Exporter] = {
    "vllm": export_vllm,
    "speculators": export_speculators,
    "sglang": export_sglang,
}


def check_formats(recipe: Recipe, target: TargetInfo) -> None:
    """For the plan, before anything costs time. Raises InputError when a format cannot hold the recipe's drafter."""
    if "sglang" not in recipe.export.formats:
        return
    if problems := sglang_problems(draft_config(target, recipe.draft, recipe.train.ttt_steps)):
        raise InputError(
            f"export.formats has sglang: {'; '.join(problems)}",
            fix="drop sglang from export.formats, or choose draft settings that SGLang can serve",
        )


def export(recipe: Recipe, target: TargetInfo, run: RunDir) -> dict[str, Any]:
    """Writes every format of the recipe (vllm always: verify needs it); returns counts."""
    check_formats(recipe, target)
    formats = list(dict.fromkeys(["vllm", *recipe.export.formats]))
    paths = {name: EXPORTERS[name](run, target, recipe) for name in formats}
    size = sum(f.stat().st_size for p in paths.values() for f in p.iterdir())
    return {"formats": ", ".join(paths), "bytes": size}
