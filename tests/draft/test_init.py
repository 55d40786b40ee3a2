"""A drafter's first weights: the target's own from the target, the teacher is the target, nothing stays NaN."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas.draft.config import draft_config
from eyas.draft.init import init_drafter, load_drafter
from eyas.draft.vocab import Vocab
from eyas.errors import EyasError, InputError
from eyas.recipe import DraftPart
from eyas.target.info import TargetInfo, TensorRef
from eyas.target.teacher import Teacher
from eyas.target.weights import load_embedding, load_head
from train.tiny_run import DRAFT_VOCAB, HIDDEN, VOCAB, tiny_target

PART = DraftPart(vocab_size=DRAFT_VOCAB, aux_layers=[2, 3, 4])


def some_vocab() -> Vocab:
    ids = torch.arange(DRAFT_VOCAB) * 2 + 1
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return Vocab(ids - torch.arange(DRAFT_VOCAB), t2d, 1.0, "f")


def drafter(target: TargetInfo, **options):
    return init_drafter(draft_config(target, PART, 3), some_vocab(), target, **options)


def test_target_weights_are_in_place(tmp_path: Path):
    target, vocab = tiny_target(tmp_path), some_vocab()
    model = drafter(target)
    assert torch.equal(model.embed_tokens.weight, load_embedding(target))
    assert torch.equal(model.lm_head.weight, load_head(target, vocab.target_ids))
    assert torch.equal(model.d2t, vocab.d2t)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    trained = {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"fc", "layers", "norm"}
    assert drafter(target, train_head=True).lm_head.weight.requires_grad


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize(
    "convention",
    [
        {},
        {"norm_plus_one": True, "logit_softcap": 5.0},
        {"logit_scale": 0.25, "norm_kind": "layer", "final_norm_bias": True, "head_bias": True},
    ],
    ids=["llama", "gemma", "cohere"],
)
def test_teacher_is_the_target(tmp_path: Path, convention, train_head):
    biases = tmp_path / "biases.safetensors"
    save_file({"n": torch.randn(HIDDEN), "h": torch.randn(VOCAB)}, biases)
    refs = {
        "final_norm_bias": TensorRef("n", biases, (HIDDEN,), "F32"),
        "head_bias": TensorRef("h", biases, (VOCAB,), "F32"),
    }
    target = tiny_target(tmp_path, **{k: refs.get(k, v) for k, v in convention.items()})
    last = 10 * torch.randn(20, HIDDEN)
    expected = Teacher(target, some_vocab().target_ids).logits(last)
    torch.testing.assert_close(drafter(target, train_head=train_head).teacher_logits(last), expected)


def test_same_seed_same_layers(tmp_path: Path):
    target = tiny_target(tmp_path)
    assert torch.equal(drafter(target, seed=1).fc.weight, drafter(target, seed=1).fc.weight)
    assert not torch.equal(drafter(target, seed=1).fc.weight, drafter(target, seed=2).fc.weight)


def test_wrong_vocabulary_is_refused(tmp_path: Path):
    target = tiny_target(tmp_path)
    config = draft_config(target, DraftPart(vocab_size=20, aux_layers=[2, 3, 4]), 3)
    with pytest.raises(InputError, match="maps 24 draft to 64 target tokens, expected 20 and 64"):
        init_drafter(config, some_vocab(), target)


def test_wrong_shape_in_the_target_is_refused(tmp_path: Path):
    target = tiny_target(tmp_path)
    file = tmp_path / "other.safetensors"
    save_file({"norm": torch.ones(HIDDEN + 1)}, file)
    broken = tiny_target(tmp_path, final_norm=TensorRef("norm", file, (HIDDEN + 1,), "F32"))
    with pytest.raises(EyasError, match=r"verifier_norm\.weight has shape \[33\], expected \[32\]"):
        init_drafter(draft_config(target, PART, 3), some_vocab(), broken)


@pytest.mark.parametrize("flat", [False, True])
def test_start_from_a_drafter(tmp_path: Path, flat):
    target = tiny_target(tmp_path)
    old, new = drafter(target, seed=1, train_head=True), drafter(target, seed=2, train_head=True)
    with torch.no_grad():
        old.lm_head.weight.add_(1)
    tensors = {n: p.detach() for n, p in old.named_parameters() if p.requires_grad} | {"d2t": old.d2t}
    if flat:
        tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    (tmp_path / "old").mkdir()
    save_file(tensors, tmp_path / "old" / "model.safetensors")
    load_drafter(new, tmp_path / "old")
    for (name, a), b in zip(new.named_parameters(), old.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_head_of_another_vocabulary_is_not_taken(tmp_path: Path):
    target = tiny_target(tmp_path)
    old, new = drafter(target, seed=1, train_head=True), drafter(target, seed=2, train_head=True)
    head = new.lm_head.weight.clone()
    tensors = {n: p.detach() + 1 for n, p in old.named_parameters() if p.requires_grad} | {"d2t": old.d2t * 0}
    (tmp_path / "old").mkdir()
    save_file(tensors, tmp_path / "old" / "model.safetensors")
    load_drafter(new, tmp_path / "old")
    assert torch.equal(new.lm_head.weight, head)
    assert torch.equal(new.norm.weight, old.norm.weight + 1)


def test_an_unfitting_drafter_is_refused(tmp_path: Path):
    model = drafter(tiny_target(tmp_path))
    with pytest.raises(InputError, match=r"draft\.from: .* does not exist"):
        load_drafter(model, tmp_path / "none")
    (tmp_path / "old").mkdir()
    save_file({"fc.weight": torch.zeros(3, 3)}, tmp_path / "old" / "model.safetensors")
    with pytest.raises(InputError, match=r"does not fit.*fc\.weight is \[3, 3\], expected \[32, 96\]"):
        load_drafter(model, tmp_path / "old")
