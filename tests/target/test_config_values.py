"""Values of config.json that cannot be are named, and contradictory ones are read as transformers reads them."""

import re
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import InputError
from eyas.target.resolve import resolve_target
from target import fixtures, real_configs
from target.fixtures import LAYERS, Config, edit_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.llama(tmp_path_factory.mktemp("llama"))


def with_config(path: Path, **changes: Any) -> Path:
    """The same checkpoint with keys changed, or left out (a value of `...`)."""
    config = {**fixtures.dense_config("llama", "LlamaForCausalLM"), **changes}
    fixtures.write_json(path / "config.json", {k: v for k, v in config.items() if v is not ...})
    return path


WHOLE, ABOVE = "a positive integer expected", "a finite number above 0 expected"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "64"}, f"hidden_size is '64', {WHOLE}"),
        ({"hidden_size": 64.0}, f"hidden_size is 64.0, {WHOLE}"),
        ({"hidden_size": True}, f"hidden_size is True, {WHOLE}"),
        ({"num_hidden_layers": "3"}, f"num_hidden_layers is '3', {WHOLE}"),
        ({"num_hidden_layers": -3}, f"num_hidden_layers is -3, {WHOLE}"),
        ({"num_attention_heads": 0}, f"num_attention_heads is 0, {WHOLE}"),
        (
            {"num_attention_heads": 100, "head_dim": ...},
            "num_attention_heads is 100, at most hidden_size (64) expected",
        ),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2', a positive integer"),
        ({"head_dim": -16}, f"head_dim is -16, {WHOLE}"),
        ({"head_dim": 0}, f"head_dim is 0, {WHOLE}"),
        ({"head_dim": "16"}, f"head_dim is '16', {WHOLE}"),
        ({"intermediate_size": "128"}, "intermediate_size is '128', a positive integer"),
        ({"intermediate_size": [128, "x"]}, "intermediate_size is [128, 'x'], a positive integer, or a list of them,"),
        ({"vocab_size": -1}, f"vocab_size is -1, {WHOLE}"),
        ({"vocab_size": "320"}, f"vocab_size is '320', {WHOLE}"),
        ({"max_position_embeddings": "2048"}, f"max_position_embeddings is '2048', {WHOLE}"),
        ({"max_position_embeddings": ...}, None),  # the class has a default
        ({"rms_norm_eps": "1e-5"}, f"rms_norm_eps is '1e-5', {ABOVE}"),
        ({"rms_norm_eps": -1}, f"rms_norm_eps is -1, {ABOVE}"),
        ({"rms_norm_eps": [1]}, f"rms_norm_eps is [1], {ABOVE}"),
        ({"rope_theta": "10000"}, f"rope_theta is '10000', {ABOVE}"),
        ({"rope_theta": 0}, f"rope_theta is 0, {ABOVE}"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": float("inf")}, f"rope_theta is inf, {ABOVE}"),
        ({"rope_theta": float("nan")}, "rope_theta is NaN"),
        ({"anything": {"list": [0, float("nan")]}}, "anything.list.1 is NaN"),
        ({"time_step_limit": [0, float("inf")]}, None),
        ({"rope_theta": [1]}, "rope_theta is [1], a finite number above 0, or a list of one for each of the 3 layers,"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', an object expected"),
        ({"rope_scaling": {"type": "banana", "factor": 2}}, "rope_scaling.type is 'banana', one of default, linear,"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None, a number (rope type 'linear' needs it)"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, f"rope_scaling.factor is 'x', {ABOVE}"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, f"rope_scaling.factor is -1, {ABOVE}"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.short_factor is None, a list of numbers"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": -1}}},
            "rope_parameters.full_attention.rope_theta is -1",
        ),
        ({"partial_rotary_factor": "0.5"}, "partial_rotary_factor is '0.5', a finite number above 0 and at most 1"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0, a finite number above 0 and at most 1"),
        ({"partial_rotary_factor": -0.5}, "partial_rotary_factor is -0.5"),
        ({"final_logit_softcapping": "30"}, f"final_logit_softcapping is '30', {ABOVE}"),
        ({"logit_scale": "x"}, f"logit_scale is 'x', {ABOVE}"),
        ({"layer_types": "full"}, "layer_types is 'full', a list of num_hidden_layers (3) strings expected"),
        ({"layer_types": ["full_attention"]}, "a list of num_hidden_layers (3) strings, found 1, expected"),
        ({"layer_types": [1, 2, 3]}, "layer_types is [1, 2, 3], a list of"),
        ({"sliding_window": "512"}, "sliding_window is '512', an integer"),
        ({"torch_dtype": "banana"}, "torch_dtype is 'banana', one of float32, bfloat16,"),
        ({"torch_dtype": 5}, "torch_dtype is 5, a string expected"),
        ({"torch_dtype": "torch.bfloat16"}, None),
        ({"model_type": 5}, "model_type is 5, a string expected"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', a token id or a list of them expected"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id is [2, 'x'], a token id or a list"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', true or false expected"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', a list such as"),
        ({"architectures": [5]}, "architectures is [5], a list such as"),
        ({"architectures": []}, "names no architectures"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8', an object expected"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
            "quantization_config.config_groups is [1], an object expected",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": "x"}}}},
            "quantization_config.config_groups.g.weights is 'x', an object expected",
        ),
        ({"quantization_config": {"quant_method": 5}}, "quantization_config.quant_method is 5, a string expected"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": "4"}},
            f"quantization_config.bits is '4', {WHOLE}",
        ),
    ],
)
def test_nonsense_is_named(checkpoint: Path, changes: Config, said: str | None) -> None:
    path = with_config(checkpoint, **changes)
    if said is None:
        resolve_target(str(path))
        return
    with pytest.raises(InputError, match=re.escape(said)) as e:
        resolve_target(str(path))
    assert str(path / "config.json") in e.value.message
    assert len(e.value.message) < 500
    assert e.value.fix


def test_config_nested_too_deep(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(InputError, match=r"config\.json is no config: its JSON is nested too deep"):
        resolve_target(str(checkpoint))


def test_eos_of_the_generation_config(tmp_path: Path) -> None:
    fixtures.write_json(fixtures.llama(tmp_path) / "generation_config.json", {"eos_token_id": "x"})
    with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id is 'x'"):
        resolve_target(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {
            "rope_theta": 1e4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
        },
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 7e4, "rope_parameters": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "glm4"])
def test_contradictory_rope_is_read_as_transformers_does(checkpoint: Path, kind: str, changes: Config) -> None:
    from transformers import AutoConfig

    info = resolve_target(str(with_config(checkpoint, model_type=kind, **changes)))
    theirs = AutoConfig.from_pretrained(checkpoint).rope_parameters
    for key in ("rope_type", "rope_theta", "factor"):
        assert info.rope_parameters.get(key) == theirs.get(key), key
    if "partial_rotary_factor" in str(changes):
        assert info.rope_parameters["partial_rotary_factor"] == theirs["partial_rotary_factor"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_theta 500000 and, in rope_parameters, 10000: the second counts",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.5 and, in rope_scaling, 0.25",
        ),
        ({"rope_parameters": {"rope_theta": 5e5}}, None),
    ],
)
def test_a_contradiction_is_noted(checkpoint: Path, changes: Config, said: str | None) -> None:
    notes = resolve_target(str(with_config(checkpoint, **changes))).notes
    assert notes == () if said is None else said in notes[0]


def test_a_base_for_each_layer(checkpoint: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    changes = {"rope_theta": [1e4, 5e6, 1e4, 1e4], "layer_types": types, "num_nextn_predict_layers": 1}
    assert resolve_target(str(with_config(checkpoint, **changes))).rope_parameters["rope_theta"] == 5e6


@pytest.mark.parametrize("config", [real_configs.QWEN3_8B, real_configs.LLAMA_31_8B, real_configs.GPT_OSS_120B])
def test_published_values_pass(tmp_path: Path, config: Config) -> None:
    """The published rope, types of layers and dtypes, on a small checkpoint."""
    fixtures.llama(tmp_path)
    sizes = {"hidden_size", "num_hidden_layers", "layer_types", "quantization_config", "vocab_size"}
    edit_config(tmp_path, lambda c: c.update({k: v for k, v in config.items() if k not in sizes}))
    info = resolve_target(str(tmp_path))
    assert info.rope_parameters["rope_theta"] == config["rope_theta"]
    assert info.num_hidden_layers == LAYERS
    assert info.notes == ()
