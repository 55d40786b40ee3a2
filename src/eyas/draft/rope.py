"""The drafter's rotary embedding: of the target's, what training and serving compute alike. Needs no torch."""

import math
from typing import Any

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


def draft_rope(parameters: dict[str, Any]) -> dict[str, Any]:
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


def spelled_out(parameters: dict[str, Any], positions: int) -> dict[str, Any]:
    """With what an absent key means: two spellings of one rope are equal. positions: max_position_embeddings."""
    kind = parameters["rope_type"]
    meant: dict[str, Any] = {"partial_rotary_factor": 1.0, "original_max_position_embeddings": positions}
    if kind == "yarn":
        meant |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": _yarn_factor(parameters)}
    keys = ("rope_type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS.get(kind, ()))
    return {k: parameters.get(k, meant.get(k)) for k in keys if k not in ("mscale", "mscale_all_dim")}


def _yarn_factor(parameters: dict[str, Any]) -> float:
    def scale(by: float) -> float:
        return 1 + 0.1 * by * math.log(max(parameters["factor"], 1))

    mscale, over = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(mscale) / scale(over) if mscale and over else scale(1)
