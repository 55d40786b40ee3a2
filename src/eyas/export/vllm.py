"""Export for vLLM: flat LlamaForCausalLMEagle3, as vllm/model_executor/models/llama_eagle3.py reads it."""

from pathlib import Path

from eyas.export.checkpoint import cast, write_checkpoint
from eyas.export.flat import flat_config, flat_tensors
from eyas.export.trained import export_dtype, read_trained
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo


def export_vllm(run: RunDir, target: TargetInfo, recipe: Recipe) -> Path:
    """train/final -> drafter/vllm; returns the directory.

    vLLM's layer id k is the state after k layers, as trained. What its reader would default to something else is always
    written: norm_before_residual, num_aux_hidden_states (it sizes fc by it), head_dim, rope_parameters.
    """
    trained = read_trained(run.train / "final", target)
    dtype = export_dtype(recipe.engine)
    config = flat_config(trained, target, dtype)
    config["eagle_aux_hidden_state_layer_ids"] = trained.aux_layers
    directory = run.drafter / "vllm"
    write_checkpoint(directory, config, cast(flat_tensors(trained), dtype, str(run.train / "final")))
    return directory
