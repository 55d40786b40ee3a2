"""The draft model's configuration: speculators' config class from the target's sizes and the recipe's draft part."""

from typing import Any

from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from eyas.errors import InputError
from eyas.recipe import DraftPart
from eyas.target.info import TargetInfo

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
}
"""rope types that training (transformers) and serving (vLLM) compute alike for a Llama layer, and their keys"""

MAX_MLA_HEAD_DIM = 256


def aux_layers(target: TargetInfo, part: DraftPart) -> list[int]:
    """The target layers whose states the drafter reads (k: after k layers), ascending.

    Default: [2, n // 2, n - 3], the convention of vLLM and speculators. Raises InputError naming `draft.aux_layers`.
    """
    n = target.num_hidden_layers
    chosen = [2, n // 2, n - 3] if part.aux_layers is None else list(part.aux_layers)
    if chosen and chosen == sorted(set(chosen)) and chosen[0] >= 1 and chosen[-1] <= n - 1:
        return chosen
    whose = "the default" if part.aux_layers is None else "draft.aux_layers"
    raise InputError(
        f"draft.aux_layers: {whose} {chosen} does not fit a target of {n} layers; expected different numbers "
        f"from 1 to {n - 1} in ascending order",
        fix="set draft.aux_layers, e.g. " + str(sorted({1, max(1, n // 2), max(1, n - 1)})),
    )


def draft_config(target: TargetInfo, part: DraftPart, ttt_steps: int) -> Eagle3SpeculatorConfig:
    """The config of a drafter for `target`: a Llama-style layer of the target's width.

    Heads, key/value heads, head size and MLP width are the recipe's, else the target's; for a target with latent
    attention (MLA) the head size is hidden / heads rounded up to a power of two, and every head has its own keys.
    Raises InputError naming the `draft` key that does not fit.
    """
    if part.vocab_size > target.vocab_size:
        raise InputError(
            f"draft.vocab_size is {part.vocab_size:,}, but the target has only {target.vocab_size:,} tokens",
            fix=f"set draft.vocab_size to at most {target.vocab_size}",
        )
    eagle31 = part.preset == "eagle3.1"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=_layer_config(target, part),
        draft_vocab_size=part.vocab_size,
        norm_before_residual=True,
        norm_before_fc=eagle31,
        norm_output=eagle31,
        eagle_aux_hidden_state_layer_ids=aux_layers(target, part),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target.path), architectures=[target.architecture]),
        ),
    )


def _layer_config(target: TargetInfo, part: DraftPart) -> LlamaConfig:
    heads = part.attention_heads or target.num_attention_heads
    own_heads = part.attention_heads is not None and part.attention_heads != target.num_attention_heads
    kv_default = heads if own_heads or target.attention == "mla" else target.num_key_value_heads
    kv = part.key_value_heads or kv_default
    if target.hidden_size % heads:
        raise InputError(
            f"draft.attention_heads: {heads} heads do not divide the hidden size {target.hidden_size}",
            fix="set draft.attention_heads to a divisor of it",
        )
    if heads % kv:
        raise InputError(
            f"draft.key_value_heads: {kv} does not divide the {heads} attention heads",
            fix="set draft.key_value_heads to a divisor of draft.attention_heads",
        )
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=part.intermediate_size or target.intermediate_size,
        num_hidden_layers=part.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=part.head_dim or _head_dim(target, heads, own_heads),
        hidden_act="silu",
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=_rope(target.rope_parameters),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=list(target.eos_token_ids) or None,
    )
    config._attn_implementation = "eager"  # of speculators' own forward, which serves as the reference in tests
    return config


def _head_dim(target: TargetInfo, heads: int, own_heads: bool) -> int:
    if target.attention != "mla":
        return target.hidden_size // heads if own_heads else target.head_dim
    size = 16
    while size < target.hidden_size // heads and size < MAX_MLA_HEAD_DIM:
        size *= 2
    return size


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """The target's rope where both sides compute it alike; else plain rope with the target's base.

    The drafter need not rotate as the target does: it must rotate in service as it did in training. Partial rotary
    and multimodal sections, which a Llama layer does not have, are left out.
    """
    kind = parameters.get("rope_type", "default")
    theta = parameters["rope_theta"]
    if kind not in ROPE_KEYS:
        return {"rope_type": "default", "rope_theta": theta}
    kept = {k: parameters[k] for k in ROPE_KEYS[kind] if parameters.get(k) is not None}
    return {"rope_type": kind, "rope_theta": theta, **kept}
