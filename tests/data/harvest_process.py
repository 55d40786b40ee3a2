"""A harvest in a process of its own, to be killed: TARGET RUN_DIR PROMPTS. Prints "ready" before the engine answers."""

import sys
import time
from pathlib import Path

import torch

from eyas.data.harvest import harvest
from eyas.data.prepare import prepare
from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.target.resolve import resolve_target

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.tiny import LAYERS, TinyEngine, recipe


def main(target: Path, root: Path, prompts: Path) -> None:
    torch.set_num_threads(1)
    run = RunDir(root)
    what = recipe(root, target, [prompts], states="bf16")
    info, quiet = resolve_target(str(target)), Progress(quiet=True)
    with run.locked():
        if not run.prepared.exists():
            prepare(what, info, run, quiet)
        run.states.mkdir(exist_ok=True)
        engine = TinyEngine(target, run.states, pause=lambda: time.sleep(0.002), per_shard=4)
        print("ready", flush=True)
        counts = harvest(what, info, run, LAYERS, quiet, lambda: engine)
    print("done", counts["samples"], len(engine.asked), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
