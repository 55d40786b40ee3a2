"""Writes a drafter's directory (config.json, model.safetensors) whole or not at all, and reads it back."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.export.trained import check_tensors, check_vocab_map
from eyas.files import read_json, sync_dir, write_json


def write_checkpoint(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Writes aside, reads back and compares, then renames to `directory` (an older one is replaced)."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = directory.with_name(f".{directory.name}.{os.getpid()}.part")
    old = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    try:
        aside.mkdir()
        write_json(aside / "config.json", config)
        weights = aside / "model.safetensors"
        save_file({n: t.contiguous() for n, t in tensors.items()}, weights, {"format": "pt"})
        with open(weights, "rb") as f:
            os.fsync(f.fileno())
        _same(aside, config, tensors)
        if directory.exists():
            os.replace(directory, old)
        os.replace(aside, directory)
        sync_dir(directory.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _same(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Raises EyasError unless what lies in `directory` is exactly what was to be written."""
    found = load_file(directory / "model.safetensors")
    if read_json(directory / "config.json") != config or found.keys() != tensors.keys():
        raise EyasError(f"{directory}: what was read back is not what was written", fix="check the disk")
    check_tensors(found, {n: tuple(t.shape) for n, t in tensors.items()}, str(directory / "model.safetensors"))
    for name, tensor in tensors.items():
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor):
            raise EyasError(f"{directory}: tensor {name} was not written as it is", fix="check the disk")
    if "d2t" in found:
        check_vocab_map(found["d2t"], found["t2d"], str(directory / "model.safetensors"))


def cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype, where: str) -> dict[str, torch.Tensor]:
    """Float tensors in `dtype`, others as they are. Raises EyasError when a value does not fit `dtype`."""
    done = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    for name, tensor in done.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise EyasError(
                f"{where}: {name} does not fit {dtype}: its largest magnitude is {tensors[name].abs().max():.3g}",
                fix="set engine.dtype to bfloat16 or float32",
            )
    return done
