"""The exported layouts, and every trap of an export planted and caught."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eyas.errors import EyasError, InputError
from eyas.export.checkpoint import write_checkpoint
from eyas.export.formats import export
from eyas.export.limits import format_misfits
from eyas.export.sglang import export_sglang, sglang_problems
from eyas.export.speculators import export_speculators
from eyas.export.vllm import export_vllm
from eyas.rundir import RunDir

from . import tiny_drafter as tiny

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def save(run: RunDir, **options: Any) -> Tensors:
    made = tiny.config(**options)
    tensors = tiny.trained_tensors(tiny.model(made))
    tiny.save_trained(run, made, tensors)
    return tensors


def test_layout_of_the_published_reference(run: RunDir) -> None:
    """Names, shapes and dtypes as AQ-MedAI/Kimi-K2-Instruct-eagle3 has them, for this target's sizes."""
    trained = save(run)
    recipe = tiny.recipe(run, engine={"dtype": "auto"})
    path = export_vllm(run, tiny.target_info(run.root), recipe)
    found = load_file(path / "model.safetensors")
    h, q, kv, mlp, bf16 = 32, 64, 32, 48, torch.bfloat16
    assert {n: (tuple(t.shape), t.dtype) for n, t in found.items()} == {
        "d2t": ((20,), torch.int64),
        "t2d": ((64,), torch.bool),
        "fc.weight": ((h, 3 * h), bf16),
        "norm.weight": ((h,), bf16),
        "lm_head.weight": ((20, h), bf16),
        "midlayer.hidden_norm.weight": ((h,), bf16),
        "midlayer.input_layernorm.weight": ((h,), bf16),
        "midlayer.post_attention_layernorm.weight": ((h,), bf16),
        "midlayer.self_attn.q_proj.weight": ((q, 2 * h), bf16),
        "midlayer.self_attn.k_proj.weight": ((kv, 2 * h), bf16),
        "midlayer.self_attn.v_proj.weight": ((kv, 2 * h), bf16),
        "midlayer.self_attn.o_proj.weight": ((h, q), bf16),
        "midlayer.mlp.gate_proj.weight": ((mlp, h), bf16),
        "midlayer.mlp.up_proj.weight": ((mlp, h), bf16),
        "midlayer.mlp.down_proj.weight": ((h, mlp), bf16),
    }
    assert torch.equal(found["fc.weight"], trained["fc.weight"].to(bf16))
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in run.drafter.iterdir()] == ["vllm"]


def test_config_says_what_vllm_reads(run: RunDir) -> None:
    save(run, rope="yarn", norm_before_fc=True, norm_output=True)
    target = tiny.target_info(run.root, eos_token_ids=(2, 3))
    config = json.loads((export_vllm(run, target, tiny.recipe(run)) / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": 64,
        "draft_vocab_size": 20,
        "max_position_embeddings": 512,
        "head_dim": 16,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": True,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "rope_theta": 10000.0,
        "eos_token_id": [2, 3],
    }
    assert {k: config[k] for k in expected} == expected
    assert config["rope_parameters"] == tiny.ROPES["yarn"]
    assert config["rope_scaling"] == {k: v for k, v in tiny.ROPES["yarn"].items() if k != "rope_theta"}
    assert LlamaConfig(**config).rope_parameters == tiny.ROPES["yarn"]


def test_whole_vocabulary_has_no_map(run: RunDir) -> None:
    save(run, draft_vocab=tiny.VOCAB)
    path = export_vllm(run, tiny.target_info(run.root), tiny.recipe(run))
    assert not {"d2t", "t2d"} & load_file(path / "model.safetensors").keys()


def offsets_as_ids(t: Tensors) -> None:
    t["d2t"] = torch.arange(20) + t["d2t"]


def stale_map(t: Tensors) -> None:
    t["t2d"] = t["t2d"].roll(1)


def int32_map(t: Tensors) -> None:
    t["d2t"] = t["d2t"].int()


def nan(t: Tensors) -> None:
    t["layers.0.mlp.up_proj.weight"][3, 4] = float("nan")


def no_norm(t: Tensors) -> None:
    del t["norm.weight"]


def embeddings(t: Tensors) -> None:
    t["embed_tokens.weight"] = torch.zeros(64, 32)


def narrow_fc(t: Tensors) -> None:
    t["fc.weight"] = t["fc.weight"][:, :64]


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (offsets_as_ids, "target ids, not offsets"),
        (stale_map, "does not give"),
        (int32_map, "expected int64 and bool"),
        (nan, "layers.0.mlp.up_proj.weight holds NaN"),
        (no_norm, "tensors missing: norm.weight"),
        (embeddings, "not part of the format: embed_tokens.weight"),
        (narrow_fc, r"fc.weight has shape \[32, 64\], expected \[32, 96\]"),
    ],
)
def test_planted_tensors_are_caught(run: RunDir, plant: Callable[[Tensors], None], message: str) -> None:
    made = tiny.config()
    tensors = tiny.trained_tensors(tiny.model(made))
    plant(tensors)
    tiny.save_trained(run, made, tensors)
    with pytest.raises(EyasError, match=message):
        export_vllm(run, tiny.target_info(run.root), tiny.recipe(run))
    assert not run.drafter.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 128}, "vocab_size is 64, the target's is 128"),
        ({"hidden_size": 64}, "hidden_size is 32, the target's is 64"),
        ({"max_position_embeddings": 4096}, "max_position_embeddings is 512, the target's is 4096"),
        ({"num_hidden_layers": 4}, r"layer_ids is \[1, 3, 5\], expected ascending ids of 1..4"),
    ],
)
def test_another_targets_drafter_is_caught(run: RunDir, changes: dict[str, Any], message: str) -> None:
    save(run)
    with pytest.raises(EyasError, match=message):
        export_vllm(run, tiny.target_info(run.root, **changes), tiny.recipe(run))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type of"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_planted_layer_options_are_caught(run: RunDir, edit: dict[str, Any], message: str) -> None:
    save(run)
    path = run.train / "final" / "config.json"
    config = json.loads(path.read_text())
    config["transformer_layer_config"] |= edit
    path.write_text(json.dumps(config))
    with pytest.raises(EyasError, match=message):
        export_vllm(run, tiny.target_info(run.root), tiny.recipe(run))


def test_missing_aux_layer_ids_are_caught(run: RunDir) -> None:
    save(run)
    path = run.train / "final" / "config.json"
    config = json.loads(path.read_text())
    config["eagle_aux_hidden_state_layer_ids"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(EyasError, match=r"eagle_aux_hidden_state_layer_ids is \[\]"):
        export_vllm(run, tiny.target_info(run.root), tiny.recipe(run))


def test_values_that_float16_cannot_hold_are_caught(run: RunDir) -> None:
    made = tiny.config()
    tensors = tiny.trained_tensors(tiny.model(made))
    tensors["fc.weight"][0, 0] = 1e6
    tiny.save_trained(run, made, tensors)
    with pytest.raises(EyasError, match=r"fc\.weight does not fit"):
        export_vllm(run, tiny.target_info(run.root), tiny.recipe(run, engine={"dtype": "float16"}))


def test_no_training_no_export(run: RunDir) -> None:
    with pytest.raises(InputError, match="no trained drafter"):
        export_vllm(run, tiny.target_info(run.root), tiny.recipe(run))


def test_sglang_ids_are_one_less_and_only_where_sglang_reads_them(run: RunDir) -> None:
    save(run, norm_before_residual=False)
    target, recipe = tiny.target_info(run.root), tiny.recipe(run)
    config = json.loads((export_sglang(run, target, recipe) / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert "eagle_aux_hidden_state_layer_ids" not in config
    for_vllm = json.loads((export_vllm(run, target, recipe) / "config.json").read_text())
    assert for_vllm["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert "eagle_config" not in for_vllm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"norm_output": True}, "norm_output"),
        ({"fc_norm": True}, "fc_norm"),
        ({"layers": 2}, "one draft layer"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5]}, "three auxiliary layers"),
    ],
)
def test_what_sglang_would_ignore_is_refused(run: RunDir, options: dict[str, Any], message: str) -> None:
    options = {"norm_before_residual": False, **options}
    save(run, **options)
    with pytest.raises(InputError, match=message):
        export_sglang(run, tiny.target_info(run.root), tiny.recipe(run))
    assert sglang_problems(tiny.config(norm_before_residual=False)) == []


def test_each_limit_of_sglang_names_its_way_out(run: RunDir) -> None:
    def misfits(**draft: Any) -> list[tuple[str, str | None]]:
        made = tiny.recipe(
            run,
            draft={"vocab_size": 20, "aux_layers": [1, 3, 5], **draft},
            export={"formats": ["vllm", "sglang"]},
        )
        return [(e.message, e.fix) for e in format_misfits(made, tiny.target_info(run.root))]

    assert misfits(norm_before_residual=False) == []
    assert misfits() == [
        (
            "export.formats has sglang: SGLang ignores norm_before_residual, which this drafter has",
            "set draft.norm_before_residual: false, or drop sglang from export.formats",
        )
    ]
    ways = [fix for _, fix in misfits(norm_before_residual=False, preset="eagle3.1", layers=2, aux_layers=[1, 5])]
    assert [fix.partition(",")[0] for fix in ways if fix] == [
        "set draft.preset: eagle3",
        "set draft.preset: eagle3",
        "set draft.layers: 1",
        "set draft.aux_layers to three layers",
    ]
    with pytest.raises(InputError, match=r"draft\.norm_before_residual: false"):
        export(
            tiny.recipe(run, draft={"vocab_size": 20, "aux_layers": [1, 3, 5]}, export={"formats": ["sglang"]}),
            tiny.target_info(run.root),
            run,
        )


def test_speculators_format_is_portable_and_loads(run: RunDir) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel

    trained = save(run)
    path = export_speculators(run, tiny.target_info(run.root), tiny.recipe(run))
    text = (path / "config.json").read_text()
    assert "auto_map" not in text
    assert "/home/me" not in text
    assert str(run.root) not in text
    assert json.loads(text)["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(path / "model.safetensors").keys() == trained.keys()
    config = tiny.config().from_pretrained(str(path))
    assert config.transformer_layer_config.rope_parameters == tiny.ROPES["default"]
    assert config.eagle_aux_hidden_state_layer_ids == tiny.AUX
    config.transformer_layer_config._attn_implementation = "eager"
    missing = Eagle3DraftModel(config).load_state_dict(load_file(path / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys


def test_local_target_leaves_the_verifier_unnamed(run: RunDir) -> None:
    save(run)
    recipe = tiny.recipe(run, target={"path": str(run.root)})
    path = export_speculators(run, tiny.target_info(run.root), recipe)
    assert str(run.root) not in (path / "config.json").read_text()


def test_export_replaces_whole_directories(run: RunDir) -> None:
    save(run)
    (run.drafter / "vllm").mkdir(parents=True)
    (run.drafter / "vllm" / "stale.bin").write_text("old")
    counts = export(
        tiny.recipe(run, draft={"vocab_size": 20, "aux_layers": [1, 3, 5]}), tiny.target_info(run.root), run
    )
    assert counts["formats"] == "vllm"
    assert not (run.drafter / "vllm" / "stale.bin").exists()
    assert [p.name for p in run.drafter.iterdir()] == ["vllm"]


def test_a_failed_write_leaves_the_old_directory(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run.drafter / "vllm"
    write_checkpoint(directory, {"a": 1}, {"x": torch.ones(2)})

    def spoiled(tensors: Tensors, path: Path, metadata: dict[str, str]) -> None:
        save_file({n: t * 2 for n, t in tensors.items()}, path, metadata)

    monkeypatch.setattr("eyas.export.checkpoint.save_file", spoiled)
    with pytest.raises(EyasError, match="tensor x was not written as it is"):
        write_checkpoint(directory, {"a": 2}, {"x": torch.ones(2)})
    assert json.loads((directory / "config.json").read_text()) == {"a": 1}
    assert [p.name for p in run.drafter.iterdir()] == ["vllm"]
