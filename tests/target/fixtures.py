"""Tiny random checkpoints in the key layouts of real models; every function writes a directory and returns it.

Other tests import from here: `from target.fixtures import llama, kimi_k25`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]

HIDDEN, MLP, HEADS, KV, HEAD_DIM, LAYERS, VOCAB = 64, 128, 4, 2, 16, 3, 320

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Random:
    """Random tensors from one seed, added to `weights` under their keys."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.weights: Weights = {}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def linear(self, name: str, out: int, inp: int, *, gain: float = 1.0, bias: bool = False) -> None:
        self.weights[f"{name}.weight"] = (self.normal(out, inp) * gain / inp**0.5).to(self.dtype)
        if bias:
            self.weights[f"{name}.bias"] = (self.normal(out) * 0.02).to(self.dtype)

    def norm(self, name: str, width: int, *, around: float = 1.0, bias: bool = False) -> None:
        self.weights[f"{name}.weight"] = (around + 0.1 * self.normal(width)).to(self.dtype)
        if bias:
            self.weights[f"{name}.bias"] = (self.normal(width) * 0.02).to(self.dtype)

    def embedding(self, name: str, rows: int, width: int) -> None:
        self.weights[f"{name}.weight"] = self.normal(rows, width).to(self.dtype)


def write_checkpoint(
    path: Path, config: Config, weights: Weights, *, shards: int = 1, generation: Config | None = None
) -> Path:
    """config.json, generation_config.json and the weights: model.safetensors, or `shards` files with an index."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", generation or {"bos_token_id": 1, "eos_token_id": [2]})
    write_weights(path, weights, shards=shards)
    return path


def write_weights(path: Path, weights: Weights, *, shards: int = 1) -> None:
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    if shards == 1:
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        return
    names = sorted(weights)
    size = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = names[k * size : (k + 1) * size]
        save_file({name: weights[name] for name in part}, path / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in weights.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def edit_config(path: Path, change: Callable[[Config], None]) -> None:
    """Changes a written config.json in place."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    change(config)
    write_json(path / "config.json", config)


def write_tokenizer(
    path: Path,
    *,
    special: tuple[str, ...] = ("<unk>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    bos: str = "<s>",
    eos: str = "<|end|>",
    vocab: int = VOCAB,
    chat_template: str | None = CHAT_TEMPLATE,
    special_first: bool = True,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab` tokens; the special tokens take the first ids, or the last ones."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    text = [f"the capital of country {k} is city {k * 7 % 31}; what is {k} plus {k + 1}?" for k in range(200)]
    first = list(special) if special_first else []
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - (0 if special_first else len(special)),
        special_tokens=first,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text, trainer)
    others = [token for token in special if token not in (bos, eos)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=bos, eos_token=eos, additional_special_tokens=others
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)
    return tokenizer


def dense_config(model_type: str, architecture: str, **changes: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        **changes,
    }


def dense_weights(
    trunk: str = "model.",
    head: str | None = "lm_head",
    *,
    embedding: str = "embed_tokens",
    final_norm: str = "norm",
    around: float = 1.0,
    vocab: int = VOCAB,
    hidden: int = HIDDEN,
    qk_norm: bool = False,
    sandwich: bool = False,
    dtype: torch.dtype = torch.float32,
    random: Random | None = None,
) -> Random:
    """A Llama-like decoder under the key prefix `trunk`; `sandwich` adds Gemma's two further norms a layer."""
    r = random or Random(dtype)
    r.embedding(trunk + embedding, vocab, hidden)
    for layer in range(LAYERS):
        p = f"{trunk}layers.{layer}."
        r.norm(p + "input_layernorm", hidden, around=around)
        r.norm(p + "post_attention_layernorm", hidden, around=around)
        if sandwich:
            r.norm(p + "pre_feedforward_layernorm", hidden, around=around)
            r.norm(p + "post_feedforward_layernorm", hidden, around=around)
        r.linear(p + "self_attn.q_proj", HEADS * HEAD_DIM, hidden)
        r.linear(p + "self_attn.k_proj", KV * HEAD_DIM, hidden)
        r.linear(p + "self_attn.v_proj", KV * HEAD_DIM, hidden)
        r.linear(p + "self_attn.o_proj", hidden, HEADS * HEAD_DIM)
        if qk_norm:
            r.norm(p + "self_attn.q_norm", HEAD_DIM, around=around)
            r.norm(p + "self_attn.k_norm", HEAD_DIM, around=around)
        r.linear(p + "mlp.gate_proj", MLP, hidden)
        r.linear(p + "mlp.up_proj", MLP, hidden)
        r.linear(p + "mlp.down_proj", hidden, MLP)
    r.norm(trunk + final_norm, hidden, around=around)
    if head is not None:
        r.linear(head, vocab, hidden, gain=2.0)
    return r


def llama(path: Path, *, tied: bool = False, shards: int = 1, tokenizer: bool = False, **changes: Any) -> Path:
    config = dense_config("llama", "LlamaForCausalLM", tie_word_embeddings=tied, **changes)
    weights = dense_weights(head=None if tied else "lm_head").weights
    write_checkpoint(path, config, weights, shards=shards)
    if tokenizer:
        write_tokenizer(path)
    return path


def padded_vocabulary(path: Path) -> Path:
    """A Llama whose embedding has 64 more rows than config.json and tokenizer say."""
    write_checkpoint(path, dense_config("llama", "LlamaForCausalLM"), dense_weights(vocab=VOCAB + 64).weights)
    write_tokenizer(path)
    return path


def qwen3(path: Path, *, shards: int = 2) -> Path:
    changes = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": LAYERS}
    config = dense_config("qwen3", "Qwen3ForCausalLM", rms_norm_eps=1e-6, **changes)
    return write_checkpoint(path, config, dense_weights(qk_norm=True).weights, shards=shards)


def vision_tower(r: Random, prefix: str, *, blocks: int = LAYERS, hidden: int = HIDDEN) -> None:
    """A vision tower of the text model's width, with a norm and an embedding whose last key parts are the text's."""
    for k in range(blocks):
        r.norm(f"{prefix}blocks.{k}.norm1", hidden, bias=True)
        r.linear(f"{prefix}blocks.{k}.attn.qkv", 3 * hidden, hidden, bias=True)
    r.norm(prefix + "norm", hidden, bias=True)
    r.embedding(prefix + "embeddings", VOCAB, hidden)
    r.linear(prefix + "merger.mlp.0", hidden, hidden, bias=True)


def qwen3_vl(path: Path) -> Path:
    """`model.language_model.` beside `model.visual.`, sizes under text_config, rope as mrope in the new spelling."""
    text = dense_config("qwen3_vl_text", "unused", rms_norm_eps=1e-6)
    for key in ("architectures", "rope_theta", "tie_word_embeddings", "torch_dtype"):
        del text[key]
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    text["dtype"] = "bfloat16"
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_vl", "hidden_size": HIDDEN, "depth": LAYERS, "out_hidden_size": HIDDEN},
    }
    r = dense_weights("model.language_model.", qk_norm=True, dtype=torch.bfloat16)
    vision_tower(r, "model.visual.")
    return write_checkpoint(path, config, r.weights)


def gemma3(path: Path) -> Path:
    """Nested, tied without saying so, sizes that its class has as defaults left out, norms with 1 + weight."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS},
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    r = dense_weights("language_model.model.", None, around=0.0, qk_norm=True, sandwich=True, dtype=torch.bfloat16)
    vision_tower(r, "vision_tower.vision_model.")
    r.norm("multi_modal_projector.mm_soft_emb_norm", HIDDEN, around=0.0)
    return write_checkpoint(path, config, r.weights)


def deepseek_v3(path: Path, *, fp8_head: bool = False) -> Path:
    """MLA and experts with fp8 block scales, and a next-token-prediction layer with its own embedding, norm
    and head."""
    config = dense_config(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        num_nextn_predict_layers=1,
        num_key_value_heads=HEADS,
        rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0},
        quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
    )
    del config["head_dim"]
    r = Random(torch.bfloat16)
    r.embedding("model.embed_tokens", VOCAB, HIDDEN)
    for layer in range(LAYERS + 1):
        p = f"model.layers.{layer}."
        r.norm(p + "input_layernorm", HIDDEN)
        r.linear(p + "self_attn.kv_a_proj_with_mqa", 40, HIDDEN)
        for expert in range(4):
            _fp8_block(r, f"{p}mlp.experts.{expert}.down_proj", HIDDEN, MLP)
    p = f"model.layers.{LAYERS}."  # the next-token-prediction layer
    r.embedding(p + "embed_tokens", VOCAB, HIDDEN)
    r.norm(p + "shared_head.norm", HIDDEN)
    r.linear(p + "shared_head.head", VOCAB, HIDDEN)
    r.norm("model.norm", HIDDEN)
    if fp8_head:
        _fp8_block(r, "lm_head", VOCAB, HIDDEN)
    else:
        r.linear("lm_head", VOCAB, HIDDEN)
    return write_checkpoint(path, config, r.weights, shards=2)


def _fp8_block(r: Random, name: str, out: int, inp: int) -> None:
    r.weights[f"{name}.weight"] = (r.normal(out, inp) * 100).to(torch.float8_e4m3fn)
    r.weights[f"{name}.weight_scale_inv"] = r.normal(-(-out // 32), -(-inp // 32)).abs() / 100


def gpt_oss(path: Path) -> Path:
    """MXFP4 experts, sliding and full layers in turn."""
    config = dense_config(
        "gpt_oss",
        "GptOssForCausalLM",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_theta=150000,
        rope_scaling={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )  # fmt: skip
    r = Random(torch.bfloat16)
    r.embedding("model.embed_tokens", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        r.norm(p + "input_layernorm", HIDDEN)
        r.linear(p + "self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN, bias=True)
        r.weights[p + "mlp.experts.gate_up_proj_blocks"] = torch.zeros(4, 2 * MLP, HIDDEN // 32, 16, dtype=torch.uint8)
        r.weights[p + "mlp.experts.gate_up_proj_scales"] = torch.zeros(4, 2 * MLP, HIDDEN // 32, dtype=torch.uint8)
    r.norm("model.norm", HIDDEN)
    r.linear("lm_head", VOCAB, HIDDEN)
    return write_checkpoint(path, config, r.weights, shards=2)


def nemotron_h(path: Path) -> Path:
    """`backbone.` keys, `embeddings` and `norm_f`, Mamba and attention layers in one pattern."""
    config = dense_config("nemotron_h", "NemotronHForCausalLM", hybrid_override_pattern="M*-", layer_norm_epsilon=1e-5)
    del config["rms_norm_eps"], config["rope_theta"], config["num_hidden_layers"]
    r = Random(torch.bfloat16)
    r.embedding("backbone.embeddings", VOCAB, HIDDEN)
    for layer, kind in enumerate("M*-"):
        p = f"backbone.layers.{layer}."
        r.norm(p + "norm", HIDDEN)
        if kind == "M":
            r.linear(p + "mixer.in_proj", 2 * HIDDEN, HIDDEN)
            r.norm(p + "mixer.norm", HIDDEN)
        else:
            r.linear(p + "mixer.up_proj", MLP, HIDDEN)
    r.norm("backbone.norm_f", HIDDEN)
    r.linear("lm_head", VOCAB, HIDDEN)
    return write_checkpoint(path, config, r.weights)


def gpt2(path: Path) -> Path:
    """`wte`, `h`, `ln_f` without a prefix, tied, the sizes under their old names."""
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": HIDDEN, "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 256, "vocab_size": VOCAB, "layer_norm_epsilon": 1e-5, "eos_token_id": 2,
    }  # fmt: skip
    r = Random()
    r.embedding("wte", VOCAB, HIDDEN)
    r.embedding("wpe", 256, HIDDEN)
    for layer in range(LAYERS):
        r.norm(f"h.{layer}.ln_1", HIDDEN, bias=True)
        r.linear(f"h.{layer}.attn.c_attn", HIDDEN, 3 * HIDDEN, bias=True)
    r.norm("ln_f", HIDDEN, bias=True)
    return write_checkpoint(path, config, r.weights)


def consolidated(path: Path) -> Path:
    """`tok_embeddings` and `output` beside `layers`, as in the first Llama release and InternLM."""
    r = dense_weights("model.", "output", embedding="tok_embeddings")
    return write_checkpoint(path, dense_config("internlm2", "InternLM2ForCausalLM"), r.weights)


def qwen3_omni(path: Path) -> Path:
    """A thinker and a talker, both with a decoder of the same width and depth."""
    text = dense_config("qwen3_omni_moe_text", "unused")
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "text_config": text,
            "vision_config": {"hidden_size": 32},
        },
        "talker_config": {"model_type": "qwen3_omni_moe_talker", "text_config": {**text, "vocab_size": 96}},
    }
    r = dense_weights("thinker.model.", "thinker.lm_head", qk_norm=True, dtype=torch.bfloat16)
    dense_weights("talker.model.", "talker.codec_head", vocab=96, qk_norm=True, random=r)
    vision_tower(r, "thinker.visual.")
    return write_checkpoint(path, config, r.weights)
