"""What kind of attention the layers have: MHA, GQA, MLA or a mix with linear layers; heads and sliding windows."""

from dataclasses import dataclass

from eyas.target.config_json import TargetConfig
from eyas.target.info import Attention

_LINEAR_KEYS = (
    "linear_num_value_heads", "linear_attn_config", "mamba_num_heads", "mamba_d_state",
    "ssm_state_size", "hybrid_override_pattern",
    "layers_block_type", "attn_type_list", "linear_key_head_dim", "mamba_n_heads",
)  # fmt: skip
_FULL = ("full_attention", "sliding_attention", "attention", "chunked_attention", "full", "sliding")


@dataclass(frozen=True)
class AttentionFacts:
    kind: Attention
    heads: int
    key_value_heads: int
    head_dim: int
    sliding_window: int | None
    layer_types: tuple[str, ...]


def attention_facts(config: TargetConfig, hidden: int) -> AttentionFacts:
    heads = config.size("num_attention_heads")
    kv = config.largest("num_key_value_heads")
    if config.find("multi_query") is True and kv is None:
        kv = 1
    kv = heads if kv is None else kv
    mla = config.find("kv_lora_rank") is not None
    types = _layer_types(config)
    linear = any(t not in _FULL for t in types) or any(config.text.get(key) for key in _LINEAR_KEYS)
    kind: Attention = "hybrid" if linear else "mla" if mla else "mha" if kv == heads else "gqa"
    head_dim = config.whole("head_dim")
    if mla:
        # The width of a head's values and output; queries and keys are qk_nope_head_dim + qk_rope_head_dim wide.
        head_dim = config.whole("v_head_dim") or head_dim
    if head_dim is None and heads > hidden:
        raise config.values.wrong("num_attention_heads", f"at most hidden_size ({hidden})")
    return AttentionFacts(kind, heads, kv, head_dim or hidden // heads, _sliding_window(config, types), types)


def _layer_types(config: TargetConfig) -> tuple[str, ...]:
    """One for each layer; some list their next-token-prediction layers too (Step)."""
    layers = config.size("num_hidden_layers")
    extra = config.whole("num_nextn_predict_layers", low=0) or 0
    expected = f"a list of num_hidden_layers ({layers}) strings"
    types = config.values.entries("layer_types", lambda t: isinstance(t, str), expected)
    if types and not layers <= len(types) <= layers + extra:
        raise config.values.wrong("layer_types", f"{expected}, found {len(types)},")
    return tuple(types)


def _sliding_window(config: TargetConfig, types: tuple[str, ...]) -> int | None:
    if config.find("sliding_window") is False:
        return None
    window = config.whole("sliding_window", low=-1)
    if window is None or window < 1:
        return None
    if config.find("use_sliding_window") is False:  # Qwen writes a window and switches it off
        return None
    return None if types and "sliding_attention" not in types else window
