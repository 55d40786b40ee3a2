"""Export for SGLang: the same tensors, SGLang's layer ids, and nothing that SGLang would ignore in silence."""

from pathlib import Path

from speculators.models.eagle3 import Eagle3SpeculatorConfig

from eyas.errors import InputError
from eyas.export.checkpoint import cast, write_checkpoint
from eyas.export.flat import flat_config, flat_tensors
from eyas.export.limits import IGNORED, sglang_limits
from eyas.export.trained import export_dtype, read_trained
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo


def sglang_problems(config: Eagle3SpeculatorConfig) -> list[str]:
    """Why SGLang cannot serve such a drafter; empty if it can."""
    options = {name: bool(value) for name, value in config.model_dump(include=set(IGNORED)).items()}
    layers = config.transformer_layer_config.num_hidden_layers
    return [why for why, _ in sglang_limits(options, layers, len(config.eagle_aux_hidden_state_layer_ids or []))]


def export_sglang(run: RunDir, target: TargetInfo, recipe: Recipe) -> Path:
    """train/final -> drafter/sglang; returns the directory. Raises InputError for what SGLang cannot serve.

    SGLang adds one to each layer id before it captures (set_eagle3_layers_to_capture), so the state after k layers is
    its id k - 1; it reads the ids from `eagle_config` only.
    """
    trained = read_trained(run.train / "final", target)
    if problems := sglang_problems(trained.config):
        raise InputError(f"export.formats has sglang: {'; '.join(problems)}", fix="drop sglang from export.formats")
    dtype = export_dtype(recipe.engine)
    config = flat_config(trained, target, dtype)
    ids = [k - 1 for k in trained.aux_layers]
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    directory = run.drafter / "sglang"
    write_checkpoint(directory, config, cast(flat_tensors(trained), dtype, str(run.train / "final")))
    return directory
