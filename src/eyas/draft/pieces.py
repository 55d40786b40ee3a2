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
    norm_before_residual: bool
    head_dim: int
    q: torch.Tensor
    """[h * d, H]; q, k and v are the halves that the hidden state meets, in the first layer"""
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    mlp_norm: Norm
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class TokenWeights(NamedTuple):
    """What the tokens' embeddings meet in the first layer: their halves of q, k and v, each times the norm's weight."""

    eps: float
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


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
        some: list[Any] = list(rows)
        flat = (x for arg in some for x in (arg if isinstance(arg, list) else [arg]))
        tensors: list[torch.Tensor] = [x for x in flat if x is not None]
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
    return norm.weight * _scaled(x, norm.eps)


def _scaled(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


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
def project_tokens(
    tokens: torch.Tensor, *, weights: TokenWeights, embeddings: torch.Tensor, queries: bool = True, keys: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """tokens [M] -> the embeddings' share of queries [M, h * d], keys and values [M, g * d], before the rotation.

    A product with [embedding, hidden state] is the sum of two, and a token's own is the same at every TTT step. No
    gradient leaves towards the embeddings: the norm's weight is in the matrices (`halves`), where its gradient is a
    sum over elements in place of a matrix product.
    """
    u = _scaled(embedding(tokens, embeddings), weights.eps).to(weights.q.dtype)
    q = linear(u, weights.q) if queries else None
    return (q, linear(u, weights.k), linear(u, weights.v)) if keys else (q, None, None)


@by_rows
def enter(
    h: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_tokens: torch.Tensor | None,
    k_tokens: torch.Tensor | None,
    v_tokens: torch.Tensor | None,
    *,
    weights: LayerWeights,
    queries: bool = True,
    keys: bool = True,
) -> Entered:
    """h [M, H], cos and sin [M, d], the tokens' shares (first layer) -> the attention's inputs.

    Queries come with the residual.
    """
    hidden = normed(h, weights.norm)
    u = hidden.to(weights.q.dtype)
    shape = (h.shape[0], -1, weights.head_dim)
    q = _rope(_sum(linear(u, weights.q), q_tokens).view(shape), cos, sin).to(u.dtype) if queries else None
    k = _rope(_sum(linear(u, weights.k), k_tokens).view(shape), cos, sin).to(u.dtype) if keys else None
    v = _sum(linear(u, weights.v), v_tokens).view(shape).to(u.dtype) if keys else None
    residual = (hidden if weights.norm_before_residual else h) if queries else None
    return Entered(q, k, v, residual)


def _sum(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    """float32"""
    return x.float() if y is None else x.float() + y.float()


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [M, heads, d] float32"""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


@by_rows
def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
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
    attended: torch.Tensor,
    residual: torch.Tensor,
    *,
    weights: LayerWeights,
    norm: Norm | None,
    norm_output: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """attended [M, h * d], residual [M, H] -> what the next layer or step reads, and what the head reads, [M, H] both.

    norm: the drafter's final norm, for its last layer; norm_output: the next step reads it as well.
    """
    dtype = weights.o.dtype
    h = residual + linear(attended, weights.o)
    x = normed(h, weights.mlp_norm).to(dtype)
    h = h + linear(silu(linear(x, weights.gate)) * linear(x, weights.up), weights.down)
    if norm is None:
        return h, h
    z = normed(h, norm)
    return (z, z) if norm_output else (h, z.to(dtype))


@by_rows
def _to(x: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight.to(dtype); compiled, since the gradient comes back at half the speed in torch's own kernel."""
    return weight if weight.dtype == dtype else _to(weight.view(-1), dtype=dtype).view(weight.shape)


@by_rows
def halves(weight: torch.Tensor, *, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [n, 2 H] -> the embedding's half times scale [H], and the hidden state's half."""
    of_token, of_hidden = weight.chunk(2, 1)
    return (of_token * scale).to(dtype), of_hidden.to(dtype)


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
    return _Take.apply(x, rows)
