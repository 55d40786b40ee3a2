"""Support read from vLLM's source is what its classes say."""

from pathlib import Path

import pytest

from eyas.target.vllm_support import vllm_support

pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("architecture", "known", "eagle3"),
    [
        ("LlamaForCausalLM", True, True),
        ("KimiK25ForConditionalGeneration", True, True),
        ("DeepseekV3ForCausalLM", True, True),
        ("GptOssForCausalLM", True, True),
        ("Qwen3ForCausalLM", True, True),
        ("MistralForCausalLM", True, True),  # through its base, LlamaForCausalLM
        ("Gemma3ForCausalLM", True, False),
        ("MixtralForCausalLM", True, False),
        ("NoSuchModel", False, False),
    ],
)
def test_support(architecture: str, known: bool, eagle3: bool) -> None:
    found = vllm_support(architecture)
    assert (found.architecture, found.eagle3) == (known, eagle3)


def test_no_vllm(tmp_path: Path) -> None:
    found = vllm_support("LlamaForCausalLM", tmp_path)
    assert (found.architecture, found.eagle3) == (None, None)
