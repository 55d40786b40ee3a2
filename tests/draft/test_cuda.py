"""On a GPU: compiled flex attention and fused losses against the same model in float32 on the CPU."""

import pytest
import torch
from speculators.losses import resolve_loss_config

from eyas.draft.loss import loss_config

from .reference import batch_of, gradients, small_config, small_drafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")


def masks() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scattered = torch.rand(300, generator=generator) < 0.4
    tail = torch.arange(260) >= 120
    return [scattered, tail, torch.zeros(40, dtype=torch.bool), torch.ones(129, dtype=torch.bool)]


@pytest.mark.parametrize("eagle31", [False, True], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_gpu_equals_cpu_in_float32(steps: int, layers: int, eagle31: bool, bf16: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = small_drafter(small_config(layers=layers, eagle31=eagle31))
    truth = model(batch_of(masks(), steps, padding=7), resolve_loss_config("kl_div", "eager")).loss
    expected = gradients(model, truth)
    model = model.to(CUDA)
    batch = batch_of(masks(), steps, padding=7, nested=False).to(CUDA)
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        loss = model(batch, loss_config("kl_div", CUDA)).loss
    found = gradients(model, loss)
    worst = max(float((found[n].cpu() - g).norm() / g.norm()) for n, g in expected.items())
    print(f"loss {abs(loss.item() / truth.item() - 1):.1e}, worst gradient {worst:.1e}")
    assert loss.item() == pytest.approx(truth.item(), rel=2e-2 if bf16 else 1e-5)
    assert worst < (6e-2 if bf16 else 1e-4)


def test_packs_of_other_sizes_compile_nothing_new() -> None:
    model = small_drafter(small_config()).to(CUDA)
    losses = loss_config("kl_div", CUDA)
    graphs = []
    for lengths in ((300, 260), (500, 90, 700), (2000,), (400, 900)):
        supervised = [torch.arange(n) >= n // 2 for n in lengths]
        padding = 4096 - sum(lengths)  # packs have one size, their supervised rows vary
        batch = batch_of(supervised, 3, padding=padding, nested=False).to(CUDA)
        model(batch, losses).loss.backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[-2], graphs
