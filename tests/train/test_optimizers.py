"""AdamW and Muon behind one object; schedules by hand."""

import math

import pytest
import torch

from eyas.recipe import TrainPart
from eyas.train.optimizers import build_optimizer, lr_factor


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(6, 4, bias=False)
        self.norm = torch.nn.RMSNorm(4)
        self.lm_head = torch.nn.Linear(4, 8, bias=False)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.fc(x))).pow(2).mean()


def run(model: Small, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_trained_weight_moves_and_the_loss_falls(kind):
    model = Small()
    before = {n: p.clone() for n, p in model.named_parameters()}
    losses = run(model, build_optimizer(model, TrainPart(optimizer=kind, lr=0.01)), 20)
    assert losses[-1] < losses[0]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"fc.weight", "norm.weight", "lm_head.weight"}


def test_muon_takes_the_matrices_and_adamw_norms_and_heads():
    model = Small()
    optimizer = build_optimizer(model, TrainPart(optimizer="muon"))
    run(model, optimizer, 1)
    assert set(optimizer.state[model.fc.weight]) == {"momentum_buffer"}
    for p in (model.norm.weight, model.lm_head.weight):
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_scheduler_reaches_both_also_after_loading_state():
    model = Small()
    optimizer = build_optimizer(model, TrainPart(optimizer="muon", lr=0.1))
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [p.clone() for p in model.parameters()]
    run(model, optimizer, 2)
    assert scheduler.get_last_lr() == [0.0] * len(optimizer.param_groups)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_norms_do_not_decay():
    groups = build_optimizer(Small(), TrainPart(weight_decay=0.5)).param_groups
    assert [(g["weight_decay"], [p.ndim for p in g["params"]]) for g in groups] == [(0.5, [2, 2]), (0.0, [1])]


def test_schedules_by_hand():
    cosine = lr_factor(TrainPart(warmup=0.2), 10)
    assert [cosine(s) for s in (0, 1, 2, 6, 10)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    assert cosine(4) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    linear = lr_factor(TrainPart(schedule="linear", warmup=0), 4)
    assert [linear(s) for s in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert lr_factor(TrainPart(schedule="constant", warmup=0), 4)(3) == 1.0
