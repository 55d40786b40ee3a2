"""Export in the speculators format, without what its own writer adds: code, embeddings, paths of this machine."""

import json
from pathlib import Path
from typing import Any

from eyas.export.checkpoint import cast, write_checkpoint
from eyas.export.trained import export_dtype, read_trained
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo

DROPPED = ("auto_map", "_name_or_path", "name_or_path")


def export_speculators(run: RunDir, target: TargetInfo, recipe: Recipe) -> Path:
    """train/final -> drafter/speculators; returns the directory.

    The verifier is named by the recipe's hub id; a target from a local directory is left unnamed (null), since the path
    says nothing on another machine.
    """
    trained = read_trained(run.train / "final", target)
    dtype = export_dtype(recipe.engine)
    config: dict[str, Any] = json.loads(json.dumps(trained.config.to_dict()))
    for key in DROPPED:
        config.pop(key, None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    layer = config["transformer_layer_config"]
    layer.pop("_name_or_path", None)
    # written even where they equal the class defaults: other readers have other defaults
    for key in ("head_dim", "num_key_value_heads", "rope_parameters", "max_position_embeddings", "vocab_size"):
        layer[key] = trained.layer.to_dict()[key]
    verifier = config["speculators_config"]["verifier"]
    local = Path(recipe.target.path).exists() or Path(recipe.target.path).is_absolute()
    verifier["name_or_path"] = None if local else recipe.target.path
    verifier["architectures"] = [target.architecture]
    directory = run.drafter / "speculators"
    write_checkpoint(directory, config, cast(trained.tensors, dtype, str(run.train / "final")))
    return directory
