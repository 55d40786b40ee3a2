"""The store: light references, lazily opened shards, and no trust in a shard that is about other tokens."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from eyas.data.schema import HARVESTED
from eyas.errors import EyasError, InputError, ProofError
from eyas.rundir import RunDir
from eyas.states import store as module
from eyas.states.shard import ShardSample, write_shard
from eyas.states.store import HarvestStore

LAYERS, HIDDEN = [1, 2], 4


def states_of(shard: int, index: int, rows: int) -> torch.Tensor:
    return (torch.arange(rows * 8).reshape(rows, 2, HIDDEN) + 1000.0 * shard + 100.0 * index).to(torch.float32)


def make(root: Path, shards: int = 3, per_shard: int = 2) -> RunDir:
    run = RunDir(root)
    run.samples.mkdir(parents=True)
    for s in range(shards):
        samples, rows = [], []
        for i in range(per_shard):
            n = 5 + s + i
            ids = [100 * s + 10 * i + k for k in range(n)]
            # a kept sample's shard has one more row than is used: the engine consumed the last token too
            samples.append(ShardSample(states_of(s, i, n), torch.tensor([*ids, 7]), n, 0))
            mask = [k >= 3 for k in range(n)]
            rows.append(
                {
                    "id": f"c{s}{i}/0", "conversation": f"c{s}{i}", "turn": 0, "source": "x",
                    "split": "train" if i == 0 else "holdout", "token_ids": ids, "prompt_length": 3,
                    "loss_mask": mask, "logprobs": [-0.5 * k for k in range(n - 3)], "finish_reason": "kept",
                    "shard": f"s{s}.safetensors", "index": i, "rows": n - 1, "supervised": n - 3,
                }
            )  # fmt: skip
        write_shard(run.states / f"s{s}.safetensors", LAYERS, samples, ["r"] * per_shard)
        pq.write_table(pa.Table.from_pylist(rows, schema=HARVESTED), run.samples / f"s{s}.parquet")
    (run.samples / "prepared.parquet").write_bytes(b"not read by the store")
    return run


def test_references_and_samples(tmp_path: Path) -> None:
    store = HarvestStore(make(tmp_path))
    train, held_out = store.samples("train"), store.samples("holdout")
    assert [r.id for r in train] == ["c00/0", "c10/0", "c20/0"]
    assert [r.id for r in held_out] == ["c01/0", "c11/0", "c21/0"]
    ref = held_out[1]
    assert (ref.tokens, ref.rows, ref.supervised, ref.prompt_length) == (7, 6, 4, 3)
    sample = store.load(ref)
    assert sample.token_ids.tolist() == [110, 111, 112, 113, 114, 115, 116]
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 4
    assert sample.logprobs.tolist() == [0.0, -0.5, -1.0, -1.5]
    assert torch.equal(sample.states, states_of(1, 1, 7)[:6])
    assert store.layers() == LAYERS
    assert [t.id for t in store.all_tokens("holdout")] == [r.id for r in held_out]


def test_open_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_SHARDS", 2)
    monkeypatch.setattr(module, "OPEN_PARTS", 1)
    store = HarvestStore(make(tmp_path, shards=6))
    for ref in [*store.samples(), *reversed(store.samples())]:
        assert store.load(ref).states.shape == (ref.rows, 2, HIDDEN)
        assert len(store._shard._values) <= 2
        assert len(store._table._values) <= 1


def test_a_shard_of_other_tokens_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path)
    (run.states / "s0.safetensors").write_bytes((run.states / "s2.safetensors").read_bytes())
    store = HarvestStore(run)
    with pytest.raises(ProofError, match=r"states/s0\.safetensors, sample 0: its tokens are not those of sample c00/0"):
        store.load(store.samples()[0])


def test_a_torn_shard_and_a_torn_part_are_named(tmp_path: Path) -> None:
    run = make(tmp_path)
    shard, part = run.states / "s1.safetensors", run.samples / "s2.parquet"
    shard.write_bytes(shard.read_bytes()[:-10])
    store = HarvestStore(run)
    with pytest.raises(EyasError, match=r"s1\.safetensors is not a whole file"):
        store.load(store.samples()[2])
    part.write_bytes(part.read_bytes()[:-10])
    with pytest.raises(EyasError, match=r"s2\.parquet is not a whole file"):
        HarvestStore(run).samples()


def test_before_a_harvest(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(InputError, match="holds no harvested samples"):
        HarvestStore(run).samples()
