"""A run directory with a small synthetic harvest, a target of a few tensors, and a recipe for them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from eyas.data.schema import HARVESTED
from eyas.draft.vocab import build_vocab
from eyas.recipe import Recipe
from eyas.rundir import RunDir
from eyas.states.shard import ShardSample, write_shard
from eyas.target.info import TargetInfo, TensorRef

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 32, 64, 24, 6
STORED = [2, 3, 4, 6]


def tiny_target(directory: Path, **changes: Any) -> TargetInfo:
    """Embedding, head and final norm with fixed random values; no model."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": 0.5 * torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator),
    }
    save_file(tensors, file)
    refs = {name: TensorRef(name, file, tuple(t.shape), "F32") for name, t in tensors.items()}
    facts: dict[str, Any] = {
        "path": directory,
        "architecture": "LlamaForCausalLM",
        "text_architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention": "gqa",
        "sliding_window": None,
        "quantization": None,
        "embedding": refs["model.embed_tokens.weight"],
        "head": refs["lm_head.weight"],
        "final_norm": refs["model.norm.weight"],
        "norm_plus_one": False,
        "logit_softcap": None,
        "logit_scale": 1.0,
        "embedding_scale": 1.0,
        "eos_token_ids": (1,),
        "fingerprint": "tiny",
    }
    return TargetInfo(**{**facts, **changes})


def tiny_harvest(run: RunDir, *, train: int = 9, holdout: int = 3, seed: int = 0, name: str = "part-0") -> None:
    """Samples of 8 to 24 tokens, most of them answer; states are a fixed function of the tokens, hence learnable."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, len(STORED), HIDDEN, generator=torch.Generator().manual_seed(17))
    samples, rows = [], []
    for i in range(train + holdout):
        n = int(torch.randint(8, 25, (1,), generator=generator))
        prompt = int(torch.randint(2, 5, (1,), generator=generator))
        tokens = torch.randint(2, VOCAB // 2, (n,), generator=generator)
        samples.append(ShardSample(table[tokens[:-1]], tokens, prompt, 0))
        mask = torch.arange(n) >= prompt
        rows.append(
            {
                "id": f"{name}-{i}/0",
                "conversation": f"{name}-{i}",
                "turn": 0,
                "source": "tiny",
                "split": "train" if i < train else "holdout",
                "token_ids": tokens.tolist(),
                "prompt_length": prompt,
                "loss_mask": mask.tolist(),
                "logprobs": [-1.0] * int(mask.sum()),
                "finish_reason": "stop",
                "shard": f"{name}.safetensors",
                "index": i,
                "rows": n - 1,
                "supervised": int(mask.sum()),
            }
        )
    run.states.mkdir(parents=True, exist_ok=True)
    run.samples.mkdir(parents=True, exist_ok=True)
    write_shard(run.states / f"{name}.safetensors", STORED, samples, [r["id"] for r in rows])
    pq.write_table(pa.Table.from_pylist(rows, schema=HARVESTED), run.samples / f"{name}.parquet")


def tiny_recipe(root: Path, **train: Any) -> Recipe:
    settings = {"ttt_steps": 2, "epochs": 3, "tokens_per_batch": 48, "lr": 3e-3, "keep": 2, **train}
    draft = settings.pop("draft", {})
    return Recipe.model_validate(
        {
            "run_dir": str(root),
            "target": {"path": str(root / "target")},
            "data": {"prompts": ["none.jsonl"]},
            "draft": {"vocab_size": DRAFT_VOCAB, "aux_layers": STORED[:3], **draft},
            "train": settings,
        }
    )


def tiny_run(root: Path) -> tuple[RunDir, TargetInfo]:
    """A run directory up to and with the vocabulary."""
    run = RunDir(root)
    tiny_harvest(run)
    build_vocab(run, VOCAB, DRAFT_VOCAB)
    return run, tiny_target(root / "target")
