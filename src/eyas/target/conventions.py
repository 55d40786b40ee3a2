"""How a family turns its last state into logits: norm convention, soft cap, scales. Facts of the models' own code."""

import math
from dataclasses import dataclass
from typing import Literal

from eyas.errors import InputError
from eyas.target.config_json import TargetConfig

# RMSNorm that multiplies by 1 + weight, by text model type; a test compares this table with the installed transformers.
PLUS_ONE = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma", "qwen3_next",
    "qwen3_5", "qwen3_5_text",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text", "minimax_m3_vl",
    "minimax_m3_vl_text", "muse_glimmer",
    "muse_glimmer_text", "step3p5", "step3p7", "step3p7_text",
})  # fmt: skip
# LayerNorm with 1 + weight.
LAYER_NORM_PLUS_ONE = frozenset({"nemotron"})
LAYER_NORM = frozenset({
    "cohere", "cohere2", "cohere2_moe", "phi", "phimoe", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt",
    "bloom", "falcon", "mpt", "stablelm", "starcoder2", "dbrx", "codegen", "persimmon", "biogpt",
})  # fmt: skip
# Embeddings times sqrt(hidden size).
_SQRT_EMBEDDING = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "recurrent_gemma",
    "vaultgemma",
})  # fmt: skip
_SOFTCAP_KEYS = ("final_logit_softcapping", "logits_soft_cap", "final_logit_softcap", "logit_softcapping")
# Config keys that scale the logits: multiplied, or divided by.
_LOGIT_TIMES = ("logit_scale", "lm_head_multiplier", "output_multiplier_scale", "output_multiplier")
_LOGIT_OVER = ("logits_scaling",)
_LOGITS_SCALING_TIMES = frozenset({"hyperclovax"})
_EMBEDDING_TIMES = ("embedding_multiplier", "scale_emb", "embedding_multiplier_scale", "embed_scale", "scale_embedding")


@dataclass(frozen=True)
class Conventions:
    norm_kind: Literal["rms", "layer"]
    norm_plus_one: bool
    eps: float
    logit_softcap: float | None
    logit_scale: float
    embedding_scale: float


def conventions(config: TargetConfig, hidden: int) -> Conventions:
    """Reads the conventions of the text config. Raises InputError when the epsilon of the norm is unknown."""
    kind = config.model_type
    layer_norm = kind in LAYER_NORM | LAYER_NORM_PLUS_ONE
    eps = config.number("norm_eps", above=0)
    if eps is None and layer_norm:
        eps = 1e-5  # torch's own, for families that do not configure it (OPT)
    if eps is None:
        raise InputError(
            f"{config.file}: the text config (model_type {kind!r}) does not say the epsilon of its norms",
            fix="add rms_norm_eps to it, from the model's own code",
        )
    return Conventions(
        norm_kind="layer" if layer_norm else "rms",
        norm_plus_one=_plus_one(config),
        eps=eps,
        logit_softcap=_first(config, _SOFTCAP_KEYS),
        logit_scale=_logit_scale(config, hidden),
        embedding_scale=_embedding_scale(config, hidden),
    )


def _plus_one(config: TargetConfig) -> bool:
    in_table = config.model_type in PLUS_ONE | LAYER_NORM_PLUS_ONE
    return in_table or any(config.find(key) is True for key in ("use_gemma_norm", "zero_centered_norm"))


def _logit_scale(config: TargetConfig, hidden: int) -> float:
    scale = _first(config, _LOGIT_TIMES) or 1.0
    over = _first(config, _LOGIT_OVER)
    if over is not None:
        scale *= over if config.model_type in _LOGITS_SCALING_TIMES else 1.0 / over
    base = config.number("dim_model_base", above=0)
    if base is not None and config.model_type.startswith("minicpm"):
        scale *= base / hidden  # MiniCPM divides the state by hidden / dim_model_base before its head
    return scale


def _embedding_scale(config: TargetConfig, hidden: int) -> float:
    if config.model_type in _SQRT_EMBEDDING:
        return math.sqrt(hidden)
    numbers = tuple(key for key in _EMBEDDING_TIMES if not isinstance(config.find(key), bool))  # BioGPT has a switch
    return _first(config, numbers) or 1.0


def _first(config: TargetConfig, keys: tuple[str, ...]) -> float | None:
    found = [value for key in keys if (value := config.number(key, above=0)) is not None]
    return found[0] if found else None
