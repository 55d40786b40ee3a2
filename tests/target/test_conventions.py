"""The table of norms with 1 + weight says what the installed transformers' own code says."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from eyas.target.conventions import LAYER_NORM_PLUS_ONE, PLUS_ONE
from eyas.target.library_defaults import causal_lm_class, library_defaults

_PLUS = re.compile(r"1(\.0)? \+ self\.weight|self\.weight(\.float\(\))? \+ 1")
_NOT_TEXT_GENERATION = {"t5gemma", "t5gemma2", "videoprism"}  # encoder-decoder, vision


def models() -> Path:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "models"


def test_every_plus_one_family_is_in_the_table() -> None:
    families = {
        file.parent.name for file in models().glob("*/modeling_*.py") if _PLUS.search(file.read_text(encoding="utf-8"))
    }
    assert families - _NOT_TEXT_GENERATION <= PLUS_ONE | LAYER_NORM_PLUS_ONE


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "gpt_oss", "gemma3n", "gemma4", "glm4_moe"])
def test_plain_families_are_not(family: str) -> None:
    assert family not in PLUS_ONE
    file = models() / family / f"modeling_{family}.py"
    assert not _PLUS.search(file.read_text(encoding="utf-8"))


def test_defaults_are_the_classes() -> None:
    from transformers import AutoConfig

    for kind in ("llama", "gemma3_text", "qwen3", "gpt_oss", "deepseek_v3", "qwen3_vl_text", "mixtral", "cohere2"):
        config, read = AutoConfig.for_model(kind), library_defaults(kind)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            assert read[key] == getattr(config, key), (kind, key)
    assert library_defaults("no_such_model") == {}
    assert causal_lm_class("gemma3_text") == "Gemma3ForCausalLM"
