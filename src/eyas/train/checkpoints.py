"""Checkpoints that are whole or absent: written aside, checked by their list of files, renamed; and which ones to keep.

A checkpoint directory holds model.safetensors (the trained weights, float32), optimizer.safetensors (moments),
trainer_state.json (transformers' loop state) and, written last, checkpoint.json. Randomness needs no state: a step's
depends on the seed, the step and the rank alone.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from eyas.errors import EyasError, InputError
from eyas.files import read_json, sync_dir
from eyas.train.sharding import like, whole

ABOUT = "checkpoint.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"
PREFIX = "checkpoint-"
_SEPARATOR = "|"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    made_of: dict[str, str]
    """fingerprints: target, data, vocabulary, recipe, ranks"""
    holdout_loss: float | None


@contextmanager
def directory_aside(path: Path) -> Iterator[Path]:
    """Yields an empty directory beside `path`; on success its files are fsynced and it takes `path`'s place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for file in aside.iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        sync_dir(aside)
        if path.exists():
            remove(path)
        os.replace(aside, path)
        sync_dir(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def seal(directory: Path, step: int, made_of: dict[str, str], holdout_loss: float | None) -> None:
    """Writes checkpoint.json, which lists every file of `directory` with its size."""
    files = {f.name: f.stat().st_size for f in sorted(directory.iterdir())}
    about = {"step": step, "made_of": made_of, "holdout_loss": holdout_loss, "files": files}
    (directory / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def whole_checkpoints(train_dir: Path) -> list[Checkpoint]:
    """The complete checkpoints, by step. One with a missing, cut or garbled file is not among them."""
    found = [_read(path) for path in train_dir.glob(PREFIX + "*") if path.is_dir()]
    return sorted((c for c in found if c is not None), key=lambda c: c.step)


def _read(path: Path) -> Checkpoint | None:
    try:
        about = read_json(path / ABOUT)
        files, step, loss = about["files"], about["step"], about["holdout_loss"]
        if type(step) is not int or not isinstance(loss, float | None) or MODEL not in files:
            return None
        if not all((path / name).stat().st_size == size for name, size in files.items()):
            return None
        if STATE in files and read_json(path / STATE)["global_step"] != step:
            return None
        return Checkpoint(path, step, dict(about["made_of"]), loss)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # of whatever kind: a file overwritten with garbage can hold any JSON, or none


def resumable(train_dir: Path, made_of: dict[str, str]) -> Checkpoint | None:
    """The newest whole checkpoint. Raises InputError if it was made of something else than this run's inputs."""
    checkpoints = whole_checkpoints(train_dir)
    if not checkpoints:
        return None
    newest = checkpoints[-1]
    changed = sorted(k for k in made_of.keys() | newest.made_of.keys() if made_of.get(k) != newest.made_of.get(k))
    if changed:
        raise InputError(
            f"{newest.path} was trained with other inputs: {', '.join(changed)} changed",
            fix="restore them to continue (--nproc sets the number of ranks), or move away (or delete) "
            f"{train_dir} to train from the start",
        )
    return newest


def tidy(train_dir: Path) -> None:
    """Removes what a killed process left: directories written aside and checkpoints that are not whole."""
    whole = {c.path for c in whole_checkpoints(train_dir)}
    for path in [*train_dir.glob(".*.part"), *train_dir.glob(".*.old"), *train_dir.glob(PREFIX + "*")]:
        if path.is_dir() and path not in whole:
            shutil.rmtree(path, ignore_errors=True)


def retain(train_dir: Path, keep: int) -> None:
    """Keeps the newest checkpoint, then the best by held-out loss, then the next newest: `keep` in all."""
    checkpoints = whole_checkpoints(train_dir)
    if not checkpoints:
        return
    scored = [c for c in checkpoints if c.holdout_loss is not None]
    best = [min(scored, key=lambda c: (c.holdout_loss, -c.step))] if scored else []
    wanted: list[Path] = []
    for c in [checkpoints[-1], *best, *reversed(checkpoints)]:
        if c.path not in wanted and len(wanted) < keep:
            wanted.append(c.path)
    for c in checkpoints:
        if c.path not in wanted:
            remove(c.path)


def remove(path: Path) -> None:
    """Takes a directory out of sight in one step, then deletes it."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    os.replace(path, old)
    shutil.rmtree(old, ignore_errors=True)


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained weights, whole, on the CPU; every rank must ask (see eyas.train.sharding)."""
    return {n: _on_cpu(p) for n, p in model.named_parameters() if p.requires_grad}


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All moments, whole, on the CPU, under "<parameter>|<moment>"; every rank must ask."""
    return {
        f"{name}{_SEPARATOR}{key}": _on_cpu(torch.as_tensor(value))
        for name, p in model.named_parameters()
        if p.requires_grad
        for key, value in optimizer.state[p].items()
    }


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return whole(tensor.detach()).cpu().contiguous()


def save(weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor], directory: Path) -> None:
    save_file(weights, directory / MODEL)
    save_file(optimizer, directory / OPTIMIZER)


def load_weights(model: nn.Module, directory: Path) -> None:
    """Raises EyasError unless the file holds exactly the trained weights."""
    found = _load(directory / MODEL)
    wanted = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if found.keys() != wanted.keys() or any(found[n].shape != p.shape for n, p in wanted.items()):
        raise EyasError(f"{directory / MODEL} does not hold this drafter's weights", fix=_without(directory))
    with torch.no_grad():
        for name, p in wanted.items():
            p.copy_(like(found[name], p))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Raises EyasError when a trained weight has no moments in the file."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for full, value in _load(directory / OPTIMIZER).items():
        name, key = full.rsplit(_SEPARATOR, 1)
        found.setdefault(name, {})[key] = value
    fused = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if name not in found:
            raise EyasError(f"{directory / OPTIMIZER} has no moments of {name}", fix=_without(directory))
        state: dict[str, Any] = {}
        for key, value in found[name].items():
            if key == "step":
                state[key] = value.to(p.device) if id(p) in fused else value
            else:
                state[key] = like(value, p)
        optimizer.state[p] = state


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as e:
        raise EyasError(f"{path} is damaged: {e}", fix=_without(path.parent)) from None


def _without(checkpoint: Path) -> str:
    return f"delete {checkpoint} and run again: the training continues from the checkpoint before it, if there is one"
