"""Trains the tiny run as one of several gloo ranks, as torchrun sets them; from tests/: -m train.ranked ROOT.

ROOT/base is copied for each of RUNS; each rank writes its trained weights beside the run. `resumed` begins with the
checkpoint of step RESUMED_AT that `fsdp` wrote.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from eyas.errors import ProofError
from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.train import checkpoints, loop
from eyas.train.trainer import train

from .tiny_run import tiny_recipe, tiny_target

SETTINGS: dict[str, Any] = {"epochs": 2, "tokens_per_batch": 32, "save_every": 1, "keep": 99, "noise": 0.05}
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"sharding": "fsdp"},
    "resumed": {"sharding": "fsdp"},
    "muon": {"optimizer": "muon", "epochs": 1},
    "fsdp-muon": {"optimizer": "muon", "sharding": "fsdp", "epochs": 1},
    "fsdp-head": {"sharding": "fsdp", "train_head": True, "accumulate": 2, "epochs": 1, "noise": 0.0},
}
RESUMED_AT = 2


def main() -> None:
    base, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainers: list[loop.DrafterTrainer] = []
    made = loop.DrafterTrainer.__init__

    def remembered(self: loop.DrafterTrainer, *args: object, **kwargs: object) -> None:
        trainers.append(self)
        made(self, *args, **kwargs)  # type: ignore[arg-type]

    loop.DrafterTrainer.__init__ = remembered  # type: ignore[method-assign]
    for name, settings in RUNS.items():
        root = base.parent / name
        if rank == "0":
            shutil.copytree(base, root)
            if name == "resumed":
                _begun(base.parent / "fsdp" / "train", root / "train")
        dist.barrier()
        recipe = tiny_recipe(root, **{**SETTINGS, **settings})
        train(recipe, tiny_target(base / "target" / rank), RunDir(root), Progress(quiet=True))
        drafter = trainers[-1].drafter
        sharded = {isinstance(p, DTensor) for p in drafter.parameters() if p.requires_grad}
        assert sharded == {"sharding" in settings}
        save_file(checkpoints.trained_weights(drafter), root / f"rank{rank}.safetensors")
    root = base.parent / "broken"
    if rank == "0":
        shutil.copytree(base, root)
        _break(root / "states" / "part-0.safetensors")
    dist.barrier()
    try:
        train(tiny_recipe(root, **SETTINGS), tiny_target(base / "target" / rank), RunDir(root), Progress(quiet=True))
    except ProofError as e:
        (root / f"error{rank}").write_text(e.message)
    dist.destroy_process_group()


def _break(shard: Path) -> None:
    """A value of the first sample is not finite."""
    with safe_open(shard, "pt") as f:
        about = f.metadata()
    tensors = load_file(shard)
    tensors["states"][3, 0, 3] = float("nan")
    save_file(tensors, shard, about)


def _begun(finished: Path, train_dir: Path) -> None:
    train_dir.mkdir()
    shutil.copy(finished / "log.jsonl", train_dir)
    name = f"{checkpoints.PREFIX}{RESUMED_AT}"
    shutil.copytree(finished / name, train_dir / name)


if __name__ == "__main__":
    main()
