"""The optimizer and the learning-rate schedule: AdamW, or Muon for the matrices with AdamW for the rest."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from speculators.train.optimizers import split_named_params_for_muon
from torch import nn

from eyas.recipe import TrainPart

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
    """torch's Muon and AdamW stepped as one optimizer, with one list of groups and one state.

    Muon's update is scaled to AdamW's size (`match_rms_adamw`), so that one learning rate serves both. torch's Muon
    orthogonalizes the smaller side of each matrix.
    """

    def __init__(
        self,
        matrices: list[torch.Tensor],
        rest: list[dict[str, Any]],
        lr: float,
        weight_decay: float,
    ) -> None:
        self._muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(rest, lr=lr, fused=True) if rest else None
        groups = [*self._muon.param_groups, *(self._adamw.param_groups if self._adamw else [])]
        super().__init__(groups, {"lr": lr})
        self._share()

    def _share(self) -> None:
        """The two inner optimizers use this one's groups and state, so that a scheduler or a resume reaches both."""
        split = len(self._muon.param_groups)
        self._muon.param_groups, self._muon.state = self.param_groups[:split], self.state
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = self.param_groups[split:], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise NotImplementedError("a closure is not supported")
        self._muon.step()
        if self._adamw is not None:
            self._adamw.step()


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
