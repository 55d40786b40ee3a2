"""Resolution is right on every layout."""

from pathlib import Path

import pytest

from eyas.target.resolve import resolve_target
from target import fixtures
from target.fixtures import HIDDEN, LAYERS, VOCAB


def names(info: object) -> tuple[str, str, str]:
    return info.embedding.name, info.head.name, info.final_norm.name  # type: ignore[attr-defined]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_llama(tmp_path: Path, tied: bool, shards: int) -> None:
    info = resolve_target(str(fixtures.llama(tmp_path, tied=tied, shards=shards)))
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert names(info) == ("model.embed_tokens.weight", head, "model.norm.weight")
    assert (info.hidden_size, info.num_hidden_layers, info.vocab_size) == (HIDDEN, LAYERS, VOCAB)
    assert info.tied is tied
    assert info.attention == "gqa"
    assert (info.num_attention_heads, info.num_key_value_heads, info.head_dim) == (4, 2, 16)
    assert info.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert info.quantization is None
    assert not info.norm_plus_one
    assert info.eos_token_ids == (2,)
    assert info.text_architecture == info.architecture == "LlamaForCausalLM"


def test_vocabulary_is_the_embeddings_rows(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.padded_vocabulary(tmp_path)))
    assert info.vocab_size == VOCAB + 64
    assert any("rows count" in note for note in info.notes)


def test_qwen3(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.qwen3(tmp_path)))
    assert names(info) == ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    assert info.sliding_window is None  # written, but switched off


def test_qwen3_vl(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.qwen3_vl(tmp_path)))
    prefix = "model.language_model."
    assert names(info) == (prefix + "embed_tokens.weight", "lm_head.weight", prefix + "norm.weight")
    assert info.architecture == "Qwen3VLForConditionalGeneration"
    assert info.hidden_size == HIDDEN
    assert info.rope_parameters["rope_theta"] == 5e6
    assert info.rope_parameters["mrope_section"] == [4, 2, 2]
    assert info.dtype == "bfloat16"


def test_gemma3(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.gemma3(tmp_path)))
    prefix = "language_model.model."
    assert names(info) == (prefix + "embed_tokens.weight", prefix + "embed_tokens.weight", prefix + "norm.weight")
    assert info.text_architecture == "Gemma3ForCausalLM"
    assert info.norm_plus_one
    assert info.embedding_scale == HIDDEN**0.5
    assert info.rope_parameters == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert (info.num_attention_heads, info.num_key_value_heads, info.head_dim) == (8, 4, 256)  # its class's defaults
    assert info.vocab_size == VOCAB
    assert info.eos_token_ids == (1, 2, 106)
    assert info.max_position_embeddings == 131072


def test_deepseek_v3(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.deepseek_v3(tmp_path)))
    assert names(info) == ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    assert info.attention == "mla"
    assert info.head_dim == 16
    assert info.quantization == "fp8 block"
    assert info.quantized is not None
    assert info.quantized.targets == ("model.layers.*.mlp.experts.*.down_proj",)
    assert info.quantized.tensors == 4 * (LAYERS + 1)
    assert info.rope_parameters["rope_type"] == "yarn"
    assert info.rope_parameters["rope_theta"] == 500000.0


def test_gpt_oss(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.gpt_oss(tmp_path)))
    assert info.quantization == "mxfp4"
    assert info.sliding_window == 128
    assert info.attention == "gqa"
    assert info.experts == 4


def test_nemotron_h(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.nemotron_h(tmp_path)))
    assert names(info) == ("backbone.embeddings.weight", "lm_head.weight", "backbone.norm_f.weight")
    assert info.attention == "hybrid"


def test_gpt2(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.gpt2(tmp_path)))
    assert names(info) == ("wte.weight", "wte.weight", "ln_f.weight")
    assert info.norm_kind == "layer"
    assert info.final_norm_bias is not None
    assert info.attention == "mha"


def test_consolidated(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.consolidated(tmp_path)))
    assert names(info) == ("model.tok_embeddings.weight", "output.weight", "model.norm.weight")


def test_thinker_and_not_talker(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.qwen3_omni(tmp_path)))
    assert names(info) == ("thinker.model.embed_tokens.weight", "thinker.lm_head.weight", "thinker.model.norm.weight")
    assert info.vocab_size == VOCAB


def test_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    one = fixtures.llama(tmp_path / "one")
    before = resolve_target(str(one)).fingerprint
    assert before == resolve_target(str(fixtures.llama(tmp_path / "same"))).fingerprint
    weights = fixtures.dense_weights().weights
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    fixtures.write_weights(one, weights)
    assert resolve_target(str(one)).fingerprint != before
