"""A tiny Kimi-K2.5 with random weights in the released key layout, which vLLM and transformers can run on a CPU.

The released model: `KimiK25ForConditionalGeneration` around a DeepSeek-V3 language model (MLA, sigmoid-routed experts,
yarn) under `text_config` and `language_model.`, a vision tower under `vision_tower.`, a projector beside it.
What cannot shrink: vLLM's CPU MLA kernel wants `kv_lora_rank` 512 and `qk_rope_head_dim` 64.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from target.fixtures import Config, Random, write_checkpoint, write_json, write_tokenizer

SPECIAL = (
    "[UNK]", "[BOS]", "[EOS]", "[PAD]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
    "<|im_middle|>",
    "<think>", "</think>", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>",
)  # fmt: skip

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>"
    "{% if m['role'] == 'assistant' %}<think>{{ m.get('reasoning_content') or '' }}</think>{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>{% endif %}"
)


@dataclass(frozen=True)
class Sizes:
    """The text model's sizes; everything not listed is derived as in the released model."""

    hidden: int = 128
    mlp: int = 256
    expert_mlp: int = 64
    heads: int = 4
    experts: int = 8
    experts_per_token: int = 2
    layers: int = 4
    vocab: int = 1024
    q_lora: int = 64
    kv_lora: int = 512
    nope: int = 64
    rope: int = 64
    value: int = 64
    vision: int = 64
    vision_mlp: int = 96
    vision_layers: int = 2


def kimi_k25(path: Path, *, int4: bool = False, dtype: torch.dtype = torch.float32, sizes: Sizes | None = None) -> Path:
    """Writes checkpoint, tokenizer and preprocessor config; `int4` packs the experts as the released
    checkpoint does."""
    sizes = sizes or Sizes()
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(
        path, special=SPECIAL, bos="[BOS]", eos="[EOS]", vocab=sizes.vocab - 15, chat_template=CHAT_TEMPLATE
    )
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in SPECIAL}
    config = kimi_config(sizes, ids, str(dtype).removeprefix("torch."), int4=int4)
    generation = {"bos_token_id": ids["[BOS]"], "eos_token_id": [ids["[EOS]"], ids["<|im_end|>"]]}
    write_checkpoint(path, config, kimi_weights(sizes, dtype, int4=int4), shards=2, generation=generation)
    write_json(path / "preprocessor_config.json", preprocessor_config())
    return path


def kimi_config(sizes: Sizes, ids: dict[str, int], dtype: str, *, int4: bool) -> Config:
    special = {"bos_token_id": ids["[BOS]"], "eos_token_id": ids["[EOS]"], "pad_token_id": ids["[PAD]"]}
    text: Config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **special,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "dtype": dtype,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initializer_range": 0.02,
        "intermediate_size": sizes.mlp,
        "kv_lora_rank": sizes.kv_lora,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": sizes.expert_mlp,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": sizes.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": sizes.heads,
        "num_experts_per_tok": sizes.experts_per_token,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": sizes.q_lora,
        "qk_nope_head_dim": sizes.nope,
        "qk_rope_head_dim": sizes.rope,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": sizes.value,
        "vocab_size": sizes.vocab,
    }
    if int4:
        text["quantization_config"] = int4_config()
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        **special,
        "dtype": dtype,
        "ignore_index": -100,
        "image_token_id": ids["<|media_pad|>"],
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "projection_hidden_size": sizes.vision,
        "text_config": text,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": vision_config(sizes),
    }


def int4_config() -> Config:
    """The released model's compressed-tensors entry; the last two patterns let transformers run it on a CPU."""
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def vision_config(sizes: Sizes) -> Config:
    """Both spellings: the released file's `vt_*`, and the names that transformers and vLLM read."""
    old = {
        "vt_hidden_size": sizes.vision,
        "vt_intermediate_size": sizes.vision_mlp,
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": sizes.vision_layers,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "mm_hidden_size": sizes.vision,
        "text_hidden_size": sizes.hidden,
    }
    new = {
        "model_type": "kimi_k25_vision",
        "hidden_size": sizes.vision,
        "intermediate_size": sizes.vision_mlp,
        "num_attention_heads": 2,
        "num_hidden_layers": sizes.vision_layers,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "pos_emb_time": 4,
    }
    shared: dict[str, Any] = {
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "video_attn_type": "spatial_temporal",
    }
    return {**old, **new, **shared}


def preprocessor_config() -> Config:
    """vLLM wants one with `media_proc_cfg`, even for text alone."""
    return {
        "auto_map": {},
        "media_proc_cfg": {
            "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "in_patch_limit": 64,
            "in_patch_limit_each_frame": 16,
            "in_patch_limit_video": 64,
            "max_num_frames_each_video": None,
            "merge_kernel_size": 2,
            "patch_limit_on_one_side": 8,
            "patch_size": 14,
            "sample_fps": 2.0,
            "temporal_merge_kernel_size": 4,
            "timestamp_mode": "hh:mm:ss.fff",
        },
        "media_processor_type": "kimi_k25",
    }


def kimi_weights(sizes: Sizes, dtype: torch.dtype, *, int4: bool) -> dict[str, torch.Tensor]:
    r = Random(dtype)
    r.embedding("language_model.model.embed_tokens", sizes.vocab, sizes.hidden)
    r.linear("language_model.lm_head", sizes.vocab, sizes.hidden, gain=2.0)
    r.norm("language_model.model.norm", sizes.hidden)
    for layer in range(sizes.layers):
        prefix = f"language_model.model.layers.{layer}."
        r.norm(prefix + "input_layernorm", sizes.hidden)
        r.norm(prefix + "post_attention_layernorm", sizes.hidden)
        _attention(r, prefix + "self_attn.", sizes)
        _mlp(r, prefix + "mlp.", sizes, dense=layer < 1, int4=int4)
    _vision(r, sizes)
    return r.weights


def _attention(r: Random, prefix: str, sizes: Sizes) -> None:
    """Multi-head latent attention: low-rank queries, one latent and one rotary key shared by all heads."""
    r.linear(prefix + "q_a_proj", sizes.q_lora, sizes.hidden)
    r.norm(prefix + "q_a_layernorm", sizes.q_lora)
    r.linear(prefix + "q_b_proj", sizes.heads * (sizes.nope + sizes.rope), sizes.q_lora)
    r.linear(prefix + "kv_a_proj_with_mqa", sizes.kv_lora + sizes.rope, sizes.hidden)
    r.norm(prefix + "kv_a_layernorm", sizes.kv_lora)
    r.linear(prefix + "kv_b_proj", sizes.heads * (sizes.nope + sizes.value), sizes.kv_lora)
    r.linear(prefix + "o_proj", sizes.hidden, sizes.heads * sizes.value)


def _mlp(r: Random, prefix: str, sizes: Sizes, *, dense: bool, int4: bool) -> None:
    def projections(owner: str, width: int, *, packed: bool = False) -> None:
        for name, out, inp in (
            ("gate_proj", width, sizes.hidden),
            ("up_proj", width, sizes.hidden),
            ("down_proj", sizes.hidden, width),
        ):
            if packed:
                pack_int4(r, owner + name, out, inp)
            else:
                r.linear(owner + name, out, inp)

    if dense:
        projections(prefix, sizes.mlp)
        return
    r.linear(prefix + "gate", sizes.experts, sizes.hidden)
    r.weights[prefix + "gate.e_score_correction_bias"] = 0.1 * r.normal(sizes.experts)  # float32 in any checkpoint
    projections(prefix + "shared_experts.", sizes.expert_mlp)
    for expert in range(sizes.experts):
        projections(f"{prefix}experts.{expert}.", sizes.expert_mlp, packed=int4)


def pack_int4(r: Random, name: str, out: int, inp: int, *, group: int = 32) -> None:
    """A weight in compressed-tensors' pack-quantized format: eight signed 4-bit values + 8 a word, lowest
    bits first."""
    weight = (r.normal(out, inp) / inp**0.5).view(out, inp // group, group)
    scale = (weight.abs().amax(-1) / 7).to(torch.bfloat16)
    nibbles = (weight / scale.float().unsqueeze(-1)).round().clamp(-8, 7).long().view(out, inp // 8, 8) + 8
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    r.weights[f"{name}.weight_packed"] = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    r.weights[f"{name}.weight_scale"] = scale
    r.weights[f"{name}.weight_shape"] = torch.tensor([out, inp], dtype=torch.int32)


def _vision(r: Random, sizes: Sizes) -> None:
    wide = 4 * sizes.vision  # the projector sees 2 x 2 merged patches
    r.norm("mm_projector.pre_norm", sizes.vision, bias=True)
    r.linear("mm_projector.proj.0", wide, wide, bias=True)
    r.linear("mm_projector.proj.2", sizes.hidden, wide, bias=True)
    for k in range(sizes.vision_layers):
        prefix = f"vision_tower.encoder.blocks.{k}."
        r.norm(prefix + "norm0", sizes.vision, bias=True)
        r.norm(prefix + "norm1", sizes.vision, bias=True)
        r.linear(prefix + "wqkv", 3 * sizes.vision, sizes.vision, bias=True)
        r.linear(prefix + "wo", sizes.vision, sizes.vision, bias=True)
        r.linear(prefix + "mlp.fc0", sizes.vision_mlp, sizes.vision, bias=True)
        r.linear(prefix + "mlp.fc1", sizes.vision, sizes.vision_mlp, bias=True)
    r.norm("vision_tower.encoder.final_layernorm", sizes.vision, bias=True)
    r.weights["vision_tower.patch_embed.pos_emb.weight"] = r.normal(8, 8, sizes.vision).to(r.dtype)
    r.weights["vision_tower.patch_embed.proj.weight"] = (0.02 * r.normal(sizes.vision, 3, 14, 14)).to(r.dtype)
    r.weights["vision_tower.patch_embed.proj.bias"] = torch.zeros(sizes.vision, dtype=r.dtype)
