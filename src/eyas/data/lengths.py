"""Lengths and supervised shares of many samples, summed up: quantiles and histograms."""

from collections import Counter
from typing import Any

import numpy as np

from eyas.data.shapes import RowError
from eyas.recipe import Recipe
from eyas.target.info import TargetInfo

LEAST_ANSWER = 2
"""supervised tokens without which a sample trains nothing"""
SHARES = 10
"""bins of the supervised share"""


def longest_sample(recipe: Recipe, target: TargetInfo) -> int:
    """Tokens of the longest sample. A kept conversation is served as a prompt, and the engine adds one token to it."""
    return min(recipe.data.max_length, target.max_position_embeddings - (recipe.data.responses == "keep"))


def check_room(prompt: int, longest: int) -> None:
    """Raises RowError where a prompt of so many tokens leaves no room for an answer."""
    if prompt + LEAST_ANSWER > longest:
        raise RowError("prompt leaves no room for an answer", f"{prompt} tokens, data.max_length {longest}")


def length_summary(lengths: np.ndarray) -> dict[str, Any]:
    """Quantiles, and a histogram as {upper bound: count} over powers of two."""
    if not len(lengths):
        return {"min": 0, "median": 0, "p95": 0, "max": 0, "histogram": {}}
    bins = Counter(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int).tolist())
    return {
        "min": int(lengths.min()),
        "median": int(np.median(lengths)),
        "p95": int(np.percentile(lengths, 95)),
        "max": int(lengths.max()),
        "histogram": {str(2**k): bins[k] for k in range(min(bins), max(bins) + 1)},
    }


def share_bin(part: Any, whole: Any) -> Any:
    """Which of SHARES equal bins part / whole falls into; numbers or arrays. 1.0 falls into the last one."""
    return np.minimum(part * SHARES // whole, SHARES - 1)


def share_summary(counts: np.ndarray) -> dict[str, int]:
    """{"10%": samples with a supervised share of up to 10 %, ...}."""
    return {f"{100 * (i + 1) // SHARES}%": int(n) for i, n in enumerate(counts)}
