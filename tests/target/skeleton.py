"""Checkpoints of real sizes without their weights: true headers and index, sparse files whose data is a hole."""

import json
import math
from pathlib import Path
from typing import Any

from target.fixtures import Config, write_json, write_tokenizer
from target.tiny_kimi import CHAT_TEMPLATE, SPECIAL, Sizes, kimi_config, preprocessor_config

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""tensor name -> dtype as in a safetensors header, shape"""

_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1, "U8": 1}


def write_skeleton(path: Path, config: Config, shapes: Shapes, *, shards: int) -> Path:
    """Writes config.json, index and `shards` sparse files, each tensor in one of them, in the order of `shapes`."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    names = list(shapes)
    size = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    total = 0
    for k in range(shards):
        file = f"model-{k + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name in names[k * size : (k + 1) * size]:
            dtype, shape = shapes[name]
            start, end = end, end + _BYTES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with open(path / file, "wb") as f:
            f.write(len(raw).to_bytes(8, "little") + raw)
            f.truncate(8 + len(raw) + end)
        total += end
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path


KIMI = Sizes(
    hidden=7168, mlp=18432, expert_mlp=2048, heads=64, experts=384, experts_per_token=8, layers=61,
    vocab=163840, q_lora=1536,
    kv_lora=512, nope=128, rope=64, value=128, vision=1152, vision_mlp=4304, vision_layers=27,
)  # fmt: skip


def kimi_k25_real_size(path: Path) -> Path:
    """Kimi-K2.5 with its released sizes: 61 layers, 384 INT4 experts a layer, over 200,000 tensors in 64 shards."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(
        path, special=SPECIAL, bos="[BOS]", eos="[EOS]", vocab=1000, chat_template=CHAT_TEMPLATE, special_first=False
    )
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in SPECIAL}
    config = kimi_config(KIMI, ids, "bfloat16", int4=True)
    config["text_config"].update(max_position_embeddings=262144)
    config["text_config"]["rope_scaling"].update(original_max_position_embeddings=4096)
    write_skeleton(path, config, _kimi_shapes(KIMI), shards=64)
    write_json(path / "generation_config.json", {"eos_token_id": [ids["[EOS]"], ids["<|im_end|>"]]})
    write_json(path / "preprocessor_config.json", preprocessor_config())
    return path


def _kimi_shapes(s: Sizes) -> Shapes:
    shapes: Shapes = {}

    def plain(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"] = ("BF16", shape)

    def packed(name: str, out: int, inp: int) -> None:
        shapes[f"{name}.weight_packed"] = ("I32", (out, inp // 8))
        shapes[f"{name}.weight_scale"] = ("BF16", (out, inp // 32))
        shapes[f"{name}.weight_shape"] = ("I32", (2,))

    def mlp(prefix: str, width: int, write: Any) -> None:
        write(prefix + "gate_proj", width, s.hidden)
        write(prefix + "up_proj", width, s.hidden)
        write(prefix + "down_proj", s.hidden, width)

    plain("language_model.model.embed_tokens", s.vocab, s.hidden)
    for layer in range(s.layers):
        p = f"language_model.model.layers.{layer}."
        plain(p + "input_layernorm", s.hidden)
        plain(p + "post_attention_layernorm", s.hidden)
        a = p + "self_attn."
        plain(a + "q_a_proj", s.q_lora, s.hidden)
        plain(a + "q_a_layernorm", s.q_lora)
        plain(a + "q_b_proj", s.heads * (s.nope + s.rope), s.q_lora)
        plain(a + "kv_a_proj_with_mqa", s.kv_lora + s.rope, s.hidden)
        plain(a + "kv_a_layernorm", s.kv_lora)
        plain(a + "kv_b_proj", s.heads * (s.nope + s.value), s.kv_lora)
        plain(a + "o_proj", s.hidden, s.heads * s.value)
        if layer == 0:
            mlp(p + "mlp.", s.mlp, plain)
            continue
        plain(p + "mlp.gate", s.experts, s.hidden)
        shapes[p + "mlp.gate.e_score_correction_bias"] = ("F32", (s.experts,))
        mlp(p + "mlp.shared_experts.", s.expert_mlp, plain)
        for expert in range(s.experts):
            mlp(f"{p}mlp.experts.{expert}.", s.expert_mlp, packed)
    plain("language_model.model.norm", s.hidden)
    plain("language_model.lm_head", s.vocab, s.hidden)
    for block in range(s.vision_layers):
        p = f"vision_tower.encoder.blocks.{block}."
        plain(p + "norm0", s.vision)
        plain(p + "wqkv", 3 * s.vision, s.vision)
        plain(p + "wo", s.vision, s.vision)
        plain(p + "mlp.fc0", s.vision_mlp, s.vision)
        plain(p + "mlp.fc1", s.vision, s.vision_mlp)
    plain("vision_tower.encoder.final_layernorm", s.vision)
    plain("mm_projector.pre_norm", s.vision)
    plain("mm_projector.proj.0", 4 * s.vision, 4 * s.vision)
    plain("mm_projector.proj.2", s.hidden, 4 * s.vision)
    return shapes


def dense_skeleton(path: Path, config: Config, *, qk_norm: bool = False, shards: int = 4) -> Path:
    """A dense Llama-like model of the sizes in `config`, head not tied."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    kv, mlp = config["num_key_value_heads"], config["intermediate_size"]
    shapes: Shapes = {"model.embed_tokens.weight": ("BF16", (config["vocab_size"], hidden))}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        of_layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv * head_dim, hidden),
            "self_attn.v_proj": (kv * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        if qk_norm:
            of_layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
        shapes |= {f"{p}{name}.weight": ("BF16", shape) for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = ("BF16", (hidden,))
    shapes["lm_head.weight"] = ("BF16", (config["vocab_size"], hidden))
    write_skeleton(path, config, shapes, shards=shards)
    write_tokenizer(path, vocab=1000)
    return path


def gpt_oss_skeleton(path: Path, config: Config, *, shards: int = 14) -> Path:
    """gpt-oss: experts as MXFP4 blocks and scales, everything else in bf16."""
    hidden, heads, kv, head_dim = 2880, 64, 8, 64
    experts, mlp = config["num_local_experts"], config["intermediate_size"]
    shapes: Shapes = {"model.embed_tokens.weight": ("BF16", (config["vocab_size"], hidden))}
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        plain = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv * head_dim, hidden),
            "self_attn.v_proj": (kv * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.router": (experts, hidden),
        }
        shapes |= {f"{p}{name}.weight": ("BF16", shape) for name, shape in plain.items()}
        for name, rows, width in (("gate_up_proj", 2 * mlp, hidden), ("down_proj", hidden, mlp)):
            shapes[f"{p}mlp.experts.{name}_blocks"] = ("U8", (experts, rows, width // 32, 16))
            shapes[f"{p}mlp.experts.{name}_scales"] = ("U8", (experts, rows, width // 32))
    shapes["model.norm.weight"] = ("BF16", (hidden,))
    shapes["lm_head.weight"] = ("BF16", (config["vocab_size"], hidden))
    write_skeleton(path, config, shapes, shards=shards)
    write_tokenizer(path, vocab=1000)
    return path
