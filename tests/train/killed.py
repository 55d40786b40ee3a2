"""Trains the tiny run and kills itself with SIGKILL: python -m train.killed ROOT log|seal|rename STEP (from tests/)."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.train import checkpoints, loop
from eyas.train.trainer import train

from .tiny_run import tiny_recipe, tiny_target

SETTINGS: dict[str, Any] = {"epochs": 4, "noise": 0.05, "save_every": 3, "preset": "eagle3.1"}


def recipe(root: Path) -> Any:
    settings = dict(SETTINGS)
    return tiny_recipe(root, draft={"preset": settings.pop("preset")}, **settings)


def main() -> None:
    root, where, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "log":
        add = loop.Log.add

        def logged(self: loop.Log, entry: dict[str, Any]) -> None:
            add(self, entry)
            if entry["step"] == step:
                with open(self.path, "a") as f:
                    f.write('{"kind": "step", "st')  # a line that the kill cut
                die()

        loop.Log.add = logged  # type: ignore[method-assign]
    else:
        seal = checkpoints.seal

        def sealed(directory: Path, at: int, *rest: Any) -> None:
            if at == step and where == "seal":
                die()
            seal(directory, at, *rest)
            if at == step:
                die()

        checkpoints.seal = sealed  # type: ignore[assignment]
    train(recipe(root), tiny_target(root / "target"), RunDir(root), Progress(quiet=True))


if __name__ == "__main__":
    main()
