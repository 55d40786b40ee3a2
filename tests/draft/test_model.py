"""The supervised-rows forward against speculators' own: loss, every gradient, and where the two must differ."""

from itertools import pairwise

import pytest
import torch
from speculators.losses import resolve_loss_config

from eyas.draft.attention import DenseAttention, FlexAttention
from eyas.draft.loss import CHUNK_ELEMENTS, loss_config
from eyas.draft.rows import plan_steps
from eyas.errors import InputError

from .reference import (
    DRAFT_VOCAB,
    VOCAB,
    batch_of,
    gradients,
    small_config,
    small_drafter,
    speculators_forward,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tail(n: int, supervised: int) -> torch.Tensor:
    return torch.arange(n) >= n - supervised


def scattered(n: int, quiet: int, seed: int) -> torch.Tensor:
    mask = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[:quiet] = False
    mask[-1] = True
    return mask


def one_document(pattern: str) -> list[torch.Tensor]:
    n = 40
    turns = torch.zeros(n, dtype=torch.bool)
    turns[9:14] = turns[25:33] = True
    lone = torch.zeros(n, dtype=torch.bool)
    lone[20] = True
    return [
        {"tail": tail(n, 15), "all": torch.ones(n), "turns": turns, "lone": lone, "scattered": scattered(n, 0, 3)}[
            pattern
        ]
    ]


def several_documents(steps: int) -> list[torch.Tensor]:
    """No label row within the first steps - 1 rows of a document: there speculators does not cross documents."""
    return [tail(20, 9), scattered(24, steps, 5), torch.zeros(10), tail(17, 17 - steps)]


def compare(model, batch, steps, loss="kl_div", decay=1.0) -> None:
    theirs, _ = speculators_forward(model, batch, steps, loss, decay)
    expected = gradients(model, theirs)
    ours = model(batch, resolve_loss_config(loss, "eager"), decay=decay).loss
    found = gradients(model, ours)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm()
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize("eagle31", [False, True], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("pattern", ["tail", "all", "turns", "lone", "scattered"])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_one_document_equals_speculators(steps, pattern, layers, eagle31):
    model = small_drafter(small_config(layers=layers, eagle31=eagle31))
    compare(model, batch_of(one_document(pattern), steps), steps)


@pytest.mark.parametrize("eagle31", [False, True], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_several_documents_equal_speculators(steps, layers, eagle31):
    model = small_drafter(small_config(layers=layers, eagle31=eagle31))
    compare(model, batch_of(several_documents(steps), steps, padding=5), steps)


@pytest.mark.parametrize("loss", ["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid", '{"ce": 0.1, "tv": 0.9}'])
def test_every_loss_equals_speculators(loss):
    compare(small_drafter(small_config()), batch_of(several_documents(3), 3), 3, loss, decay=0.8)


@pytest.mark.parametrize("layers", [1, 2])
def test_sliding_window_and_fc_norm_equal_speculators(layers):
    compare(small_drafter(small_config(layers=layers, window=6)), batch_of(several_documents(3), 3), 3)
    compare(small_drafter(small_config(layers=layers, fc_norm=True)), batch_of(several_documents(3), 3), 3)


def test_frozen_head_gets_no_gradient():
    model = small_drafter(small_config(), train_head=False)
    batch = batch_of(several_documents(3), 3)
    compare(model, batch, 3)
    assert model.lm_head.weight.grad is None


def test_small_chunks_and_small_blocks_give_the_same(monkeypatch):
    model = small_drafter(small_config())
    batch = batch_of(several_documents(3), 3)
    expected = gradients(model, model(batch, resolve_loss_config("kl_div", "eager")).loss)
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 4 * DRAFT_VOCAB)
    monkeypatch.setattr("eyas.draft.attention.QUERIES_AT_ONCE", 5)
    out = model(batch, resolve_loss_config("kl_div", "eager"))
    found = gradients(model, out.loss)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_one_row_set_for_all_steps_gives_the_same():
    model = small_drafter(small_config(layers=2))
    nested, flat = (batch_of(several_documents(3), 3, nested=x) for x in (True, False))
    losses = resolve_loss_config("kl_div", "eager")
    expected = gradients(model, model(nested, losses).loss)
    found = gradients(model, model(flat, losses).loss)
    assert flat.plan.rows[0] is flat.plan.rows[2]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_labels_do_not_cross_documents_where_speculators_lets_them():
    """All rows supervised: at step 1 speculators trains a document's last row on the next document's first label."""
    model = small_drafter(small_config())
    masks, losses = [torch.ones(12), torch.ones(9)], resolve_loss_config("kl_div", "eager")
    both = batch_of(masks, 3)
    ours = model(both, losses)
    theirs, _ = speculators_forward(model, both, 3)
    assert abs(ours.loss - theirs).item() > 1e-3
    # the truth: each document alone, where nothing can cross, weighted by its number of label rows at each step
    ends = [0, 12, 21]
    sums = torch.zeros(3)
    for a, b in pairwise(ends):
        mask = torch.ones(b - a, dtype=torch.bool)
        alone = batch_of([mask], 3)
        cut = {
            name: getattr(both, name)[:, a:b]
            for name in ("input_ids", "label_ids", "aux_states", "last_states", "position_ids", "label_mask")
        }
        alone = type(alone)(**cut, document_ids=both.document_ids[:, a:b] * 0, plan=alone.plan, tokens=b - a)
        _, metrics = speculators_forward(model, alone, 3)
        sums += torch.tensor([float(metrics[f"loss_{k}_sum"]) * (b - a - k) for k in range(3)])
    truth = sum(sums[k] / (12 - k + 9 - k) for k in range(3))
    torch.testing.assert_close(ours.loss.detach(), truth, rtol=1e-5, atol=0)


def test_step_rows_are_those_of_this_and_later_labels():
    document = torch.tensor([0] * 8 + [1] * 4 + [-1] * 2)
    mask = torch.zeros(14, dtype=torch.bool)
    mask[[5, 9]] = True
    plan = plan_steps(document, mask, 3, nested=True)
    # row 7 would reach label 9 at step 2, but lies in another document
    assert [x.tolist() for x in plan.rows] == [[3, 4, 5, 8, 9], [3, 4, 8], [3]]
    assert [plan.rows[k][plan.loss_at[k]].tolist() for k in range(3)] == [[5, 9], [4, 8], [3]]
    assert [plan.labels[x].tolist() for x in plan.label_at] == [[5, 9], [5, 9], [5]]
    assert plan.counts.tolist() == [2, 2, 1]
    assert plan.edges[2] == [0, 1, 1]


def test_unsupervised_rows_do_not_count():
    model = small_drafter(small_config())
    batch = batch_of([tail(20, 6)], 3)
    losses = resolve_loss_config("kl_div", "eager")
    before = model(batch, losses)
    batch.last_states[0, :14] = 1e4  # teacher states of rows without a label
    batch.label_ids[0, :14] = 0
    after = model(batch, losses)
    assert torch.equal(before.loss, after.loss)
    assert torch.equal(before.counts.stack(), after.counts.stack())


def test_pack_without_labels_has_a_zero_loss_that_reaches_every_weight():
    model = small_drafter(small_config())
    out = model(batch_of([torch.zeros(9)], 3), resolve_loss_config("kl_div", "eager"))
    out.loss.backward()
    assert out.loss.item() == 0
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, name
            assert not p.grad.any(), name


def test_denominators_replace_the_packs_own_counts():
    model = small_drafter(small_config())
    losses = resolve_loss_config("kl_div", "eager")
    one, two = batch_of([tail(20, 6)], 2), batch_of([tail(15, 9)], 2, seed=7)
    total = one.plan.counts + two.plan.counts
    split = sum(model(b, losses, denominators=total).loss for b in (one, two))
    counts = model(one, losses).counts + model(two, losses).counts
    torch.testing.assert_close(split.detach(), (counts.loss / (counts.rows + 1e-5)).sum())


def test_counts_by_hand():
    """Draft and teacher always say the same token: only unknown tokens and the end of the labels stop a draft."""
    model = small_drafter(small_config())
    steps, n = 3, 10
    batch = batch_of([tail(n, 5)], steps)
    losses = resolve_loss_config("kl_div", "eager")
    batch.label_ids[:] = 0  # token 0 is in the draft vocabulary
    with torch.no_grad():
        model.verifier_lm_head.weight.zero_()
        model.lm_head.weight.zero_()  # both always say draft token 0
    counts = model(batch, losses).counts
    assert counts.rows.tolist() == counts.agree.tolist() == [5, 5, 5]
    # starts are label rows 5..9; step k of start t needs label t + k <= 9
    assert counts.reached.tolist() == counts.accepted.tolist() == [5, 4, 3]
    batch.label_ids[0, 7] = 1  # not in the draft vocabulary
    counts = model(batch, losses).counts
    assert counts.agree.tolist() == [5, 5, 5]
    # start 7 fails at once, start 6 at step 1, start 5 at step 2; starts 8 and 9 run out of labels
    assert counts.accepted.tolist() == [4, 2, 0]
    assert counts.reached.tolist() == [5, 3, 1]


def test_agreement_equals_speculators_full_accuracy():
    model = small_drafter(small_config(draft_vocab=8))
    batch = batch_of([tail(60, 50)], 3)
    counts = model(batch, resolve_loss_config("kl_div", "eager")).counts
    _, metrics = speculators_forward(model, batch, 1)
    assert counts.agree[0] == metrics["full_acc_0_sum"]
    assert counts.rows[0] == metrics["full_acc_0_total"]


def test_teacher_scale_and_softcap():
    model = small_drafter(small_config())
    y = torch.randn(4, 32)
    plain = model.teacher_logits(y)
    model.teacher_scale, model.teacher_softcap = 0.5, 3.0
    torch.testing.assert_close(model.teacher_logits(y), 3 * torch.tanh(plain * 0.5 / 3))


def test_teacher_with_layer_norm_and_biases():
    model = small_drafter(small_config())
    y, bias, head_bias = torch.randn(4, 32) + 1, torch.randn(32), torch.randn(DRAFT_VOCAB)
    model.teacher_centers, model.teacher_norm_bias, model.teacher_head_bias = True, bias, head_bias
    normed = torch.nn.functional.layer_norm(y, (32,), model.verifier_norm.weight, bias, 1e-5)
    expected = normed @ model.verifier_lm_head.weight.t() + head_bias
    torch.testing.assert_close(model.teacher_logits(y), expected)


def test_noise_only_while_training():
    model = small_drafter(small_config())
    batch, losses = batch_of([tail(20, 6)], 2), resolve_loss_config("kl_div", "eager")
    quiet = model.train()(batch, losses).loss
    assert model(batch, losses, noise=0.5).loss != quiet
    assert model.eval()(batch, losses, noise=0.5).loss == quiet


def test_full_vocabulary_needs_no_map():
    compare(small_drafter(small_config(draft_vocab=VOCAB)), batch_of([tail(20, 6)], 2), 2)


def test_unknown_loss_is_refused():
    with pytest.raises(InputError, match=r"train\.loss.*'mse'"):
        loss_config("mse", torch.device("cpu"))


def test_dense_attention_without_rows():
    attention = DenseAttention(torch.zeros(4, dtype=torch.long))
    q, kv = torch.zeros(0, 4, 8), (torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))
    assert attention(q, torch.zeros(0, dtype=torch.long), kv, [], None).shape == (0, 4, 8)


@pytest.mark.parametrize("window", [None, 6])
def test_flex_attention_equals_dense(monkeypatch, window):
    """Forward only and uncompiled: on the CPU flex attention has no backward."""
    monkeypatch.setattr("eyas.draft.attention._compiled", lambda function: function)
    batch = batch_of(several_documents(3), 3, padding=5, nested=False)
    documents, rows = batch.document_ids[0], batch.plan.rows[0]
    generator = torch.Generator().manual_seed(0)
    first = tuple(torch.randn(documents.numel(), 2, 16, generator=generator) for _ in range(2))
    later = [tuple(torch.randn(rows.numel(), 2, 16, generator=generator) for _ in range(2)) for _ in range(2)]
    q = torch.randn(rows.numel(), 4, 16, generator=generator)
    dense, flex = DenseAttention(documents), FlexAttention(documents)
    with torch.no_grad():
        for j in range(3):
            torch.testing.assert_close(
                flex(q, rows, first, later[:j], window), dense(q, rows, first, later[:j], window)
            )
