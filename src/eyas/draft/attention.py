"""Attention of some rows of a pack to step 0's keys of their document, plus the rows' own keys of later steps.

Dimensions: M query rows, N rows of the pack, h heads, g key/value heads, r = h / g, d head size, j later steps.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from eyas.draft.pieces import merge
from eyas.draft.rows import ROW_BLOCK

KeyValue = tuple[torch.Tensor, torch.Tensor]

QUERIES_AT_ONCE = 512
"""query rows of one dense score matrix"""


class PackAttention(Protocol):
    def __call__(
        self, q: torch.Tensor, rows: torch.Tensor, first: KeyValue, later: Sequence[KeyValue], window: int | None
    ) -> torch.Tensor:
        """q [M, h, d] of `rows` [M] (ascending); first: keys, values [N, g, d]; later: j pairs [M, g, d] -> [M, h, d].

        Row m sees step 0's keys of its own document at rows <= m (the last `window` of them), and `later`[m].
        """
        ...


class DenseAttention:
    """Matrix products, one document and at most QUERIES_AT_ONCE rows at a time. Any device, any precision."""

    def __init__(self, document_ids: torch.Tensor) -> None:
        """document_ids [N]: equal ids lie side by side."""
        counts = torch.unique_consecutive(document_ids.cpu(), return_counts=True)[1]
        self._ends: list[int] = counts.cumsum(0).tolist()

    def __call__(
        self, q: torch.Tensor, rows: torch.Tensor, first: KeyValue, later: Sequence[KeyValue], window: int | None
    ) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        positions = rows.tolist()
        bounds = torch.searchsorted(rows.cpu(), torch.tensor(self._ends)).tolist()
        start, a = 0, 0
        for end, b in zip(self._ends, bounds, strict=True):
            for i in range(a, b, QUERIES_AT_ONCE):
                j = min(i + QUERIES_AT_ONCE, b)
                low = start if window is None else max(start, positions[i] - window + 1)
                block = slice(low, positions[j - 1] + 1)
                mine = [(k[i:j], v[i:j]) for k, v in later]
                outputs.append(_dense_block(q[i:j], rows[i:j], first[0][block], first[1][block], low, mine, window))
            start, a = end, b
        return torch.cat(outputs) if outputs else torch.zeros_like(q)


def _dense_block(
    q: torch.Tensor,
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    low: int,
    later: Sequence[KeyValue],
    window: int | None,
) -> torch.Tensor:
    m, h, d = q.shape
    n, g, _ = k.shape
    r = h // g
    grouped = q.view(m, g, r, d).permute(1, 2, 0, 3)  # [g, r, m, d]
    scores = (grouped.reshape(g, r * m, d) @ k.permute(1, 2, 0)).view(g, r, m, n).float()
    keys = torch.arange(low, low + n, device=q.device)
    hidden = keys[None] > rows[:, None]
    if window is not None:
        hidden |= keys[None] <= rows[:, None] - window
    scores = scores.masked_fill(hidden, float("-inf"))
    own = [(grouped * kk.permute(1, 0, 2)[:, None]).sum(-1, keepdim=True).float() for kk, _ in later]  # [g, r, m, 1]
    weights = torch.softmax(torch.cat([scores, *own], -1) / math.sqrt(d), -1).to(v.dtype)
    out = (weights[..., :n].reshape(g, r * m, n) @ v.permute(1, 0, 2)).view(g, r, m, d)
    for i, (_, vv) in enumerate(later):
        out = out + weights[..., n + i, None] * vv.permute(1, 0, 2)[:, None]
    return out.permute(2, 0, 1, 3).reshape(m, h, d)


class FlexAttention:
    """Compiled block-sparse attention to step 0; the later steps' keys are merged in by log-sum-exp. For CUDA."""

    def __init__(self, document_ids: torch.Tensor) -> None:
        self._documents = document_ids
        self._masks: dict[tuple[int, int | None], tuple[torch.Tensor, BlockMask]] = {}

    def __call__(
        self, q: torch.Tensor, rows: torch.Tensor, first: KeyValue, later: Sequence[KeyValue], window: int | None
    ) -> torch.Tensor:
        m, h, _ = q.shape
        k, v = (x.transpose(0, 1)[None] for x in first)
        padded = q if m % ROW_BLOCK == 0 else torch.nn.functional.pad(q, (0, 0, 0, 0, 0, -m % ROW_BLOCK))
        mask = self._mask(rows, window)
        out, lse = _flex(padded.transpose(0, 1)[None], k, v, block_mask=mask, enable_gqa=h != k.shape[1])
        out = out[0, :, :m].transpose(0, 1)  # [m, h, d]
        if not later:
            return out
        return merge(out, lse[0, :, :m].t(), q, [x for x, _ in later], [x for _, x in later])

    def _mask(self, rows: torch.Tensor, window: int | None) -> BlockMask:
        key = (id(rows), window)
        if key not in self._masks:
            padded = torch.cat([rows, rows[-1:].expand(-rows.numel() % ROW_BLOCK)])
            self._masks[key] = (rows, _block_mask(padded, self._documents, window))
        return self._masks[key][1]


def _block_mask(rows: torch.Tensor, documents: torch.Tensor, window: int | None) -> BlockMask:
    mine = documents[rows]

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        seen = (mine[q] == documents[k]) & (k <= rows[q])
        return seen if window is None else seen & (k > rows[q] - window)

    return _compiled(create_block_mask)(sees, None, None, rows.numel(), documents.numel(), device=rows.device)


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: BlockMask, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [1, h, M, d] and log-sum-exp [1, h, M], both differentiable."""
    out, aux = _compiled(flex_attention)(
        q, k, v, block_mask=block_mask, enable_gqa=enable_gqa, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all shapes, at the first use."""
    return torch.compile(function, dynamic=True)
