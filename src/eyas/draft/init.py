"""A drafter ready for training: new layers or an existing drafter's; embedding, heads and norm from the target."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig

from eyas.draft.model import Eagle3Drafter
from eyas.draft.start import WEIGHTS, speculators_name, weight_misfits
from eyas.draft.vocab import Vocab
from eyas.errors import EyasError, InputError
from eyas.target.info import TargetInfo
from eyas.target.weights import load_embedding, load_final_norm, load_head, load_weight


def init_drafter(
    config: Eagle3SpeculatorConfig, vocab: Vocab, target: TargetInfo, *, train_head: bool = False, seed: int = 0
) -> Eagle3Drafter:
    """A float32 drafter on the CPU: new layers from `seed`; embedding, teacher and head from the target.

    The teacher is exactly the target restricted to the draft vocabulary: 1 + w norms are folded into the weight, logit
    scale and soft cap are applied. The draft head starts as the target's rows times the logit scale. Raises EyasError
    if anything that should come from the target is missing, of another shape or not finite.
    """
    if vocab.size != config.draft_vocab_size or vocab.t2d.numel() != target.vocab_size:
        raise InputError(
            f"the vocabulary maps {vocab.size:,} draft to {vocab.t2d.numel():,} target tokens, expected "
            f"{config.draft_vocab_size:,} and {target.vocab_size:,}",
            fix="run `eyas vocab RECIPE` again",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Eagle3Drafter(config).float()
    model.load_vocab_mappings(vocab.t2d, vocab.d2t)
    norm = load_final_norm(target)
    head = load_head(target, vocab.target_ids)
    _fill(model.embed_tokens.weight, load_embedding(target), "embed_tokens.weight", target)
    _fill(model.verifier_norm.weight, norm + 1 if target.norm_plus_one else norm, "verifier_norm.weight", target)
    _fill(model.lm_head.weight, head * target.logit_scale, "lm_head.weight", target)
    model.teacher_softcap = target.logit_softcap
    model.teacher_centers = target.norm_kind == "layer"
    if target.final_norm_bias is not None:
        model.teacher_norm_bias = load_weight(target.final_norm_bias)
    if target.head_bias is not None:
        model.teacher_head_bias = load_weight(target.head_bias, vocab.target_ids)
    if train_head or target.logit_scale != 1.0:
        _fill(model.verifier_lm_head.weight, head, "verifier_lm_head.weight", target)
        model.teacher_scale = target.logit_scale
    else:
        model.verifier_lm_head.weight = model.lm_head.weight  # the same numbers, kept once
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for frozen in (model.embed_tokens, model.verifier_norm, model.verifier_lm_head):
        frozen.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(train_head)
    check_finite(model)
    return model


def load_drafter(model: Eagle3Drafter, path: Path) -> None:
    """Starts `model` from an existing drafter's weights (speculators' names or vLLM's flat ones).

    Its head is taken over only if it has the same draft vocabulary and the head is trained. Raises InputError.
    """
    weights = path / WEIGHTS
    if not weights.is_file():
        raise InputError(f"draft.from: {weights} does not exist", fix=f"give a directory with one {WEIGHTS}")
    try:
        found = {speculators_name(name): value for name, value in load_file(weights).items()}
    except SafetensorError as e:
        again = "copy or download it again, or leave draft.from out"
        raise InputError(f"draft.from: {weights} is damaged: {e}", fix=again) from None
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if "lm_head.weight" in wanted and not _same_vocab(model, found):
        del wanted["lm_head.weight"]
    shapes = ({name: value.shape for name, value in tensors.items()} for tensors in (found, wanted))
    for wrong in weight_misfits(weights, *shapes):
        raise wrong
    with torch.no_grad():
        for name, p in wanted.items():
            p.copy_(found[name])
    bad = [name for name, p in wanted.items() if not bool(torch.isfinite(p).all())]
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise InputError(
            f"draft.from: {weights} holds NaN or infinite values in {', '.join(bad[:4])}{more}",
            fix="start from another drafter or an earlier checkpoint of it, or leave draft.from out",
        )


def check_finite(model: Eagle3Drafter) -> None:
    """Raises EyasError naming every weight that holds NaN or infinite values."""
    bad = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    if bad:
        raise EyasError(f"the drafter's weights are not finite or were never loaded: {', '.join(bad)}")


def _fill(parameter: torch.Tensor, value: torch.Tensor, name: str, target: TargetInfo) -> None:
    if parameter.shape != value.shape:
        raise EyasError(
            f"{target.path}: the target's tensor for {name} has shape {list(value.shape)}, "
            f"expected {list(parameter.shape)}"
        )
    if not bool(torch.isfinite(value).all()):
        raise EyasError(f"{target.path}: the target's tensor for {name} holds NaN or infinite values")
    with torch.no_grad():
        parameter.copy_(value)


def _same_vocab(model: Eagle3Drafter, found: dict[str, torch.Tensor]) -> bool:
    if model.d2t is None:
        return "d2t" not in found
    return "d2t" in found and torch.equal(found["d2t"].cpu().long(), model.d2t.cpu())
