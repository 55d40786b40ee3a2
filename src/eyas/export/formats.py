"""The formats of a recipe: which can be made of its drafter, and making them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.export.limits import format_misfits
from eyas.export.sglang import export_sglang
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


def export(recipe: Recipe, target: TargetInfo, run: RunDir) -> dict[str, Any]:
    """Writes every format of the recipe (vllm always: verify needs it); returns counts."""
    for wrong in format_misfits(recipe, target):
        raise wrong
    formats = list(dict.fromkeys(["vllm", *recipe.export.formats]))
    paths = {name: EXPORTERS[name](run, target, recipe) for name in formats}
    size = sum(f.stat().st_size for p in paths.values() for f in p.iterdir())
    return {"formats": ", ".join(paths), "bytes": size}
