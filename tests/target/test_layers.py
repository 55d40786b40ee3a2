"""A layer that lacks a tensor, or has it in another shape, is refused; layers that differ by design are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas.errors import InputError
from eyas.target.config_json import read_config
from eyas.target.layers import check_layers
from eyas.target.safetensors_files import open_checkpoint
from target.skeleton import Shapes, write_skeleton

LAYERS = 12
Layer = dict[str, tuple[int, ...]]

ATTENTION: Layer = {
    "input_layernorm": (64,),
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "post_attention_layernorm": (64,),
}
DENSE: Layer = {"mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}
MOE: Layer = {
    "mlp.gate": (8, 64),
    **{f"mlp.experts.{e}.{name}": shape for e in range(8) for name, shape in [("up", (32, 64)), ("down", (64, 32))]},
}
MAMBA: Layer = {"input_layernorm": (64,), "mixer.in_proj": (256, 64), "mixer.out_proj": (64, 128)}


def write(path: Path, layers: list[Layer], change: Callable[[Shapes], Any] = lambda s: None, **config: Any) -> Path:
    shapes: Shapes = {"model.embed_tokens.weight": ("BF16", (320, 64)), "model.norm.weight": ("BF16", (64,))}
    for k, layer in enumerate(layers):
        shapes |= {f"model.layers.{k}.{name}.weight": ("BF16", shape) for name, shape in layer.items()}
    change(shapes)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": LAYERS, "vocab_size": 320, **config}
    return write_skeleton(path, config, shapes, shards=2)


def check(path: Path) -> list[str]:
    config = read_config(path)
    types = tuple(config.find("layer_types") or ())
    return check_layers(config, open_checkpoint(path), "model.", LAYERS, types)


def without(*names: str, layer: int = 3) -> Callable[[Shapes], None]:
    def change(shapes: Shapes) -> None:
        for name in names:
            del shapes[f"model.layers.{layer}.{name}.weight"]

    return change


def shaped(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> Callable[[Shapes], None]:
    return lambda shapes: shapes.update({f"model.layers.3.{name}.weight": (dtype, shape)})


LLAMA = [{**ATTENTION, **DENSE}] * LAYERS
DEEPSEEK = [{**ATTENTION, **DENSE}] + [{**ATTENTION, **MOE}] * (LAYERS - 1)
HYBRID: list[Layer] = ([{**MAMBA, **DENSE}] * 3 + [{**ATTENTION, **DENSE}]) * (LAYERS // 4)


@pytest.mark.parametrize(
    ("layers", "change", "said"),
    [
        (LLAMA, without("self_attn.q_proj"), r"layer 3 \(model\.\) lacks self_attn\.q_proj, which 11 layers"),
        (LLAMA, without("input_layernorm", layer=0), r"layer 0 .*lacks input_layernorm"),
        (LLAMA, without(*DENSE), r"lacks mlp\.down_proj, mlp\.gate_proj, mlp\.up_proj, which"),
        (DEEPSEEK, without("mlp.experts.7.up"), r"lacks mlp\.experts\.7\.up, which 10 layers"),
        (HYBRID, without("self_attn.k_proj"), r"lacks self_attn\.k_proj, which 2 layers"),
        (LLAMA, shaped("self_attn.q_proj", (1, 1)), r"layers\.3\.self_attn\.q_proj\.weight has shape \[1, 1\], "),
        (LLAMA, shaped("mlp.down_proj", (64, 64)), r"\[64, 128\] expected, as in layer 0 to 2, 4 to 11"),
        (DEEPSEEK, shaped("mlp.experts.5.down", (64, 31)), r"experts\.5\.down\.weight has shape \[64, 31\]"),
    ],
)
def test_damage_is_named(tmp_path: Path, layers: list[Layer], change: Callable[[Shapes], None], said: str) -> None:
    check(write(tmp_path / "whole", layers))
    path = write(tmp_path / "damaged", layers, change)
    with pytest.raises(InputError, match=said) as e:
        check(path)
    assert str(path) in e.value.message
    assert e.value.fix


NO_KEYS = {k: v for k, v in ATTENTION.items() if k not in ("self_attn.k_proj", "self_attn.v_proj")}
WIDE = {**ATTENTION, "self_attn.q_proj": (128, 64), "self_attn.o_proj": (64, 128)}


@pytest.mark.parametrize(
    ("layers", "config"),
    [
        (DEEPSEEK, {}),
        (HYBRID, {}),
        # cross-layer attention: every second layer uses the keys of the one before
        ([{**ATTENTION, **DENSE}, {**NO_KEYS, **DENSE}] * (LAYERS // 2), {}),
        # one layer without attention, as after pruning
        ([{**ATTENTION, **DENSE}] * 5 + [{"post_attention_layernorm": (64,), **DENSE}] + LLAMA[:6], {}),
        # wider heads in the full-attention layers, of which there is one
        (
            [{**ATTENTION, **DENSE}] * 11 + [{**WIDE, **DENSE}],
            {"layer_types": ["sliding_attention"] * 11 + ["full_attention"]},
        ),
        # a width for each layer
        (
            [{**ATTENTION, **DENSE}] * 11 + [{**ATTENTION, **DENSE, "mlp.down_proj": (64, 64)}],
            {"intermediate_size": [128] * 11 + [64]},
        ),
    ],
)
def test_designs_that_differ_by_layer_pass(tmp_path: Path, layers: list[Layer], config: dict[str, Any]) -> None:
    assert check(write(tmp_path, layers, **config)) == []


def test_one_layer_left_unquantized_passes(tmp_path: Path) -> None:
    def change(shapes: Shapes) -> None:
        for name in [n for n in shapes if "mlp" in n and ".layers.0." not in n]:
            _, (out, width) = shapes[name]
            shapes[name] = ("F8_E4M3", (out, width))
            shapes[f"{name}_scale"] = ("F32", (1,))

    assert check(write(tmp_path, LLAMA, change)) == []
