"""Reads a harvest: light references to its samples, and one sample's tokens and hidden states at a time."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa
import torch

from eyas.data.parts import AGAIN, read_part
from eyas.data.schema import LEFT_OUT, part_files
from eyas.errors import EyasError, InputError, ProofError
from eyas.rundir import RunDir
from eyas.states.shard import Shard

OPEN_SHARDS = 32
"""memory-mapped shards kept open at once"""
OPEN_PARTS = 8
"""sample files kept in memory at once"""

_LIGHT = ["id", "split", "prompt_length", "supervised", "rows", "shard", "index"]
_HEAVY = ["token_ids", "loss_mask", "logprobs"]


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where one sample lies and how large it is; `tokens` = rows + 1."""

    id: str
    split: str
    tokens: int
    prompt_length: int
    supervised: int
    rows: int
    shard: str
    index: int
    part: int
    """number of the sample file in name order"""
    row: int
    """row inside that sample file"""


@dataclass(frozen=True)
class Sample:
    """token_ids [n] int64, loss_mask [n] bool, states [n - 1, layers, hidden] as stored, logprobs [supervised]."""

    id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Tokens:
    """A sample without its states: token_ids [n] int64, loss_mask [n] bool, logprobs [supervised] float32."""

    id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor


K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The most recently used values of `make(key)`, at most `size` of them."""

    def __init__(self, make: Callable[[K], V], size: int) -> None:
        self._make, self._size = make, size
        self._values: OrderedDict[K, V] = OrderedDict()

    def __call__(self, key: K) -> V:
        if key in self._values:
            self._values.move_to_end(key)
        else:
            self._values[key] = self._make(key)
            if len(self._values) > self._size:
                self._values.popitem(last=False)
        return self._values[key]


class HarvestStore:
    """The committed samples of a run directory, without dropped answers. Opens nothing until asked; holds a bounded
    number of files.

    Not thread-safe and not fork-safe once a file is open: give each worker its own.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.parts = part_files(run.samples)
        self._shard: Recent[str, Shard] = Recent(lambda name: Shard(run.states / name), OPEN_SHARDS)
        self._table: Recent[int, pa.Table] = Recent(lambda part: read_part(self.parts[part], _HEAVY), OPEN_PARTS)

    def samples(self, split: str | None = None) -> list[SampleRef]:
        """References of one split ("train", "holdout") or of all, by id: files have random names, and what is made of
        the same samples is to be the same. Raises InputError before a harvest."""
        refs = [ref for part in range(len(self.parts)) for ref in self._refs(part) if split in (None, ref.split)]
        if not self.parts:
            raise InputError(f"{self.run.samples} holds no harvested samples", fix="run the harvest stage first")
        return sorted(refs, key=lambda ref: ref.id)

    def layers(self) -> list[int]:
        """The captured layers, ascending; the last one is the state before the final norm."""
        first = self.samples()[0]
        return self._shard(first.shard).layers

    def load(self, ref: SampleRef) -> Sample:
        """Tokens and states of one sample. Raises ProofError if the shard is not about the row's own tokens."""
        tokens = self.tokens(ref)
        stored = self._shard(ref.shard).sample(ref.index)
        n = ref.rows + 1
        if len(stored.tokens) < n or not torch.equal(stored.tokens[:n], tokens.token_ids):
            raise ProofError(
                f"states/{ref.shard}, sample {ref.index}: its tokens are not those of sample {ref.id} "
                f"in {self.parts[ref.part].name}",
                fix="the run directory mixes two harvests: delete its samples/ and states/ and harvest again",
            )
        return Sample(ref.id, tokens.token_ids, tokens.loss_mask, stored.states[: ref.rows], tokens.logprobs)

    def tokens(self, ref: SampleRef) -> Tokens:
        """Tokens of one sample, without touching its shard. Raises EyasError on a row that contradicts itself."""
        row = self._table(ref.part).slice(ref.row, 1)
        ids, mask, logprobs = (row.column(name).combine_chunks().flatten() for name in _HEAVY)
        if len(ids) != ref.rows + 1 or len(mask) != len(ids) or len(logprobs) != ref.supervised:
            raise EyasError(
                f"{self.parts[ref.part]}, row {ref.row} ({ref.id}): {len(ids)} tokens, {len(mask)} mask entries, "
                f"{len(logprobs)} log probabilities for {ref.rows} rows and {ref.supervised} supervised tokens",
                fix=AGAIN,
            )
        return Tokens(
            ref.id,
            torch.tensor(ids.to_numpy(zero_copy_only=False), dtype=torch.int64),
            torch.tensor(mask.to_numpy(zero_copy_only=False), dtype=torch.bool),
            torch.tensor(logprobs.to_numpy(zero_copy_only=False), dtype=torch.float32),
        )

    def all_tokens(self, split: str | None = None) -> Iterator[Tokens]:
        """Every sample's tokens in file order, one sample file in memory at a time."""
        for part in range(len(self.parts)):
            for ref in self._refs(part):
                if split in (None, ref.split):
                    yield self.tokens(ref)

    def _refs(self, part: int) -> Iterator[SampleRef]:
        columns = read_part(self.parts[part], _LIGHT).to_pydict()
        values = zip(*(columns[name] for name in _LIGHT), strict=True)
        for row, (id_, split, prompt, supervised, rows, shard, index) in enumerate(values):
            if split not in LEFT_OUT:
                yield SampleRef(id_, split, rows + 1, prompt, supervised, rows, shard, index, part, row)
