"""The draft config: from the target and the recipe, in the fields that the engine reads; wrong settings are refused."""

from pathlib import Path

import pytest
from speculators.models.eagle3 import Eagle3SpeculatorConfig

from eyas.draft.config import aux_layers, draft_config
from eyas.errors import InputError
from eyas.recipe import DraftPart
from train.tiny_run import HIDDEN, VOCAB, tiny_target


def part(**settings) -> DraftPart:
    return DraftPart(**{"vocab_size": 24, "aux_layers": [2, 3, 4], **settings})


def test_sizes_and_conventions_are_the_targets(tmp_path: Path):
    target = tiny_target(tmp_path)
    config = draft_config(target, part(), 3)
    layer = config.transformer_layer_config
    assert isinstance(config, Eagle3SpeculatorConfig)
    assert (layer.model_type, layer.hidden_size, layer.vocab_size) == ("llama", HIDDEN, VOCAB)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 8)
    assert (layer.intermediate_size, layer.rms_norm_eps, layer.max_position_embeddings) == (48, 1e-5, 256)
    assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.norm_before_residual
    assert not config.norm_before_fc
    assert not config.norm_output
    assert config.eagle_aux_hidden_state_layer_ids == [2, 3, 4]
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 3


def test_eagle31_adds_two_norms(tmp_path: Path):
    config = draft_config(tiny_target(tmp_path), part(preset="eagle3.1"), 3)
    assert config.norm_before_fc
    assert config.norm_output


def test_recipe_sizes_win(tmp_path: Path):
    chosen = part(attention_heads=8, key_value_heads=4, intermediate_size=20, layers=2)
    layer = draft_config(tiny_target(tmp_path), chosen, 3).transformer_layer_config
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (8, 4, 4)
    assert (layer.intermediate_size, layer.num_hidden_layers) == (20, 2)


def test_kimi_sizes(tmp_path: Path):
    """64 heads of 128 for hidden 7168, though latent attention's own head size is another."""
    target = tiny_target(
        tmp_path, attention="mla", hidden_size=7168, num_attention_heads=64, num_key_value_heads=64, head_dim=192
    )
    layer = draft_config(target, part(), 3).transformer_layer_config
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (64, 64, 128)


def test_rope_is_kept_only_where_training_and_serving_agree(tmp_path: Path):
    def rope(**parameters):
        target = tiny_target(tmp_path, rope_parameters=parameters)
        return draft_config(target, part(), 3).transformer_layer_config.rope_parameters

    yarn = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64}
    assert rope(**yarn, mscale=1.0, partial_rotary_factor=0.5) == {**yarn, "mscale": 1.0}
    longrope = {"rope_type": "longrope", "rope_theta": 1e6, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert rope(**longrope) == {"rope_type": "default", "rope_theta": 1e6}
    assert rope(rope_type="default", rope_theta=1e6, mrope_section=[1, 1, 2]) == {
        "rope_type": "default",
        "rope_theta": 1e6,
    }


def test_default_aux_layers(tmp_path: Path):
    target = tiny_target(tmp_path, num_hidden_layers=61)
    assert aux_layers(target, DraftPart()) == [2, 30, 58]


@pytest.mark.parametrize("layers", [[], [0, 1], [2, 2], [3, 2], [2, 6]])
def test_impossible_aux_layers_are_refused(tmp_path: Path, layers):
    with pytest.raises(InputError, match=r"draft\.aux_layers.*from 1 to 5"):
        aux_layers(tiny_target(tmp_path), part(aux_layers=layers))


def test_default_aux_layers_of_a_shallow_target_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"draft\.aux_layers: the default \[2, 2, 1\].*4 layers"):
        aux_layers(tiny_target(tmp_path, num_hidden_layers=4), DraftPart())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 65}, r"draft\.vocab_size is 65.*only 64"),
        ({"attention_heads": 5}, r"draft\.attention_heads: 5 heads do not divide"),
        ({"key_value_heads": 3}, r"draft\.key_value_heads: 3 does not divide"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, settings, message):
    with pytest.raises(InputError, match=message):
        draft_config(tiny_target(tmp_path), part(**settings), 3)
