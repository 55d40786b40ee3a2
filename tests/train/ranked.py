"""Trains the tiny run as one of several gloo ranks, as torchrun sets them; from tests/: -m train.ranked ROOT."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.train import loop
from eyas.train.trainer import train

from .tiny_run import tiny_recipe, tiny_target

SETTINGS = {"epochs": 2, "tokens_per_batch": 32}


def main() -> None:
    root, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.set_num_threads(1)
    trainers: list[loop.DrafterTrainer] = []
    made = loop.DrafterTrainer.__init__

    def remembered(self: loop.DrafterTrainer, *args: object, **kwargs: object) -> None:
        trainers.append(self)
        made(self, *args, **kwargs)  # type: ignore[arg-type]

    loop.DrafterTrainer.__init__ = remembered  # type: ignore[method-assign]
    train(tiny_recipe(root, **SETTINGS), tiny_target(root / "target"), RunDir(root), Progress(quiet=True))
    trained = {n: p.detach().contiguous() for n, p in trainers[0].drafter.named_parameters() if p.requires_grad}
    save_file(trained, root / f"rank{rank}.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
