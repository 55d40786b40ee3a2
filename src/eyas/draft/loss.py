"""Head and loss over chunks of label rows: no more than one chunk of [rows, draft vocabulary] logits exists at a time.

The gradient with respect to the head's inputs is taken chunk by chunk in the forward pass, while the chunk's logits
are there; the teacher's logits of a chunk serve all TTT steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from speculators.losses import LossConfig, resolve_loss_config

from eyas.draft.rows import StepPlan
from eyas.draft.sizes import CHUNK_ELEMENTS
from eyas.errors import InputError

CHUNK_MULTIPLE = 256
"""rows of a chunk, where it has more: whole tiles of a matrix product"""


def chunk_rows(device: str, vocab: int) -> int:
    """Label rows of one chunk."""
    rows = max(1, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // vocab)
    return rows - rows % CHUNK_MULTIPLE if rows > CHUNK_MULTIPLE else rows


def loss_config(name: str, device: torch.device) -> LossConfig:
    """speculators' losses: plain torch on the CPU, fused kernels on CUDA. Raises InputError naming train.loss."""
    try:
        return resolve_loss_config(name, "fused" if device.type == "cuda" else "eager")
    except ValueError as e:
        raise InputError(f"train.loss: {e}", fix="set train.loss to one of these names") from None


@dataclass(frozen=True)
class HeadLoss:
    """What the chunked loss needs beside its differentiable inputs."""

    plan: StepPlan
    teacher: Callable[[torch.Tensor], torch.Tensor]
    """label rows [n] -> logits [n, draft vocabulary]"""
    weights: torch.Tensor
    """[T]: factor of each row's loss at step k"""
    losses: LossConfig
    dtype: torch.dtype
    """of the logits"""
    with_grad: bool
    chunk: int
    """label rows at a time"""


def head_loss(inputs: list[torch.Tensor], head: torch.Tensor, spec: HeadLoss) -> tuple[torch.Tensor, ...]:
    """inputs: T x [R_k, H], normed rows with a loss; head [V, H].

    Returns the loss = sum over k of weights[k] * sum of step k's row losses (differentiable in inputs and head), the
    [T] sums of row losses, and [sum of R_k] bool: whether draft and teacher agree in their argmax, step by step.
    """
    return _HeadLoss.apply(torch.cat(inputs), head, spec)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, head: torch.Tensor, spec: HeadLoss) -> tuple[torch.Tensor, ...]:
        with torch.autocast(inputs.device.type, enabled=False):
            return _forward(ctx, inputs, head, spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_inputs, d_head = ctx.saved_tensors
        scale = grads[0]
        return d_inputs * scale, None if d_head is None else d_head * scale, None


def _forward(ctx: Any, inputs: torch.Tensor, head: torch.Tensor, spec: HeadLoss) -> tuple[torch.Tensor, ...]:
    plan, steps = spec.plan, len(spec.plan.rows)
    cast = head.to(spec.dtype)
    x = inputs.to(spec.dtype)
    d_inputs = torch.zeros_like(inputs) if spec.with_grad else None
    d_head = torch.zeros_like(head) if spec.with_grad and ctx.needs_input_grad[1] else None
    sums = torch.zeros(steps, device=inputs.device)
    correct = torch.zeros(inputs.shape[0], dtype=torch.bool, device=inputs.device)
    starts = [0]
    for at in plan.loss_at:
        starts.append(starts[-1] + at.numel())
    total_labels = plan.labels.numel()
    for a in range(0, total_labels, spec.chunk):
        b = min(a + spec.chunk, total_labels)
        teacher = spec.teacher(plan.labels[a:b])
        choices = teacher.argmax(-1)
        for k in range(steps):
            i, j = plan.edges[k][a], plan.edges[k][b]
            if i == j:
                continue
            own = slice(starts[k] + i, starts[k] + j)
            target, choice = teacher, choices
            if j - i < b - a:
                at = plan.label_at[k][i:j] - a
                target, choice = teacher[at], choices[at]
            logits = x[own] @ cast.t()
            correct[own] = logits.argmax(-1) == choice
            with torch.set_grad_enabled(spec.with_grad):
                leaf = logits.detach().requires_grad_(spec.with_grad)
                rows = torch.zeros(j - i, device=inputs.device)
                for fn, weight in spec.losses.values():
                    rows = rows + weight * fn(leaf[None], target[None])[0]
            sums[k] += rows.detach().sum()
            if d_inputs is not None:
                (d_logits,) = torch.autograd.grad(rows, leaf, spec.weights[k].to(rows.dtype).expand_as(rows))
                d_inputs[own] = (d_logits @ cast).to(d_inputs.dtype)
                if d_head is not None:
                    d_head += (d_logits.t() @ x[own]).to(d_head.dtype)
    ctx.save_for_backward(d_inputs, d_head)
    ctx.mark_non_differentiable(sums, correct)
    return (sums * spec.weights).sum(), sums, correct
