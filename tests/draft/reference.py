"""Small drafters and batches, and speculators' own forward on them: the reference of the tests beside this file."""

from collections.abc import Sequence
from typing import Any

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.attention import create_float_mask
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from eyas.draft.model import Eagle3Drafter
from eyas.draft.rows import DraftBatch, plan_steps

HIDDEN, VOCAB, DRAFT_VOCAB, AUX = 32, 96, 40, 3


def small_config(
    *,
    layers: int = 1,
    eagle31: bool = False,
    fc_norm: bool = False,
    window: int | None = None,
    draft_vocab: int = DRAFT_VOCAB,
) -> Eagle3SpeculatorConfig:
    layer = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    layer._attn_implementation = "eager"
    if window is not None:
        layer.sliding_window = window
        layer.layer_types = ["sliding_attention"] * layers
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab,
        norm_before_residual=not fc_norm,
        norm_before_fc=eagle31,
        norm_output=eagle31,
        fc_norm=fc_norm,
        eagle_aux_hidden_state_layer_ids=list(range(1, AUX + 1)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )


def small_drafter(config: Eagle3SpeculatorConfig, *, train_head: bool = True, seed: int = 0) -> Eagle3Drafter:
    """Random weights everywhere, norms included; every second target token is in the draft vocabulary, or all."""
    torch.manual_seed(seed)
    model = Eagle3Drafter(config).float()
    with torch.no_grad():
        model.embed_tokens.weight.normal_(0, 0.5)
        model.lm_head.weight.normal_(0, 0.3)
        model.verifier_lm_head.weight.normal_(0, 0.3)
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    if model.t2d is not None:
        ids = torch.arange(config.draft_vocab_size) * 2
        model.t2d.zero_()
        model.t2d[ids] = True
        model.d2t.copy_(ids - torch.arange(len(ids)))
    model.lm_head.weight.requires_grad_(train_head)
    return model


def batch_of(
    masks: Sequence[torch.Tensor], steps: int, *, padding: int = 0, nested: bool = True, seed: int = 1
) -> DraftBatch:
    """Random documents with these label masks, one after another; `padding` rows of document -1 at the end."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(m.numel() for m in masks)
    total = n + padding
    document = torch.cat([torch.full((m.numel(),), i) for i, m in enumerate(masks)] + [torch.full((padding,), -1)])
    position = torch.cat([torch.arange(1, m.numel() + 1) for m in masks] + [torch.zeros(padding, dtype=torch.long)])
    mask = torch.cat([*[m.bool() for m in masks], torch.zeros(padding, dtype=torch.bool)])
    return DraftBatch(
        input_ids=torch.randint(0, VOCAB, (1, total), generator=generator),
        label_ids=torch.randint(0, VOCAB, (1, total), generator=generator),
        aux_states=torch.randn(1, total, AUX * HIDDEN, generator=generator),
        last_states=2 * torch.randn(1, total, HIDDEN, generator=generator),
        document_ids=document[None],
        position_ids=position[None],
        label_mask=mask[None],
        plan=plan_steps(document, mask, steps, nested=nested),
        tokens=n,
    )


def speculators_forward(
    model: Eagle3Drafter, batch: DraftBatch, steps: int, loss: str = "kl_div", decay: float = 1.0
) -> tuple[torch.Tensor, dict[str, Any]]:
    """`Eagle3DraftModel.forward` with the same weights, in float32."""
    model._create_mask_fn = lambda *args, **kwargs: create_float_mask(*args, dtype=torch.float32, **kwargs)
    _, value, metrics = Eagle3DraftModel.forward(
        model,
        hidden_states=batch.aux_states,
        input_ids=batch.input_ids,
        document_ids=batch.document_ids,
        loss_mask=batch.label_mask.clone(),
        position_ids=batch.position_ids,
        verifier_last_hidden_states=batch.last_states,
        ttt_steps=steps,
        ttt_step_loss_decay=decay,
        loss_config=resolve_loss_config(loss, "eager"),
    )
    return value, metrics


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
