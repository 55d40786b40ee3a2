"""A tiny random drafter, saved as training saves it, and the target that it belongs to."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo, TensorRef

HIDDEN, VOCAB, DRAFT_VOCAB, TARGET_LAYERS = 32, 64, 20, 6
AUX = [1, 3, 5]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}


def target_info(path: Path, **changes: Any) -> TargetInfo:
    tensor = TensorRef("embed", path / "model.safetensors", (VOCAB, HIDDEN), "F32")
    values: dict[str, Any] = {
        "path": path,
        "architecture": "LlamaForCausalLM",
        "text_architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPES["default"],
        "attention": "gqa",
        "sliding_window": None,
        "quantization": None,
        "embedding": tensor,
        "head": tensor,
        "final_norm": tensor,
        "norm_plus_one": False,
        "logit_softcap": None,
        "logit_scale": 1.0,
        "embedding_scale": 1.0,
        "eos_token_ids": (2,),
        "fingerprint": "0",
    }
    return TargetInfo(**{**values, **changes})


def recipe(run: RunDir, **parts: Any) -> Recipe:
    values: dict[str, Any] = {
        "run_dir": str(run.root),
        "target": {"path": "org/tiny"},
        "data": {"prompts": ["p.jsonl"]},
        "engine": {"dtype": "float32"},
    }
    return Recipe.model_validate({**values, **parts})


def config(
    *, rope: str = "default", layers: int = 1, draft_vocab: int = DRAFT_VOCAB, **options: Any
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
        rope_parameters=dict(ROPES[rope]),
        attn_implementation="eager",
    )
    options = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": AUX, **options}
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="/home/me/tiny", architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )


def model(made: Eagle3SpeculatorConfig) -> Eagle3DraftModel:
    """Random weights everywhere, norms included; a spread vocabulary map."""
    torch.manual_seed(7)
    drafter = Eagle3DraftModel(made).float().eval()
    kept = torch.randperm(VOCAB)[: made.draft_vocab_size].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    if made.draft_vocab_size < VOCAB:
        drafter.load_vocab_mappings(t2d, kept - torch.arange(made.draft_vocab_size))
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if p.ndim == 1 else 0.2 * torch.randn_like(p))
            if name == "embed_tokens.weight":
                p.copy_(torch.randn_like(p))
    return drafter


def trained_tensors(drafter: Eagle3DraftModel) -> dict[str, torch.Tensor]:
    skipped = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.", "rotary_emb.")
    return {n: t.detach().clone() for n, t in drafter.state_dict().items() if not n.startswith(skipped)}


def save_trained(run: RunDir, made: Eagle3SpeculatorConfig, tensors: dict[str, torch.Tensor]) -> None:
    final = run.train / "final"
    made.save_pretrained(final)
    save_file({n: t.contiguous() for n, t in tensors.items()}, final / "model.safetensors")
