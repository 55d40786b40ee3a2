"""The draft model's configuration: speculators' config class from the target's sizes and the recipe's draft part."""

from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from eyas.draft.rope import draft_rope
from eyas.draft.sizes import aux_layers, layer_sizes, misfits, norm_options
from eyas.recipe import DraftPart
from eyas.target.info import TargetInfo


def draft_config(target: TargetInfo, part: DraftPart, ttt_steps: int) -> Eagle3SpeculatorConfig:
    """The config of a drafter for `target`: a Llama-style layer of the target's width, sized by eyas.draft.sizes.

    Raises InputError naming the `draft` key that does not fit.
    """
    for wrong in misfits(target, part):
        raise wrong
    norms = norm_options(part)
    return Eagle3SpeculatorConfig(
        transformer_layer_config=_layer_config(target, part),
        draft_vocab_size=part.vocab_size,
        norm_before_residual=norms.norm_before_residual,
        norm_before_fc=norms.norm_before_fc,
        norm_output=norms.norm_output,
        fc_norm=norms.fc_norm,
        eagle_aux_hidden_state_layer_ids=aux_layers(target, part),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target.path), architectures=[target.architecture]),
        ),
    )


def _layer_config(target: TargetInfo, part: DraftPart) -> LlamaConfig:
    sizes = layer_sizes(target, part)
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=part.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        head_dim=sizes.head_dim,
        hidden_act="silu",
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=draft_rope(target.rope_parameters),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=list(target.eos_token_ids) or None,
    )
    config._attn_implementation = "eager"  # of speculators' own forward, which serves as the reference in tests
    return config
