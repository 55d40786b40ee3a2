"""`draft.from`: what does not fit the recipe's drafter is found in config.json and header, before anything runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.draft.config import draft_config
from eyas.draft.init import init_drafter, load_drafter
from eyas.draft.start import start_problems
from eyas.errors import InputError
from eyas.recipe import DraftPart
from eyas.target.info import TargetInfo
from train.tiny_run import DRAFT_VOCAB, tiny_target

from .test_init import PART, some_vocab

FLAT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 9.999999747378752e-06,  # 1e-5, through float32
    "rope_theta": 10000.0,
    "norm_before_residual": True,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def drafter(tmp_path: Path, config: dict[str, Any], part: DraftPart = PART) -> Path:
    """The tiny drafter's own weights under vLLM's names, with this config."""
    target, start = tiny_target(tmp_path / "target"), tmp_path / "start"
    model = init_drafter(draft_config(target, part, 3), some_vocab(), target)
    weights = {n.replace("layers.0.", "midlayer."): p.detach() for n, p in model.named_parameters() if p.requires_grad}
    start.mkdir()
    save_file(weights, start / "model.safetensors")
    (start / "config.json").write_text(json.dumps(config))
    return start


def problems(tmp_path: Path, start: Path, part: DraftPart = PART, **changes: Any) -> list[tuple[str, str]]:
    target: TargetInfo = tiny_target(tmp_path / "target", **changes)
    return [(e.message, str(e.fix)) for e in start_problems(start, target, part)]


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """As speculators writes it."""
    outer = {k: v for k, v in config.items() if k.startswith("norm_before")}
    return {**outer, "transformer_layer_config": {k: v for k, v in config.items() if k not in outer}}


@pytest.mark.parametrize("layout", [dict, nested], ids=["vllm", "speculators"])
def test_a_fitting_drafter(tmp_path: Path, layout: Any) -> None:
    assert problems(tmp_path, drafter(tmp_path, layout(FLAT))) == []


def test_what_this_program_writes_fits(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", rope_parameters=YARN)
    config = json.loads(draft_config(target, PART, 3).to_json_string())
    assert problems(tmp_path, drafter(tmp_path, config), rope_parameters=YARN) == []


@pytest.mark.parametrize("layout", [dict, nested], ids=["vllm", "speculators"])
@pytest.mark.parametrize(
    ("change", "said", "fix"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the recipe's drafter has 32", "leave draft.from out"),
        ({"num_attention_heads": 8}, "num_attention_heads is 8, the", "set draft.attention_heads: 8"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, the", "set draft.key_value_heads: 4"),
        ({"head_dim": 16}, "head_dim is 16, the recipe's drafter has 8", "set draft.head_dim: 16"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, the recipe's drafter has 1e-05", "leave draft.from out"),
        ({"rope_theta": 5e5}, "rope_theta is 500000.0, the recipe's drafter has 10000.0", "leave draft.from out"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_type is linear, the recipe's drafter has default",
            "",
        ),
        ({"rope_parameters": YARN}, "rope_type is yarn, the recipe's drafter has default", "leave draft.from out"),
        ({"rope_parameters": {"rope_type": "odd"}}, "'odd', one of default", "leave draft.from out"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', a positive integer expected", "leave draft.from out"),
    ],
)
def test_a_config_that_means_something_else(tmp_path: Path, layout: Any, change: Any, said: str, fix: str) -> None:
    start = drafter(tmp_path, layout(FLAT | change))
    (problem,) = problems(tmp_path, start)
    assert problem[0].startswith(f"draft.from: {start / 'config.json'}: ")
    assert said in problem[0]
    assert fix in problem[1]


def test_keys_that_are_absent(tmp_path: Path) -> None:
    """Sizes show in the weights; plain rope is the default, as an absent beta_fast is 32."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    start = drafter(tmp_path, {k: v for k, v in FLAT.items() if k not in (*sizes, "rope_theta", "architectures")})
    assert problems(tmp_path, start) == []
    (start / "config.json").write_text(json.dumps(FLAT | {"rope_parameters": {**YARN, "beta_fast": 32}}))
    spelled = {**YARN, "truncate": True, "mscale": 1.0, "mscale_all_dim": 0.0}
    assert problems(tmp_path, start, rope_parameters=spelled) == []
    ((said, _),) = problems(tmp_path, start, rope_parameters={**YARN, "factor": 8.0, "attention_factor": 1.1386294361})
    assert "factor is 4.0, the recipe's drafter has 8.0" in said
    (start / "config.json").write_text(json.dumps({k: v for k, v in FLAT.items() if k != "rope_theta"}))
    ((said, fix),) = problems(tmp_path, start, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert "rope_theta is 10000.0 (absent: the default), the recipe's drafter has 500000.0" in said
    assert "write that into its config.json" in fix
    (start / "config.json").write_text(json.dumps({k: v for k, v in FLAT.items() if k != "rms_norm_eps"}))
    ((said, _),) = problems(tmp_path, start)
    assert "rms_norm_eps is 1e-06 (absent: the default), the recipe's drafter has 1e-05" in said


def test_norms_stand_elsewhere(tmp_path: Path) -> None:
    start = drafter(tmp_path, FLAT | {"norm_before_fc": True, "norm_output": True})
    found = problems(tmp_path, start)
    assert ["norm_before_fc" in found[0][0], "norm_output" in found[1][0]] == [True, True]
    assert {fix for _, fix in found} == {"set draft.preset: eagle3.1"}


def test_a_target_is_no_drafter(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    (target.path / "config.json").write_text(json.dumps({**FLAT, "architectures": ["LlamaForCausalLM"]}))
    ((said, fix),) = problems(tmp_path, target.path)
    assert said == f"draft.from: {target.path} holds no EAGLE-3 drafter: no fc.weight (architectures: LlamaForCausalLM)"
    assert "the directory of a drafter" in fix
    model = init_drafter(draft_config(target, PART, 3), some_vocab(), target)
    with pytest.raises(InputError, match=r"draft\.from: .* holds no EAGLE-3 drafter"):
        load_drafter(model, target.path)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", b"{", "is not valid JSON"),
        ("config.json", b"\xff\xfe", "is not valid JSON"),
        ("config.json", b"[1]", "holds list"),
        ("model.safetensors", b"\xff" * 99, "is no safetensors file"),
        ("model.safetensors", b"", "is no safetensors file"),
    ],
)
def test_damaged_files(tmp_path: Path, file: str, content: bytes, said: str) -> None:
    start = drafter(tmp_path, FLAT)
    (start / file).write_bytes(content)
    ((message, fix),) = problems(tmp_path, start)
    assert message.startswith(f"draft.from: {start / file}")
    assert said in message
    assert fix.endswith("or leave draft.from out")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    start = drafter(tmp_path, FLAT)
    more = DraftPart(vocab_size=DRAFT_VOCAB, aux_layers=[2, 3, 4], layers=2)
    assert "layers.1.input_layernorm.weight is missing" in problems(tmp_path, start, more)[0][0]
    file = start / "model.safetensors"
    save_file({**load_file(file), "midlayer.self_attn.q_norm.weight": torch.ones(8)}, file)
    assert "layers.0.self_attn.q_norm.weight is not part of" in problems(tmp_path, start)[0][0]
    save_file({n: t.to(torch.float8_e4m3fn) if n == "fc.weight" else t for n, t in load_file(file).items()}, file)
    assert "is quantized: fc.weight is F8_E4M3" in problems(tmp_path, start)[0][0]


def test_weights_that_are_not_finite_or_damaged_end_the_stage_with_the_name_of_the_key(tmp_path: Path) -> None:
    start, target = drafter(tmp_path, FLAT), tiny_target(tmp_path / "target")
    model = init_drafter(draft_config(target, PART, 3), some_vocab(), target)
    file = start / "model.safetensors"
    save_file({n: t * float("nan") if n == "fc.weight" else t for n, t in load_file(file).items()}, file)
    with pytest.raises(InputError, match=rf"draft\.from: {file} holds NaN or infinite values in fc\.weight\n  fix: "):
        load_drafter(model, start)
    file.write_bytes(b"\xff" * 99)
    with pytest.raises(InputError, match=rf"draft\.from: {file} is damaged: .*\n  fix: "):
        load_drafter(model, start)
