"""What an export format cannot hold, said before anything costs time. Imports no torch, since the plan asks."""

from collections.abc import Mapping
from dataclasses import asdict

from eyas.draft.sizes import chosen_aux_layers, norm_options
from eyas.errors import InputError
from eyas.recipe import Recipe
from eyas.target.info import TargetInfo

IGNORED = {
    "norm_before_residual": "set draft.norm_before_residual: false",
    "norm_before_fc": "set draft.preset: eagle3",
    "fc_norm": "train a drafter without it",
    "norm_output": "set draft.preset: eagle3",
}
"""options that SGLang's llama_eagle3.py does not read (it would compute something else, silently), and the way out"""


def sglang_limits(options: Mapping[str, bool], layers: int, aux_layers: int) -> list[tuple[str, str]]:
    """(why SGLang cannot serve a drafter with these norm options and counts, the way out); empty if it can."""
    found = [(f"SGLang ignores {name}, which this drafter has", fix) for name, fix in IGNORED.items() if options[name]]
    if layers != 1:
        found.append((f"SGLang takes one draft layer, this drafter has {layers}", "set draft.layers: 1"))
    if aux_layers != 3:
        found.append(("SGLang takes exactly three auxiliary layers", "set draft.aux_layers to three layers"))
    return found


def format_misfits(recipe: Recipe, target: TargetInfo) -> list[InputError]:
    """Every reason why a format of the recipe cannot hold the recipe's drafter."""
    if "sglang" not in recipe.export.formats:
        return []
    part = recipe.draft
    limits = sglang_limits(asdict(norm_options(part)), part.layers, len(chosen_aux_layers(target, part)))
    return [
        InputError(f"export.formats has sglang: {why}", fix=f"{fix}, or drop sglang from export.formats")
        for why, fix in limits
    ]
