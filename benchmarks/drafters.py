"""Drafters with random weights, at the shapes that the benchmarks of training measure."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

M = TypeVar("M", bound=Eagle3DraftModel)


@dataclass(frozen=True)
class Shape:
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    tokens: int
    """of one pack"""
    document: int
    """mean tokens of a document"""


def config(shape: Shape, implementation: str, rope_theta: float) -> Eagle3SpeculatorConfig:
    layer = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=1,
        vocab_size=shape.vocab,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
    )
    layer._attn_implementation = implementation
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.draft_vocab,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )


def build(kind: type[M], shape: Shape, config: Eagle3SpeculatorConfig, device: torch.device) -> M:
    """Float32, the same on every rank, the frozen weights rounded to bf16; the draft vocabulary is the first tokens."""
    torch.manual_seed(0)
    with torch.device(device):
        model = kind(config).float()
    with torch.no_grad():
        model.embed_tokens.weight.normal_(0, 0.5)
        model.lm_head.weight.normal_(0, 0.05)
        model.verifier_lm_head.weight.copy_(model.lm_head.weight)
        model.t2d[: shape.draft_vocab] = True
    for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        frozen.weight.requires_grad_(False)
        frozen.weight.copy_(frozen.weight.bfloat16())
    return model
