"""A self-test of the numerics in a few seconds: does this installation compute what the tests were run on?

What is tested is what training and serving rest on: matrix products, the supervised-row forward with its gradients
against speculators' own, and the exported files against the model that was exported. All on tiny random weights.
"""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from speculators.losses import resolve_loss_config
from speculators.models.attention import create_float_mask
from speculators.models.eagle3.core import Eagle3DraftModel

from eyas.draft.config import draft_config
from eyas.draft.model import Eagle3Drafter
from eyas.draft.rows import DraftBatch, plan_steps
from eyas.draft.vocab import Vocab
from eyas.export.reference import ReferenceDrafter
from eyas.export.vllm import export_vllm
from eyas.recipe import DraftPart, Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo, TensorRef
from eyas.train.trainer import final_weights, write_final

HIDDEN, TARGET_VOCAB, DRAFT_VOCAB, STEPS = 32, 96, 40, 3
AUX = [1, 2, 3]


@dataclass(frozen=True)
class Measured:
    """One difference between two ways to the same number."""

    name: str
    difference: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.allowed  # also false for NaN


def measure() -> list[Measured]:
    """Deterministic; takes no more than a few seconds and no memory to speak of."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [*_products(), *_drafter()]


def _products() -> list[Measured]:
    """[256, 1024] x [1024, 256] on the device that training will use, against float64: relative to the largest value.

    float32 must not be computed in a shorter format (TF32 would be 1e-4 and more off).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b = torch.randn(256, 1024), torch.randn(1024, 256)
    found = []
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x, y = a.to(dtype), b.to(dtype)
        true = x.double() @ y.double()
        off = ((x.to(device) @ y.to(device)).cpu().double() - true).abs().max() / true.abs().max()
        name = str(dtype).removeprefix("torch.")
        found.append(Measured(f"{name} matrix product on {device.type}", float(off), allowed))
    return found


def _drafter() -> list[Measured]:
    """Loss and gradients of the supervised-row forward, and the exported files, against speculators' own forward."""
    target, part = _target(), DraftPart.model_validate({"vocab_size": DRAFT_VOCAB, "aux_layers": AUX})
    config = draft_config(target, part, STEPS)
    vocab, model = _vocab(), Eagle3Drafter(config).float()
    model.load_vocab_mappings(vocab.t2d, vocab.d2t)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(0.5 + torch.rand_like(p) if "norm" in name else 0.3 * torch.randn_like(p))
    batch = _batch()
    ours = model(batch, resolve_loss_config("kl_div", "eager")).loss
    gradients = _gradients(model, ours)
    theirs, logits = _speculators(model, batch)
    expected = _gradients(model, theirs)
    worst = max(_off(gradients[name], g) for name, g in expected.items()) if gradients.keys() == expected.keys() else 1
    with tempfile.TemporaryDirectory(prefix="eyas-selftest-") as root:
        run = RunDir(Path(root))
        write_final(final_weights(model), config, vocab, run.train / "final")
        recipe = Recipe.model_validate(
            {
                "run_dir": root,
                "target": {"path": root},
                "data": {"prompts": ["none"]},
                "engine": {"dtype": "float32"},
            }
        )
        reference = ReferenceDrafter(export_vllm(run, target, recipe), model.embed_tokens.weight.detach())
    first = int((batch.document_ids[0] == 0).sum())
    prefix = reference.prefill(batch.input_ids[0, :first], batch.aux_states[0, :first], batch.position_ids[0, :first])
    return [
        Measured("loss of the supervised-row forward", _off(ours, theirs), 1e-5),
        Measured("its gradients, worst tensor", worst, 1e-4),
        Measured("exported drafter, logits", _off(reference.logits(prefix.logits_input), logits[:first]), 1e-4),
    ]


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest expected value."""
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def _gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _speculators(model: Eagle3Drafter, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of `Eagle3DraftModel.forward` on the same weights, and its first step's logits [N, draft vocabulary]."""
    model._create_mask_fn = partial(create_float_mask, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.detach()[0]))
    try:
        _, loss, _ = Eagle3DraftModel.forward(
            model,
            hidden_states=batch.aux_states,
            input_ids=batch.input_ids,
            document_ids=batch.document_ids,
            loss_mask=batch.label_mask.clone(),
            position_ids=batch.position_ids,
            verifier_last_hidden_states=batch.last_states,
            ttt_steps=STEPS,
            ttt_step_loss_decay=1.0,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    finally:
        hook.remove()
    return loss, seen[0]


def _batch() -> DraftBatch:
    """Two documents, of which the second half is supervised."""
    lengths = (24, 17)
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    mask = torch.cat([torch.arange(n) >= n // 2 for n in lengths])
    position = torch.cat([torch.arange(1, n + 1) for n in lengths])
    total = sum(lengths)
    return DraftBatch(
        input_ids=torch.randint(0, TARGET_VOCAB, (1, total)),
        label_ids=torch.randint(0, TARGET_VOCAB, (1, total)),
        aux_states=torch.randn(1, total, len(AUX) * HIDDEN),
        last_states=2 * torch.randn(1, total, HIDDEN),
        document_ids=document[None],
        position_ids=position[None],
        label_mask=mask[None],
        plan=plan_steps(document, mask, STEPS, nested=True),
        tokens=total,
    )


def _vocab() -> Vocab:
    """Every second target token."""
    kept = 2 * torch.arange(DRAFT_VOCAB)
    t2d = torch.zeros(TARGET_VOCAB, dtype=torch.bool)
    t2d[kept] = True
    return Vocab(kept - torch.arange(DRAFT_VOCAB), t2d, 1.0, "selftest")


def _target() -> TargetInfo:
    """A target that exists on paper only."""
    nowhere = TensorRef("none", Path("none"), (TARGET_VOCAB, HIDDEN), "F32")
    return TargetInfo(
        path=Path("none"),
        architecture="LlamaForCausalLM",
        text_architecture="LlamaForCausalLM",
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=TARGET_VOCAB,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        attention="gqa",
        sliding_window=None,
        quantization=None,
        embedding=nowhere,
        head=nowhere,
        final_norm=nowhere,
        norm_plus_one=False,
        logit_softcap=None,
        logit_scale=1.0,
        embedding_scale=1.0,
        eos_token_ids=(2,),
        fingerprint="selftest",
    )
