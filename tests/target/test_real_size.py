"""Kimi-K2.5 in its real sizes, without its weights: written in seconds, resolved from 208,000 headers in a second."""

import time
from pathlib import Path

import pytest

from eyas.errors import InputError
from eyas.target.resolve import resolve_target
from eyas.target.safetensors_files import open_checkpoint
from target.skeleton import kimi_k25_real_size


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kimi_k25_real_size(tmp_path_factory.mktemp("kimi"))


def test_resolution(kimi: Path) -> None:
    start = time.process_time()
    info = resolve_target(str(kimi))
    assert time.process_time() - start < 5
    assert (info.hidden_size, info.num_hidden_layers, info.vocab_size) == (7168, 61, 163840)
    assert (info.num_attention_heads, info.head_dim, info.intermediate_size) == (64, 128, 18432)
    assert info.experts == 384
    assert info.attention == "mla"
    assert info.quantization == "compressed-tensors int4"
    assert info.quantized is not None
    assert info.quantized.tensors == 60 * 384 * 3
    assert info.max_position_embeddings == 262144
    assert info.embedding.name == "language_model.model.embed_tokens.weight"
    assert info.head.name == "language_model.lm_head.weight"
    assert info.final_norm.name == "language_model.model.norm.weight"
    assert 590e9 < info.weight_bytes < 600e9
    checkpoint = open_checkpoint(kimi)
    assert len(checkpoint.file_of) > 200_000
    assert len(checkpoint.files) == 64


def test_one_shard_cut(kimi: Path) -> None:
    file = kimi / "model-00040-of-00064.safetensors"
    size = file.stat().st_size
    with open(file, "r+b") as f:
        f.truncate(size - 4096)
    try:
        with pytest.raises(InputError, match=r"model-00040-of-00064\.safetensors is cut short"):
            resolve_target(str(kimi))
    finally:
        with open(file, "r+b") as f:
            f.truncate(size)
