"""The train stage in one process or in several ranks: torchrun under a supervisor, shown as one run.

The ranks and all that they start end with this process, also on Ctrl-C and by kill -9 (eyas.engine.supervise).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from eyas.engine import supervise
from eyas.errors import EyasError, InputError
from eyas.files import read_json
from eyas.progress import Progress, Task
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.states.store import HarvestStore
from eyas.target.info import TargetInfo
from eyas.train.interrupt import wish_to_stop
from eyas.train.packing import check_budget, trainable
from eyas.train.rank import KINDS, Job, RankError, RankFiles

POLL_SECONDS = 0.1
_ENDED_BY = re.compile(r"^\s*rank\s*: (\d+) .*\n\s*exitcode\s*: -(\d+) ", re.MULTILINE)
"""in what torchrun says at its end of the ranks that failed by themselves"""


def train_stage(
    recipe: Recipe, target: TargetInfo, run: RunDir, progress: Progress, nproc: int | None
) -> dict[str, Any]:
    """Trains in `nproc` ranks; default: one for each GPU, in this process where there is one GPU or none.

    Returns and raises what `eyas.train.trainer.train` does; InputError when there are fewer GPUs than ranks.
    """
    ranks = _ranks(nproc)
    if ranks == 1:
        from eyas.train.trainer import train

        return train(recipe, target, run, progress)
    return train_in_ranks(recipe, target, run, progress, ranks)


def check_train_stage(recipe: Recipe, run: RunDir, nproc: int | None) -> None:
    """Raises InputError for settings that cannot work, as far as it shows before the drafter is made."""
    _ranks(nproc)
    check_budget(trainable(HarvestStore(run).samples()), recipe.train.tokens_per_batch)


def _ranks(nproc: int | None) -> int:
    gpus = torch.cuda.device_count()
    ranks = nproc or max(1, gpus)
    if gpus and ranks > gpus:
        raise InputError(
            f"--nproc {ranks}: this machine has {gpus} GPU(s), and every rank needs one of its own",
            fix=f"give --nproc {gpus} or less",
        )
    return ranks


def train_in_ranks(recipe: Recipe, target: TargetInfo, run: RunDir, progress: Progress, ranks: int) -> dict[str, Any]:
    files = RankFiles(run.root / ".ranks")
    shutil.rmtree(files.root, ignore_errors=True)
    files.root.mkdir(parents=True)
    files.write_job(Job(recipe, target))
    log = run.logs / "train.log"
    try:
        progress.say(f"train: {ranks} ranks, output in {log}")
        with wish_to_stop(progress.say) as asked, _torchrun(files, ranks, log) as process:
            _follow(process, files, progress, asked.is_set)
        counts = _result(files, log, process.returncode)
        if asked.is_set():  # after the last step: everything is kept, but the wish to stop holds
            raise KeyboardInterrupt
        return counts
    finally:
        shutil.rmtree(files.root, ignore_errors=True)


@contextmanager
def _torchrun(files: RankFiles, ranks: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The supervisor's process; it ends when all ranks have ended, and they when the block does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [*launcher, *meet, "--max-restarts", "0", "-m", "eyas.train.rank", str(files.root)]
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    process = supervise.start(command, log, {**threads, **os.environ})
    try:
        yield process
    finally:
        supervise.stop(process)


def _follow(process: subprocess.Popen[bytes], files: RankFiles, progress: Progress, asked: Callable[[], bool]) -> None:
    """Shows rank 0's progress until all ranks have ended. Before the first step there is nothing to save on Ctrl-C."""
    files.events.touch()
    task: Task | None = None
    begun, rest = False, ""
    with ExitStack() as shown, open(files.events, encoding="utf-8") as events:
        while True:
            ended = process.poll() is not None
            *lines, rest = (rest + events.read()).split("\n")
            for event in map(json.loads, lines):
                if "say" in event:
                    progress.say(event["say"])
                elif "task" in event:
                    task, begun = shown.enter_context(progress.task(**event["task"])), True
                elif "advance" in event and task is not None:
                    task.advance(**event["advance"])
                elif "end" in event:
                    shown.close()
            if ended:
                return
            if asked():
                if not begun:
                    raise KeyboardInterrupt
                files.stop.touch()
            time.sleep(POLL_SECONDS)


def _result(files: RankFiles, log: Path, code: int) -> dict[str, Any]:
    errors = files.errors()
    killed = None if any(e.kind in KINDS for e in errors) else _killed(log, [signal.SIGABRT] if errors else [])
    if killed is not None:
        raise killed
    if errors:
        raise _raised(errors, log)
    if not files.result.exists():
        raise EyasError(
            f"the training ranks ended with exit status {code} and said nothing; the last lines of {log}:\n"
            + "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]),
            fix="the machine may have run out of memory; the same command continues from the last checkpoint",
        )
    counts: dict[str, Any] | None = read_json(files.result)
    if counts is None:
        raise KeyboardInterrupt
    return counts


def _killed(log: Path, secondary: Sequence[int]) -> EyasError | None:
    """Of a rank that a signal ended: it leaves no error, and those of the others are about their lost connection.

    secondary: signals that a library may raise because of another rank's error.
    """
    found = _ENDED_BY.findall(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
    ended = [(int(rank), int(number)) for rank, number in found if int(number) not in secondary]
    if not ended:
        return None
    rank, number = ended[0]
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    why = "the machine may have run out of memory" if number == signal.SIGKILL else f"look at {log}"
    return EyasError(
        f"training rank {rank} was killed (signal {number}, {name})",
        fix=f"{why}; the same command continues from the last checkpoint, if there is one",
    )


def _raised(errors: list[RankError], log: Path) -> EyasError:
    """The one error to tell: a known one if there is any, since a rank that is left alone fails in other ways."""
    known = [e for e in errors if e.kind in KINDS]
    if known:
        return KINDS[known[0].kind](known[0].message, fix=known[0].fix)
    return EyasError(f"a training rank ended with {errors[0].kind}: {errors[0].message}", fix=f"look at {log}")
