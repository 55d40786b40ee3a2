"""What a draft layer does before and after its attention: pure functions of tensors, compiled on CUDA.

A piece's positional arguments are rows: their first dimension varies from pack to pack and is compiled as such, once
for all packs. Keyword arguments (weights, constants) have fixed sizes. Sums, norms and rotations are float32; matrix
products have the precision of their weights, so the caller casts each weight once for all TTT steps.
Dimensions: M rows, H hidden, h / g query / key heads, d head size, j later steps.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.nn.functional import embedding, linear, silu

P = ParamSpec("P")
R = TypeVar("R")

COMPILED_ON = {"cuda"}
"""device types where pieces are compiled"""
VARIANTS = 64
"""compiled forms of one piece: each TTT step's merge has its own; torch would go back to eager after 8"""


class Norm(NamedTuple):
    """An RMS norm."""

    weight: torch.Tensor
    eps: float


class LayerWeights(NamedTuple):
    """One layer: matrices in the precision of the products, norms in float32."""

    norm: Norm
    """of the hidden state"""
    token_norm: Norm | None
    """of the token's embedding; None in all layers but the first"""
    norm_before_residual: bool
    head_dim: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    mlp_norm: Norm
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Entered(NamedTuple):
    """What `enter` was asked for: queries [M, h, d], keys, values [M, g, d], residual [M, H]."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    residual: torch.Tensor | None


def by_rows(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a piece of `function`."""

    @wraps(function)
    def call(*rows: P.args, **fixed: P.kwargs) -> R:
        tensors = [x for arg in rows for x in (arg if isinstance(arg, list | tuple) else [arg]) if x is not None]
        if tensors[0].device.type not in COMPILED_ON:
            return function(*rows, **fixed)
        for x in tensors:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return _compiled(function)(*rows, **fixed)

    return call


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return torch.compile(function, fullgraph=True)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """float32, whatever x is"""
    x = x.float()
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps))


@by_rows
def fuse(aux: torch.Tensor, *, whole: Norm | None, parts: Sequence[Norm], weight: torch.Tensor) -> torch.Tensor:
    """aux [M, a * H], normed as a whole or in its a parts -> [M, H]"""
    if whole is not None:
        aux = normed(aux, whole)
    if parts:
        chunks = aux.chunk(len(parts), dim=-1)
        aux = torch.cat([normed(chunk, norm) for chunk, norm in zip(chunks, parts, strict=True)], -1)
    return linear(aux.to(weight.dtype), weight)


@by_rows
def enter(
    h: torch.Tensor,
    tokens: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    weights: LayerWeights,
    embeddings: torch.Tensor,
    queries: bool = True,
    keys: bool = True,
) -> Entered:
    """h [M, H], tokens [M], cos and sin [M, d] -> the attention's inputs; queries come with the residual."""
    dtype = weights.q.dtype
    hidden = normed(h, weights.norm)
    u, residual = hidden.to(dtype), h
    if weights.token_norm is not None:
        u = torch.cat([normed(embedding(tokens, embeddings), weights.token_norm).to(dtype), u], -1)
        residual = hidden if weights.norm_before_residual else h
    shape = (h.shape[0], -1, weights.head_dim)
    q = _rope(linear(u, weights.q).view(shape), cos, sin) if queries else None
    k = _rope(linear(u, weights.k).view(shape), cos, sin) if keys else None
    v = linear(u, weights.v).view(shape) if keys else None
    return Entered(q, k, v, residual if queries else None)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [M, heads, d], rotated in float32"""
    a, b = x.float().chunk(2, -1)
    return (torch.cat([a, b], -1) * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]).to(x.dtype)


@by_rows
def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Attention to step 0 [M, h, d] with its log-sum-exp [M, h], and to j keys of the row's own [M, g, d] -> [M, h, d].

    Written without stacking, so that it compiles to one kernel.
    """
    m, h, d = q.shape
    g = keys[0].shape[1]
    grouped = q.float().view(m, g, h // g, d)
    scores = [(grouped * k.float()[:, :, None]).sum(-1, keepdim=True) / math.sqrt(d) for k in keys]  # [m, g, r, 1]
    first = lse.float().view(m, g, h // g, 1)
    top = first
    for s in scores:
        top = torch.maximum(top, s)
    top = top.detach()
    weight = torch.exp(first - top)
    total, merged = weight, weight * out.float().reshape(m, g, h // g, d)
    for s, v in zip(scores, values, strict=True):
        weight = torch.exp(s - top)
        total = total + weight
        merged = merged + weight * v.float()[:, :, None]
    return (merged / total).view(m, h, d).to(q.dtype)


@by_rows
def leave(
    attended: torch.Tensor, residual: torch.Tensor, *, weights: LayerWeights, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """attended [M, h * d], residual [M, H] -> the layer's output [M, H], and the same normed (or as it is)."""
    dtype = weights.o.dtype
    h = residual + linear(attended, weights.o)
    x = normed(h, weights.mlp_norm).to(dtype)
    h = h + linear(silu(linear(x, weights.gate)) * linear(x, weights.up), weights.down)
    return h, h if norm is None else normed(h, norm)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.rows = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,), (grad,) = ctx.saved_tensors, grads
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, rows, grad), None


def take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] for rows that are all different: the backward need not add, so it need not sort."""
    return x if rows.numel() == x.shape[0] else _Take.apply(x, rows)
