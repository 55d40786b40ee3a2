"""The tiny Kimi-K2.5: resolved right, and its last states give transformers' own logits through the Teacher."""

from pathlib import Path

import pytest
import torch

from eyas.target.resolve import resolve_target
from eyas.target.teacher import Teacher
from eyas.target.tokenizer import load_tokenizer
from target.tiny_kimi import SPECIAL, Sizes, kimi_k25


@pytest.mark.parametrize("int4", [False, True])
def test_resolution(tmp_path: Path, int4: bool) -> None:
    info = resolve_target(str(kimi_k25(tmp_path, int4=int4)))
    assert info.architecture == "KimiK25ForConditionalGeneration"
    assert info.text_architecture == "DeepseekV3ForCausalLM"
    assert info.embedding.name == "language_model.model.embed_tokens.weight"
    assert info.head.name == "language_model.lm_head.weight"
    assert info.final_norm.name == "language_model.model.norm.weight"
    assert info.trunk == "language_model.model."
    assert (info.hidden_size, info.num_hidden_layers, info.vocab_size) == (128, 4, 1024)
    assert info.attention == "mla"
    assert (info.num_attention_heads, info.head_dim) == (4, 64)
    assert info.rope_parameters["rope_type"] == "yarn"
    assert info.thinking_tokens == ("<think>", "</think>")
    assert len(info.eos_token_ids) == 2
    assert info.experts == 8
    if int4:
        assert info.quantization == "compressed-tensors int4"
        assert info.quantized is not None
        assert info.quantized.tensors == 3 * 8 * 3  # layers, experts, projections
        assert all(".experts.*." in target for target in info.quantized.targets)
    else:
        assert info.quantization is None


def test_tokenizer_renders(tmp_path: Path) -> None:
    info = resolve_target(str(kimi_k25(tmp_path)))
    tokenizer = load_tokenizer(info)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what is 2 plus 3?"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.convert_ids_to_tokens(ids)[-1] == "<think>"
    assert max(ids) < info.vocab_size
    assert all(tokenizer.convert_tokens_to_ids(t) < Sizes().vocab for t in SPECIAL)


@pytest.mark.parametrize("int4", [False, True])
def test_teacher_is_transformers(tmp_path: Path, int4: bool) -> None:
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    path = kimi_k25(tmp_path, int4=int4)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    last: list[torch.Tensor] = []
    model.model.language_model.layers[-1].register_forward_hook(
        lambda module, args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        expected = model(input_ids=torch.arange(20, 60).unsqueeze(0)).logits[0]
    found = Teacher(resolve_target(str(path))).logits(last[0].reshape(-1, Sizes().hidden))
    assert torch.allclose(found, expected, atol=2e-5)
