"""The draft vocabulary: the target tokens that are supervised most often, as `d2t` offsets and a `t2d` mask."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from eyas.data.parts import part_batches
from eyas.data.schema import LEFT_OUT, part_files
from eyas.errors import EyasError, InputError
from eyas.files import file_fingerprint, read_json, write_json, written_aside
from eyas.rundir import RunDir

ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Vocab:
    """d2t int64 [draft], an offset: target id = draft id + d2t[draft id]; t2d bool [target]."""

    d2t: torch.Tensor
    t2d: torch.Tensor
    coverage: float
    """share of the supervised training tokens that lie in the draft vocabulary"""
    fingerprint: str

    @property
    def size(self) -> int:
        return self.d2t.numel()

    @property
    def target_ids(self) -> torch.Tensor:
        """[draft] int64, ascending: the target id of each draft id."""
        return torch.arange(self.size) + self.d2t


def build_vocab(run: RunDir, target_vocab_size: int, draft_vocab_size: int) -> dict[str, Any]:
    """Counts the supervised tokens of the training split and writes vocab/; returns what vocab.json holds.

    Raises InputError when the draft vocabulary is larger than the target's or nothing is supervised.
    """
    if draft_vocab_size > target_vocab_size:
        raise InputError(
            f"draft.vocab_size is {draft_vocab_size:,}, but the target has only {target_vocab_size:,} tokens",
            fix=f"set draft.vocab_size to at most {target_vocab_size}",
        )
    counts = {"train": np.zeros(target_vocab_size, np.int64), "holdout": np.zeros(target_vocab_size, np.int64)}
    for path in part_files(run.samples):
        for split, supervised in _supervised(path):
            if supervised.size and not 0 <= supervised.min() <= supervised.max() < target_vocab_size:
                raise EyasError(
                    f"{path}: token ids from {supervised.min()} to {supervised.max()}, the target has "
                    f"{target_vocab_size:,} tokens",
                    fix="the samples belong to another target: use another run_dir",
                )
            np.add.at(counts[split], supervised, 1)
    seen = counts["train"]
    if not seen.any():
        raise InputError(
            f"{run.samples} has no supervised token in the training split", fix="harvest samples with answers first"
        )
    distribution = {int(i): int(seen[i]) for i in seen.nonzero()[0]}
    d2t, t2d = build_vocab_mappings_from_distribution(distribution, draft_vocab_size, target_vocab_size)
    chosen = t2d.numpy()
    tensors = run.vocab / "vocab.safetensors"
    with written_aside(tensors) as aside:
        save_file({"d2t": d2t, "t2d": t2d}, aside)
    held_out = counts["holdout"]
    counted = {
        "size": draft_vocab_size,
        "coverage": float(seen[chosen].sum() / seen.sum()),
        "coverage_holdout": float(held_out[chosen].sum() / held_out.sum()) if held_out.any() else None,
        "supervised_tokens": int(seen.sum()),
        "distinct_tokens": len(distribution),
        "fingerprint": file_fingerprint(tensors),
    }
    write_json(run.vocab / "vocab.json", counted)
    return counted


def load_vocab(run: RunDir) -> Vocab:
    """Reads vocab/. Raises InputError when it is not there, EyasError when its two files do not belong together."""
    tensors, described = run.vocab / "vocab.safetensors", run.vocab / "vocab.json"
    for path in (tensors, described):
        if not path.is_file():
            raise InputError(f"no draft vocabulary: {path} is missing", fix="run `eyas vocab RECIPE` first")
    try:
        loaded, about = load_file(tensors), read_json(described)
        d2t, t2d = loaded["d2t"], loaded["t2d"]
        coverage, fingerprint = float(about["coverage"]), str(about["fingerprint"])
    except (SafetensorError, KeyError, ValueError, TypeError) as e:
        raise EyasError(f"{run.vocab} is damaged: {e}", fix="delete it and run `eyas vocab RECIPE`") from None
    if fingerprint != file_fingerprint(tensors):
        raise EyasError(
            f"{tensors} is not the file that {described.name} describes", fix="delete both and run `eyas vocab RECIPE`"
        )
    if not torch.equal(torch.arange(d2t.numel()) + d2t, t2d.nonzero().flatten()):
        raise EyasError(f"{tensors}: d2t and t2d disagree", fix="delete vocab/ and run `eyas vocab RECIPE`")
    return Vocab(d2t, t2d, coverage, fingerprint)


def _supervised(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(split, supervised token ids) of each sample, a bounded number of rows in memory."""
    for batch in part_batches(path, ["split", "token_ids", "loss_mask"], ROWS_AT_ONCE):
        splits, ids, masks = (batch.column(i) for i in range(3))
        for i in range(batch.num_rows):
            if splits[i].as_py() in LEFT_OUT:
                continue
            tokens = ids[i].values.to_numpy(zero_copy_only=False)
            yield splits[i].as_py(), tokens[masks[i].values.to_numpy(zero_copy_only=False)]
