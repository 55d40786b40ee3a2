"""The estimate against what an H200 measured, and a GPU that is too small, told with the settings that would fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.draft.config import draft_config
from eyas.draft.init import init_drafter
from eyas.draft.vocab import load_vocab
from eyas.errors import InputError
from eyas.recipe import Recipe
from eyas.report.costs import TrainingMemory, drafter_sizes, training_memory
from eyas.states.store import SampleRef
from eyas.target.info import TargetInfo
from eyas.train import trainer
from eyas.train.memory import Load, check_memory
from eyas.train.packing import Schedule

from .tiny_run import tiny_recipe, tiny_run, tiny_target

GIB = 1 << 30


@pytest.fixture
def kimi(tmp_path: Path) -> TargetInfo:
    facts = {"hidden_size": 7168, "intermediate_size": 18432, "head_dim": 128, "vocab_size": 163840}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 61, "dtype": "bfloat16"}
    return tiny_target(tmp_path, **facts, **heads)


def recipe(**train: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "run_dir": "run",
            "target": {"path": "target"},
            "data": {"prompts": ["p.jsonl"]},
            "draft": {"vocab_size": 32000, "aux_layers": [2, 30, 58]},
            "train": train,
        }
    )


def memory(target: TargetInfo, made: Recipe, **load: Any) -> TrainingMemory:
    return training_memory(target, made, drafter_sizes(target, made), cuda=True, **load)


@pytest.mark.parametrize(
    ("steps", "rows", "measured"),
    [(3, 2048, 12.6), (3, 4096, 13.75), (3, 8192, 17.67), (7, 2048, 15.37), (7, 4096, 19.11), (7, 8192, 28.0)],
)
def test_the_estimate_is_near_what_an_h200_measured(kimi, steps, rows, measured):
    """benchmarks/results/train_step-h200.json: without moments, and with a second copy of the head."""
    found = memory(kimi, recipe(ttt_steps=steps), rows=rows)
    assert (found.total - found.moments + 2 * 32000 * 7168) / GIB == pytest.approx(measured, rel=0.08)


def test_frozen_matrices_are_counted_as_they_are_held(kimi):
    frozen = (163840 + 32000) * 7168

    def held(target: TargetInfo, **train: Any) -> float:
        made = recipe(**train)
        trained = drafter_sizes(target, made).trainable
        found = memory(target, made)
        return (found.weights - found.gradients) / frozen - (0 if train else 2 * trained / frozen)

    assert held(kimi) == pytest.approx(2)
    assert held(kimi, compute="float32") == pytest.approx(4)
    assert held(replace(kimi, dtype="float16")) == pytest.approx(4)


def test_weights_are_those_of_the_model(tmp_path):
    run, target = tiny_run(tmp_path)
    made = tiny_recipe(tmp_path)
    model = init_drafter(draft_config(target, made.draft, 2), load_vocab(run), target)
    found = training_memory(target, made, drafter_sizes(target, made), cuda=False)
    norm = model.verifier_norm.weight.numel()  # too small to count
    assert found.weights == sum(4 * p.numel() for p in model.parameters()) - 4 * norm
    assert found.gradients == sum(4 * p.numel() for p in model.parameters() if p.requires_grad)


def test_sharding_divides_what_is_kept_between_steps(kimi):
    plain, sharded = (memory(kimi, recipe(sharding=how), ranks=8) for how in ("none", "fsdp"))
    assert sharded.moments == pytest.approx(plain.moments / 8, rel=1e-6)
    assert sharded.total < plain.total
    assert memory(kimi, recipe(sharding="fsdp"), ranks=1) == memory(kimi, recipe(), ranks=1)


@pytest.mark.parametrize(
    ("free", "ranks", "fix"),
    [
        (23, 1, r"^set train\.tokens_per_batch: \d+, or train\.ttt_steps: 2$"),
        (24, 8, r"tokens_per_batch: \d+, or train\.sharding: fsdp, or train\.ttt_steps: 1$"),
        (10, 8, r"^free the GPU, use a larger one"),
    ],
)
def test_too_small_a_gpu_is_refused_with_what_would_fit(kimi, free, ranks, fix):
    made, load = recipe(), Load(ranks, longest=2000, rows=8192)
    with pytest.raises(InputError, match=rf"training needs about .* GB \(weights .*\), {free * GIB / 1e9:.1f} GB") as e:
        check_memory(made, kimi, load, free * GIB)
    assert e.value.fix is not None
    assert re.search(fix, e.value.fix), e.value.fix
    check_memory(made, kimi, load, 40 * GIB)


def test_the_suggested_budget_is_the_largest_that_fits(kimi):
    load = Load(1, longest=2000, rows=4096)
    with pytest.raises(InputError) as e:
        check_memory(recipe(), kimi, load, 20 * GIB)
    budget = int(str(e.value.fix).split("tokens_per_batch: ")[1].split(",")[0])
    assert budget >= 2048
    check_memory(recipe(tokens_per_batch=budget), kimi, replace(load, rows=budget // 2), 20 * GIB)
    with pytest.raises(InputError):
        check_memory(recipe(tokens_per_batch=budget + 256), kimi, replace(load, rows=budget // 2 + 128), 20 * GIB)


def test_the_load_is_that_of_the_fullest_pack():
    refs = [SampleRef(f"s{i}", "train", n, 2, n - 2, n - 1, "a", i, 0, i) for i, n in enumerate((10, 30, 20))]
    assert Load.of(refs, Schedule([[[[0, 2]], [[1]]]], [1], 54), 2) == Load(2, longest=28, rows=28)


def test_the_train_stage_asks_before_the_model_is_built(tmp_path, monkeypatch):
    run, target = tiny_run(tmp_path)
    monkeypatch.setattr(trainer, "training_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10_000, 10_000))
    monkeypatch.setattr(trainer, "init_drafter", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(InputError, match=r"not enough GPU memory: .* 10\.0 KB are free"):
        trainer.train(tiny_recipe(run.root), target, run, trainer.Progress(quiet=True))
