"""The pieces of the layer that no comparison with speculators' forward reaches on the CPU."""

import pytest
import torch
from speculators.losses import resolve_loss_config

from eyas.draft.attention import DenseAttention
from eyas.draft.pieces import merge, take

from .reference import batch_of, gradients, small_config, small_drafter


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("later", [1, 2])
def test_merge_equals_one_softmax_over_all_keys(later: int, key_heads: int) -> None:
    m, d = 6, 8
    torch.manual_seed(0)
    rows = torch.arange(m)
    q, *pairs = (torch.randn(m, h, d, requires_grad=True) for h in (4, *([key_heads] * 2 * (1 + later))))
    first, own = (pairs[0], pairs[1]), list(zip(pairs[2::2], pairs[3::2], strict=True))
    expected = DenseAttention(torch.zeros(m, dtype=torch.long))(q, rows, first, own, None)
    spread = [x.repeat_interleave(4 // key_heads, 1) for x in first]
    scores = torch.einsum("mhd,nhd->mhn", q, spread[0]) / d**0.5
    scores = scores.masked_fill((rows[None] > rows[:, None])[:, None], float("-inf"))
    out = torch.einsum("mhn,nhd->mhd", scores.softmax(-1), spread[1])
    found = merge(out, scores.logsumexp(-1), q, [k for k, _ in own], [v for _, v in own])
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    theirs, ours = (torch.autograd.grad((x * weight).sum(), [q, *pairs]) for x in (expected, found))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_take_is_indexing() -> None:
    x, rows = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 2, 4])
    torch.testing.assert_close(take(x, rows), x[rows])
    (found,) = torch.autograd.grad(take(x, rows).pow(2).sum(), x)
    (expected,) = torch.autograd.grad(x[rows].pow(2).sum(), x)
    torch.testing.assert_close(found, expected)


def test_frozen_matrices_are_held_in_bf16_only_if_that_is_exact() -> None:
    model = small_drafter(small_config(), train_head=False)
    with torch.no_grad():
        for module in (model.embed_tokens, model.lm_head):
            module.weight.copy_(module.weight.bfloat16())
    model.hold_frozen_in(torch.bfloat16)
    assert model.embed_tokens.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert model.verifier_lm_head.weight.dtype == torch.float32
    trained = small_drafter(small_config(), train_head=True)
    with torch.no_grad():
        trained.lm_head.weight.copy_(trained.lm_head.weight.bfloat16())
    trained.hold_frozen_in(torch.bfloat16)
    assert trained.lm_head.weight.dtype == torch.float32


def test_held_matrices_give_the_same_loss_and_gradients() -> None:
    model, losses = small_drafter(small_config(), train_head=False), resolve_loss_config("kl_div", "eager")
    with torch.no_grad():
        for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
            module.weight.copy_(module.weight.bfloat16())
    batch = batch_of([torch.arange(20) >= 12, torch.arange(9) >= 3], 3)
    loss = model(batch, losses).loss
    expected = gradients(model, loss)
    model.hold_frozen_in(torch.bfloat16)
    held = model(batch, losses).loss
    assert torch.equal(held, loss)
    for name, value in gradients(model, held).items():
        assert torch.equal(value, expected[name]), name
