"""The Teacher's distribution is the target's own: compared with transformers' forward pass of each convention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from eyas.target.resolve import resolve_target
from eyas.target.teacher import Teacher

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8),
    "cohere": CohereConfig(**SIZES, logit_scale=0.0625),
    "cohere2": Cohere2Config(**SIZES, logit_scale=0.25),
    "granite": GraniteConfig(**SIZES, logits_scaling=8.0, embedding_multiplier=12.0),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=2),
    "phi": PhiConfig(**{**SIZES, "num_key_value_heads": 4}),
    "qwen3_next": Qwen3NextConfig(
        **SIZES, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip


def last_layer(model: torch.nn.Module) -> torch.nn.Module:
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2]
    return lists[0][-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_targets(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # every weight and bias matters
            around = 1.0 if "norm" in key and "weight" in key and "gemma" not in name else 0.0
            parameter.copy_(around + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    states: list[torch.Tensor] = []
    last_layer(model).register_forward_hook(
        lambda module, args, output: states.append(output[0] if isinstance(output, tuple) else output)
    )
    tokens = torch.arange(3, 43).unsqueeze(0)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits[0]
    info = resolve_target(str(tmp_path))
    state = states[0].reshape(-1, 32)
    found = Teacher(info).logits(state)
    assert found.dtype == torch.float32
    assert float(expected.std()) > 1e-3
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-4), (found - expected).abs().max()
    rows = torch.tensor([4, 90, 17])
    assert torch.allclose(Teacher(info, rows).logits(state), expected[:, rows], atol=1e-5, rtol=1e-4)
    blocks = list(Teacher(info).chunks(state, rows=16))
    assert [b.shape[0] for b in blocks] == [16, 16, 8]
    target = torch.arange(40) % 96
    probs = Teacher(info).log_probs(state, target, rows=16)
    assert torch.allclose(probs, torch.log_softmax(expected, -1)[torch.arange(40), target], atol=1e-4)


FAMILIES = (
    "mixtral", "qwen2", "qwen2_moe", "qwen3_moe", "gemma", "glm4", "glm4_moe", "olmo2", "phi3", "mistral", "starcoder2",
    "stablelm", "gpt_neox", "opt", "mpt", "nemotron", "exaone4", "smollm3", "ernie4_5", "seed_oss", "apertus",
    "granitemoe",
    "lfm2", "arcee", "helium", "vaultgemma", "minimax_m2", "phimoe", "hunyuan_v1_dense", "gpt_oss", "hyperclovax",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    """Roles and conventions of a family, found from its saved files, reproduce its logits from its last state."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    wanted = SIZES | {
        "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "moe_intermediate_size": 16,
        "n_layer": 2,
        "n_layers": 2, "n_head": 4, "n_heads": 4, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    base = AutoConfig.for_model(family)
    changes = {key: value for key, value in wanted.items() if hasattr(base, key) or key.endswith("_token_id")}
    for alias, name in getattr(base, "attribute_map", {}).items():
        if name in changes:
            changes.pop(alias, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    info = resolve_target(str(tmp_path))
    states: list[torch.Tensor] = []
    final_norm = model.get_submodule(info.final_norm.name.removesuffix(".weight"))
    final_norm.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with torch.no_grad():
        expected = model(input_ids=torch.arange(3, 33).unsqueeze(0)).logits[0]
    found = Teacher(info).logits(states[0].reshape(-1, 32))
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-3)
    assert info.vocab_size == model.get_input_embeddings().weight.shape[0]


def test_a_plain_norm_would_be_wrong_on_gemma(tmp_path: Path) -> None:
    """What the 1 + w costs when it is missed: the planted mistake changes the argmax at most positions."""
    from dataclasses import replace

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["gemma3"], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    info = resolve_target(str(tmp_path))
    state = torch.randn(64, 32)
    right, wrong = Teacher(info).logits(state), Teacher(replace(info, norm_plus_one=False)).logits(state)
    assert float((right.argmax(-1) == wrong.argmax(-1)).float().mean()) < 0.5
