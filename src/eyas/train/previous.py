"""Trainings of other inputs: set aside whole in previous/, and taken up again when their inputs come back."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from eyas.rundir import RunDir
from eyas.train.checkpoints import MODEL, tidy, whole_checkpoints
from eyas.units import size


def change_over(run: RunDir, was: str | None, now: str, say: Callable[[str], None]) -> None:
    """Leaves in train/ a training of the inputs `now`, if there ever was one, and nothing of other inputs.

    `was`: the inputs of what lies there. None: no record says; checkpoints then stay, since they know themselves what
    they were made of (eyas.train.checkpoints.resumable). Nothing that took long is ever deleted.
    """
    if was is None and whole_checkpoints(run.train):
        return
    if was != now:
        _set_aside(run, was or "unknown", say)
    earlier = sorted(run.previous.glob(f"*-train-{now}"))
    if earlier and not _is_worth_keeping(run.train):
        shutil.rmtree(run.train, ignore_errors=True)
        shutil.move(earlier[-1], run.train)
        say(f"train: taking up the training of these inputs that was set aside in {earlier[-1]}")


def _set_aside(run: RunDir, was: str, say: Callable[[str], None]) -> None:
    if not _is_worth_keeping(run.train):
        shutil.rmtree(run.train, ignore_errors=True)
        return
    tidy(run.train)
    aside = run.previous / f"{datetime.now(UTC).isoformat(timespec='seconds').replace(':', '')}-train-{was}"
    run.previous.mkdir(exist_ok=True)
    shutil.move(run.train, aside)
    steps = max((c.step for c in whole_checkpoints(aside)), default=0)
    taken = size(sum(f.stat().st_size for f in aside.rglob("*") if f.is_file()))
    say(
        f"train: the training of the earlier inputs ({steps:,} steps, {taken}) is set aside in {aside}: set the inputs "
        "back and it is taken up again; delete it to free the disk"
    )


def _is_worth_keeping(train_dir: Path) -> bool:
    return bool(whole_checkpoints(train_dir)) or (train_dir / "final" / MODEL).is_file()
