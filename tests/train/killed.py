"""Trains the tiny run and kills itself with SIGKILL; run from tests/.

python -m train.killed ROOT log|seal|rename STEP
python -m train.killed ROOT often SEED STEPS    # ten kills, each in a fork that continues the run; then to the end
"""

import os
import random
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
OFTEN = {**SETTINGS, "epochs": 12, "accumulate": 2}
KILLS = 10
WHERE = ("log", "seal", "rename")


def recipe(root: Path, settings: dict[str, Any] = SETTINGS) -> Any:
    settings = dict(settings)
    return tiny_recipe(root, draft={"preset": settings.pop("preset")}, **settings)


def run(root: Path, settings: dict[str, Any] = SETTINGS) -> None:
    train(recipe(root, settings), tiny_target(root / "target"), RunDir(root), Progress(quiet=True))


def die_at(where: str, step: int) -> None:
    """log: after the step, with half a line written; seal, rename: while the step's checkpoint is written."""

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


def kills(seed: int, steps: int) -> list[tuple[str, int]]:
    """Where to kill, at KILLS different random steps, ascending; a checkpoint is written at every third step."""
    draw = random.Random(seed)
    at = sorted(draw.sample(range(2, steps + 1), KILLS))
    return [("log" if s % SETTINGS["save_every"] else draw.choice(WHERE), s) for s in at]


def killed_often(root: Path, seed: int, steps: int) -> None:
    for where, step in kills(seed, steps):
        child = os.fork()
        if child == 0:
            die_at(where, step)
            run(root, OFTEN)
            os._exit(1)  # it should have been killed
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != -signal.SIGKILL:
            sys.exit(f"{where} {step}: ended with {code}")
    run(root, OFTEN)


def main() -> None:
    root, where, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    if where == "often":
        killed_often(root, number, int(sys.argv[4]))
        return
    die_at(where, number)
    run(root)


if __name__ == "__main__":
    main()
