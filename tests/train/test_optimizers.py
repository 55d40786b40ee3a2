"""AdamW and Muon behind one object; schedules by hand."""

import math

import pytest
import torch

from eyas.recipe import TrainPart
from eyas.train import optimizers
from eyas.train.optimizers import build_optimizer, lr_factor, orthogonal, share_out


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


def plain(x: torch.Tensor) -> torch.Tensor:
    """Newton and Schulz in float64, x never transposed."""
    x = x.double() / x.double().norm()
    for _ in range(5):
        gram = x.t() @ x
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x


@pytest.mark.parametrize("shape", [(8, 8), (5, 40), (40, 5)])
def test_updates_are_orthogonalized_tall_and_wide(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    found = orthogonal(x)
    torch.testing.assert_close(found.double(), plain(x), rtol=1e-4, atol=1e-5)
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    assert torch.nn.functional.cosine_similarity(found.double().flatten(), (u @ v).flatten(), dim=0) > 0.97


def test_muon_steps_as_torchs_own(monkeypatch):
    monkeypatch.setattr(optimizers, "iterated_in", lambda _: torch.bfloat16)
    ours, theirs = Small(), Small()
    part = TrainPart(optimizer="muon", lr=0.01, weight_decay=0.1)
    matrices, rest = [theirs.fc.weight], [theirs.norm.weight, theirs.lm_head.weight]
    reference = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    others = torch.optim.AdamW([{"params": rest[1:], "weight_decay": 0.1}, {"params": rest[:1]}], lr=0.01)
    others.param_groups[1]["weight_decay"] = 0.0
    mine = build_optimizer(ours, part)
    for _ in range(5):
        run(ours, mine, 1)
        others.zero_grad()
        run(theirs, reference, 1)
        others.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_costly_matrices_are_dealt_out_evenly():
    shapes = [(7168, 21504), (8192, 14336), (8192, 14336), (8192, 14336), (7168, 8192), *[(7168, 18432)] * 3]
    assert sorted(share_out(shapes, 8)) == list(range(8))
    owners = share_out(shapes, 2)
    costs = [sum(min(s) ** 2 * max(s) for s, o in zip(shapes, owners, strict=True) if o == r) for r in range(2)]
    assert max(costs) < 1.2 * min(costs)
    assert share_out(shapes, 1) == [0] * 8


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
