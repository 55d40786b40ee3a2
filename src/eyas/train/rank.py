"""One rank of the train stage, started by torchrun: python -m eyas.train.rank DIRECTORY.

DIRECTORY holds what the launching process (eyas.train.launch) and its ranks tell each other, see `RankFiles`.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from eyas.errors import EyasError, InputError, ProofError, disk_error
from eyas.files import read_json, write_json, write_text
from eyas.progress import Progress, Task
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo

KINDS: dict[str, type[EyasError]] = {kind.__name__: kind for kind in (EyasError, InputError, ProofError)}


@dataclass(frozen=True)
class Job:
    recipe: Recipe
    target: TargetInfo


_JOB = TypeAdapter(Job)


@dataclass(frozen=True)
class RankError:
    """Why a rank ended."""

    kind: str
    """a class of eyas.errors; any other is a fault of the program or the machine"""
    message: str
    fix: str | None


class RankFiles:
    """The files by which the launching process and its ranks speak."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job = root / "job.json"
        self.stop = root / "stop"
        """there once the user wants to stop: a checkpoint is written after the current step"""
        self.events = root / "events.jsonl"
        """rank 0's progress, one JSON object a line"""
        self.result = root / "result.json"
        """rank 0's counts; null when the run was stopped on the user's wish"""

    def write_job(self, job: Job) -> None:
        write_text(self.job, _JOB.dump_json(job, by_alias=True).decode())

    def read_job(self) -> Job:
        return _JOB.validate_json(self.job.read_bytes())

    def write_error(self, rank: int, error: Exception) -> None:
        told = error if isinstance(error, EyasError) else disk_error(error)
        if told is None:
            lines = f"{error}".splitlines() or [""]
            write_json(self._error(rank), [type(error).__name__, lines[0], None])
        else:
            write_json(self._error(rank), [type(told).__name__, told.message, told.fix])

    def errors(self) -> list[RankError]:
        """By time; the first one is the likely cause of the others."""
        found = sorted(self.root.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [RankError(*read_json(path)) for path in found]

    def _error(self, rank: int) -> Path:
        return self.root / f"error-{rank}.json"


class Reporting(Progress):
    """Progress that the launching process shows."""

    def __init__(self, events: Path) -> None:
        super().__init__(quiet=True)
        self._file = open(events, "a", encoding="utf-8")  # noqa: SIM115 - as long as the process

    def write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def say(self, line: str) -> None:
        self.write({"say": line})

    @contextmanager
    def task(self, name: str, *, total: int | None, unit: str, done: int = 0) -> Iterator[Task]:
        self.write({"task": {"name": name, "total": total, "unit": unit, "done": done}})
        yield _Reported(self, name, total, unit, done)
        self.write({"end": name})


class _Reported(Task):
    def __init__(self, owner: Reporting, name: str, total: int | None, unit: str, done: int) -> None:
        super().__init__(owner, name, total, unit, done)
        self._reporting = owner

    def advance(self, units: int = 1, *, note: str | None = None, **counted: float) -> None:
        self.done += units
        self._reporting.write({"advance": {"units": units, "note": note, **counted}})


def run(files: RankFiles, rank: int) -> None:
    from eyas.train.trainer import train

    job = files.read_job()
    progress = Progress(quiet=True) if rank else Reporting(files.events)
    counts: dict[str, Any] | None = None
    try:
        counts = train(job.recipe, job.target, RunDir(Path(job.recipe.run_dir)), progress, files.stop.exists)
    except KeyboardInterrupt:
        if not files.stop.exists():
            raise
    if not rank:
        write_json(files.result, counts)


def main(directory: str) -> None:
    import torch.distributed as dist

    files, rank = RankFiles(Path(directory)), int(os.environ["RANK"])
    try:
        run(files, rank)
    except Exception as e:  # noqa: BLE001 - every kind must reach the launching process
        traceback.print_exc()
        files.write_error(rank, e)
        sys.stderr.flush()
        os._exit(1)  # without waiting for collectives that no other rank will join
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
