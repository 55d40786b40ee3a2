"""The optimizer and the learning-rate schedule: AdamW, or Muon for the matrices with AdamW for the rest."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from speculators.train.optimizers import split_named_params_for_muon
from torch import nn

from eyas.recipe import TrainPart
from eyas.train.sharding import like, whole

MOMENTUM = 0.95
ITERATIONS = 5
ADAMW_SIZE = 0.2
"""about the root mean square of AdamW's updates, in learning rates"""
NORM_DIMS = 1
"""weight decay is for matrices; norm weights have one dimension"""


def build_optimizer(model: nn.Module, part: TrainPart) -> torch.optim.Optimizer:
    """One optimizer object over the trainable parameters."""
    if part.optimizer == "adamw":
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(_decay_groups(trained, part), lr=part.lr, fused=True)
    matrices, rest = split_named_params_for_muon(model)
    groups = _decay_groups((p for _, p in rest), part)
    return MuonAdamW([p for _, p in matrices], groups, part.lr, part.weight_decay)


def _decay_groups(parameters: Iterable[torch.Tensor], part: TrainPart) -> list[dict[str, Any]]:
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim > NORM_DIMS], "weight_decay": part.weight_decay},
        {"params": [p for p in every if p.ndim <= NORM_DIMS], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


class MuonAdamW(torch.optim.Optimizer):
    """Muon for `matrices` and AdamW for `rest`, stepped as one optimizer, with one list of groups and one state.

    Muon (Keller Jordan, 2024) with Nesterov momentum; its update is scaled to AdamW's size (arXiv 2502.16982), so that
    one learning rate serves both. Where there are several ranks, each makes the updates of some matrices and sends
    them to the others.
    """

    def __init__(
        self,
        matrices: list[torch.Tensor],
        rest: list[dict[str, Any]],
        lr: float,
        weight_decay: float,
    ) -> None:
        self._adamw = torch.optim.AdamW(rest, lr=lr, fused=True) if rest else None
        first = {"params": matrices, "lr": lr, "weight_decay": weight_decay}
        super().__init__([first, *(self._adamw.param_groups if self._adamw else [])], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """AdamW uses this one's groups and state, so that a scheduler or a resume reaches both."""
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise NotImplementedError("a closure is not supported")
        first = self.param_groups[0]
        matrices = [p for p in first["params"] if p.grad is not None]
        for p, update in zip(matrices, self._updates(matrices), strict=True):
            p.mul_(1 - first["lr"] * first["weight_decay"])
            p.add_(like(update.to(p.dtype), p), alpha=-first["lr"] * ADAMW_SIZE * math.sqrt(max(p.shape)))
        if self._adamw is not None:
            self._adamw.step()

    def _updates(self, matrices: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Every matrix's update, whole. All ranks must ask."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield from (orthogonal(self._momentum(p)) for p in matrices)
            return
        rank, owners = dist.get_rank(), share_out([tuple(p.shape) for p in matrices], dist.get_world_size())
        directions: list[torch.Tensor | None] = []
        for p, owner in zip(matrices, owners, strict=True):  # before any update is made: else ranks wait in between
            direction = whole(self._momentum(p))
            directions.append(direction if owner == rank else None)
        updates = [
            torch.empty(p.shape, dtype=iterated_in(p.device), device=p.device) if x is None else orthogonal(x)
            for p, x in zip(matrices, directions, strict=True)
        ]
        del directions
        sent = [dist.broadcast(x, owner, async_op=True) for x, owner in zip(updates, owners, strict=True)]
        for update, work in zip(updates, sent, strict=True):
            if work is not None:
                work.wait()
            yield update

    def _momentum(self, p: torch.Tensor) -> torch.Tensor:
        grad, state = p.grad, self.state[p]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer: torch.Tensor = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - MOMENTUM)
        return grad.lerp(buffer, MOMENTUM)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """x [m, n] = U S V -> about U V, of the same shape, by Newton and Schulz's iteration with Muon's coefficients.

    Singular values end between 0.7 and 1.2. The products are with the Gram matrix of the smaller side.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.to(iterated_in(x.device))
    if x.shape[0] > x.shape[1]:
        wide = wide.t()
    wide = (wide / wide.norm().clamp(min=1e-7)).contiguous()
    for _ in range(ITERATIONS):
        gram = wide @ wide.t()
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.t() if x.shape[0] > x.shape[1] else wide).contiguous()


def iterated_in(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def share_out(shapes: list[tuple[int, ...]], ranks: int) -> list[int]:
    """The rank that makes each matrix's update: the costliest first, each to the rank with the least to do."""
    costs = [min(shape) ** 2 * max(shape) for shape in shapes]
    load, owners = [0] * ranks, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


def lr_factor(part: TrainPart, total: int) -> Callable[[int], float]:
    """Step number (from 0) -> factor of the learning rate: linear warm-up, then the recipe's schedule down to 0."""
    warm = math.ceil(part.warmup * total) if part.warmup else 0

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        if part.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warm) / max(1, total - warm))
        return 1.0 - done if part.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
