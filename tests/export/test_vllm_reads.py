"""vLLM's own readers, where vLLM is installed: its config loader and its rope, without starting an engine."""

from pathlib import Path

import pytest
import torch

from eyas.export.reference import rope_frequencies
from eyas.export.vllm import export_vllm
from eyas.rundir import RunDir

from . import tiny_drafter as tiny

pytest.importorskip("vllm")


@pytest.mark.parametrize("rope", tiny.ROPES)
def test_rope_and_sizes_arrive(tmp_path: Path, rope: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.transformers_utils.config import get_config

    run = RunDir(tmp_path)
    made = tiny.config(rope=rope)
    tiny.save_trained(run, made, tiny.trained_tensors(tiny.model(made)))
    config = get_config(str(export_vllm(run, tiny.target_info(tmp_path), tiny.recipe(run))), trust_remote_code=False)
    assert config.rope_parameters == tiny.ROPES[rope]
    assert (config.vocab_size, config.draft_vocab_size, config.head_dim) == (64, 20, 16)
    assert config.norm_before_residual is True
    assert config.eagle_aux_hidden_state_layer_ids == [1, 3, 5]

    with set_current_vllm_config(VllmConfig()):
        served = get_rope(
            config.head_dim, config.max_position_embeddings, rope_parameters=config.rope_parameters, dtype=torch.float32
        )
    frequencies, scale = rope_frequencies(config.rope_parameters, config.head_dim)
    angles = torch.arange(200.0)[:, None] * frequencies
    ours = torch.cat([angles.cos(), angles.sin()], -1) * scale
    torch.testing.assert_close(ours, served.cos_sin_cache[:200].float(), atol=2e-5, rtol=1e-4)
