"""Samples of other settings: kept in `previous/` beside those of this run, and taken up again when the settings come
back. Samples and states have a `previous/` each, so that all is renaming, also where states/ lies on another disk."""

import contextlib
import os
from pathlib import Path

from eyas.data.parts import shard_of
from eyas.data.schema import part_files
from eyas.files import fingerprint
from eyas.rundir import RunDir

FOLDER = "previous"


def places(run: RunDir, settings: str) -> tuple[Path, Path]:
    """Where parts and shards of these settings are set aside. `settings` may come from a file: it is no path."""
    name = fingerprint(settings)
    return run.samples / FOLDER / name, run.states / FOLDER / name


def set_aside(run: RunDir, part: Path, settings: str) -> int:
    """Moves a part and its shard; returns their bytes. The shard first: in states/, what no part names is rubbish."""
    samples, states = places(run, settings)
    shard = run.states / shard_of(part)
    size = part.stat().st_size
    if shard.exists():
        size += shard.stat().st_size
        states.mkdir(parents=True, exist_ok=True)
        os.replace(shard, states / shard.name)
    samples.mkdir(parents=True, exist_ok=True)
    os.replace(part, samples / part.name)
    return size


def bring_back(run: RunDir, settings: str) -> int:
    """Moves back what was set aside of these settings; returns how many parts. May be interrupted at any moment."""
    samples, states = places(run, settings)
    parts = part_files(samples)
    for part in parts:
        os.replace(part, run.samples / part.name)
    for shard in states.glob("*.safetensors"):
        if (run.samples / f"{shard.stem}.parquet").exists():  # else it is no part's: leave it
            os.replace(shard, run.states / shard.name)
    for folder in (samples, states, samples.parent, states.parent):
        with contextlib.suppress(OSError):  # not there, or not empty
            folder.rmdir()
    return len(parts)
