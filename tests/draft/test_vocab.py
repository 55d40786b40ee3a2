"""The draft vocabulary by hand arithmetic, and what is refused."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from eyas.data.schema import HARVESTED
from eyas.draft.vocab import build_vocab, load_vocab
from eyas.errors import EyasError, InputError
from eyas.rundir import RunDir


def write_samples(run: RunDir, samples: list[tuple[str, list[int], list[int]]]) -> None:
    rows = [
        {
            "id": f"{i}/0",
            "conversation": str(i),
            "turn": 0,
            "source": "",
            "split": split,
            "token_ids": tokens,
            "prompt_length": 1,
            "loss_mask": [bool(m) for m in mask],
            "logprobs": [],
            "finish_reason": "stop",
            "shard": "s",
            "index": i,
            "rows": len(tokens) - 1,
            "supervised": sum(mask),
        }
        for i, (split, tokens, mask) in enumerate(samples)
    ]
    run.samples.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=HARVESTED), run.samples / "part.parquet")


def test_by_hand(tmp_path: Path):
    run = RunDir(tmp_path)
    # supervised in training: 7 three times, 5 twice, 9 once; 8 only unsupervised, 3 only held out
    write_samples(
        run,
        [
            ("train", [8, 8, 7, 5, 7], [0, 0, 1, 1, 1]),
            ("train", [8, 9, 7, 5], [0, 1, 1, 1]),
            ("holdout", [8, 3, 7, 7, 7], [0, 1, 1, 1, 1]),
        ],
    )
    counts = build_vocab(run, 10, 2)
    assert counts["supervised_tokens"] == 6
    assert counts["distinct_tokens"] == 3
    assert counts["coverage"] == 5 / 6
    assert counts["coverage_holdout"] == 3 / 4
    vocab = load_vocab(run)
    assert vocab.target_ids.tolist() == [5, 7]
    assert vocab.d2t.tolist() == [5, 6]
    assert vocab.t2d.nonzero().flatten().tolist() == [5, 7]
    assert vocab.coverage == 5 / 6


def test_larger_than_what_was_seen_is_filled_up(tmp_path: Path):
    run = RunDir(tmp_path)
    write_samples(run, [("train", [8, 9, 7], [0, 1, 1])])
    build_vocab(run, 10, 4)
    assert load_vocab(run).target_ids.tolist() == [0, 1, 7, 9]
    build_vocab(run, 10, 10)
    assert load_vocab(run).d2t.tolist() == [0] * 10


def test_larger_than_the_targets_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"draft\.vocab_size is 11.*only 10 tokens"):
        build_vocab(RunDir(tmp_path), 10, 11)


def test_nothing_supervised_is_refused(tmp_path: Path):
    run = RunDir(tmp_path)
    write_samples(run, [("train", [8, 9], [0, 0]), ("holdout", [8, 9], [0, 1])])
    with pytest.raises(InputError, match="no supervised token"):
        build_vocab(run, 10, 2)


def test_tokens_of_another_target_are_refused(tmp_path: Path):
    run = RunDir(tmp_path)
    write_samples(run, [("train", [8, 12], [0, 1])])
    with pytest.raises(EyasError, match="token ids from 12 to 12, the target has 10"):
        build_vocab(run, 10, 2)


def test_missing_and_mixed_files_are_refused(tmp_path: Path):
    run = RunDir(tmp_path)
    with pytest.raises(InputError, match="no draft vocabulary"):
        load_vocab(run)
    write_samples(run, [("train", [8, 9, 7], [0, 1, 1])])
    build_vocab(run, 10, 2)
    save_file({"d2t": torch.zeros(2, dtype=torch.int64), "t2d": torch.arange(10) < 2}, run.vocab / "vocab.safetensors")
    with pytest.raises(EyasError, match=r"not the file that vocab\.json describes"):
        load_vocab(run)
