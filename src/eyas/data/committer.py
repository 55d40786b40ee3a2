"""Turns one captured shard and the completions that lie in it into proven, committed samples."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.data.checks import EXACT, Difference, TeacherLike, Tolerance, compare, disagreement, find_fault, tolerance
from eyas.data.committed import Committed
from eyas.data.plan import Asked
from eyas.data.repetition import looped_tokens
from eyas.data.schema import DROPPED
from eyas.data.wanted import Wanted
from eyas.engine.base import Completion
from eyas.engine.vllm_server import LAUNCH_LINE
from eyas.errors import EyasError, InputError
from eyas.files import sync_dir, written_aside
from eyas.states.shard import Shard, ShardSample, write_shard

STORED = {"engine": None, "bf16": torch.bfloat16, "f32": torch.float32}
COMPUTED = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""engine.dtype; auto is the engine's to choose"""


@dataclass
class Settled:
    """What became of one shard: the committed part (None if nothing was good), its ids, and the bad ones with why."""

    part: Path | None = None
    ids: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    proof: Difference = field(default_factory=Difference)
    checked: Difference = field(default_factory=Difference)
    """of all samples, bad ones included"""
    allowed: Tolerance = EXACT


@dataclass(frozen=True)
class _Good:
    sample: ShardSample
    row: dict[str, Any]
    converted: bool
    dropped: bool
    """the recipe does not want it: its row is kept, its states are not"""


class Committer:
    """`settle` may run in a thread of its own: it touches nothing but the shard, the teacher and the new part."""

    def __init__(
        self,
        committed: Committed,
        teacher: TeacherLike,
        hidden: int,
        dtype: str,
        wanted: Wanted = Wanted(),  # noqa: B008 - immutable
        stop_ids: frozenset[int] = frozenset(),
        computed: str = "auto",
    ) -> None:
        self._committed, self._teacher, self._hidden = committed, teacher, hidden
        self._wanted, self._stop_ids = wanted, stop_ids
        self._dtype, self._computed = STORED[dtype], COMPUTED[computed]
        self._states = committed.run.states

    def settle(self, path: Path, completions: list[tuple[Completion, Asked]]) -> Settled:
        """Checks every sample, stores the good ones' states as the recipe asks, proves and commits them.

        Raises InputError for a shard that the server which the recipe means would not write.
        """
        result = Settled()
        try:
            shard = Shard(path)
        except EyasError as e:
            result.bad = {c.id: e.message for c, _ in completions}
            path.unlink(missing_ok=True)
            return result
        if (other := self._other_server(shard)) is not None:
            path.unlink(missing_ok=True)
            raise InputError(f"the server {other}", fix=f"start it with {LAUNCH_LINE}")
        good: list[_Good] = []
        ordered = sorted(completions, key=lambda item: item[0].captured.index if item[0].captured else -1)
        for completion, asked in ordered:
            checked = self._check(shard, completion, asked, result)
            if isinstance(checked, str):
                result.bad[completion.id] = checked
            else:
                good.append(checked)
        if good:
            self._store(shard, good)
            result.ids = [g.row["id"] for g in good]
            result.part = self._committed.commit(path.stem, [g.row for g in good], result.proof, result.allowed)
        else:
            path.unlink(missing_ok=True)
        return result

    def _other_server(self, shard: Shard) -> str | None:
        layers, computed = self._committed.layers, shard.sample(0).states.dtype
        if shard.layers != layers:
            return f"captures layers {shard.layers}, expected {layers}"
        if self._computed not in (None, computed):
            names = [str(dtype).removeprefix("torch.") for dtype in (computed, self._computed)]
            return f"computes in {names[0]}, expected {names[1]} (engine.dtype)"
        return None

    def _check(self, shard: Shard, completion: Completion, asked: Asked, result: Settled) -> _Good | str:
        """The sample's states as they will be stored with its row, or why they are not its states."""
        if completion.captured is None or not 0 <= completion.captured.index < len(shard):
            return f"the engine names sample {completion.captured} of a shard of {len(shard)}"
        if completion.prompt_ids != asked.prompt_ids:
            return "the engine consumed another prompt than it was sent"
        try:
            row = sample_row(completion, asked, self._stop_ids)
        except ValueError as e:
            return str(e)
        stored = shard.sample(completion.captured.index)
        ids: list[int] = row["token_ids"]
        fault = find_fault(stored, ids, len(completion.prompt_ids), len(shard.layers), self._hidden)
        if fault is not None:
            return fault
        states = stored.states[: len(ids) - 1]
        captured_as = states.dtype
        if self._dtype is not None:
            states = states.to(self._dtype)
        positions = [i for i, supervised in enumerate(row["loss_mask"]) if supervised]
        found = compare(self._teacher, states, ids, positions, row["logprobs"])
        result.checked += found
        result.allowed = tolerance(captured_as, states.dtype)
        fault = disagreement(found, result.allowed)
        if fault is not None:
            return fault
        result.proof += found
        dropped = self._wanted.why_not(row["finish_reason"], row["looped"]) is not None
        row |= {"shard": shard.path.name, "index": completion.captured.index}
        if dropped:
            row |= {"split": DROPPED, "shard": "", "index": -1}
        kept = ShardSample(states, stored.tokens[: len(ids)], stored.prompt_length, 0)
        return _Good(kept, row, states.dtype != captured_as, dropped)

    def _store(self, shard: Shard, good: list[_Good]) -> None:
        """Brings the shard to its final place and precision; a rewritten one holds the wanted samples alone."""
        final = self._states / shard.path.name
        stored = [g for g in good if not g.dropped]
        if not stored:
            shard.path.unlink()
            return
        if len(stored) < len(good) or any(g.converted for g in stored):
            names = [g.row["id"] for g in stored]
            write_shard(final, shard.layers, [g.sample for g in stored], names)
            for index, g in enumerate(stored):
                g.row["index"] = index
            if shard.path.resolve() != final.resolve():
                shard.path.unlink()
            return
        if shard.path.resolve() != final.resolve():
            with written_aside(final) as aside:
                shutil.copyfile(shard.path, aside)
            shard.path.unlink()
            return
        with open(final, "rb") as f:  # the engine's rename is not durable by itself
            os.fsync(f.fileno())
        sync_dir(self._states)


def sample_row(completion: Completion, asked: Asked, stop_ids: frozenset[int] = frozenset()) -> dict[str, Any]:
    """The row of HARVESTED, shard and index still open. Raises ValueError when the answer contradicts itself."""
    looped: int | None = None
    if asked.loss_mask is None:
        looped = looped_tokens(completion.output_ids, stop_ids)
        ids = completion.prompt_ids + completion.output_ids
        n, prompt = len(completion.output_ids), len(completion.prompt_ids)
        if n == 0:
            raise ValueError("an answer without tokens")
        mask, logprobs, reason = [False] * prompt + [True] * n, completion.output_logprobs, completion.finish_reason
    else:
        ids, mask, reason = completion.prompt_ids, asked.loss_mask, "kept"
        given = completion.prompt_logprobs
        if given is None or len(given) != len(ids) - 1:
            raise ValueError(f"{len(given or [])} log probabilities for a prompt of {len(ids)} tokens")
        logprobs = [given[i - 1] for i, supervised in enumerate(mask) if supervised]
        prompt = mask.index(True)
    if len(logprobs) != sum(mask):
        raise ValueError(f"{len(logprobs)} log probabilities for {sum(mask)} tokens")
    return {
        "id": completion.id,
        "conversation": asked.conversation,
        "turn": asked.turn,
        "source": asked.source,
        "split": asked.split,
        "token_ids": ids,
        "prompt_length": prompt,
        "loss_mask": mask,
        "logprobs": logprobs,
        "finish_reason": reason,
        "rows": len(ids) - 1,
        "supervised": sum(mask),
        "looped": looped,
    }
