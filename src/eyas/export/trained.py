"""The trained drafter as train/final holds it, and the tensors that each published layout must have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig

from eyas.draft.sizes import LayerSizes, NormOptions, weight_shapes
from eyas.errors import EyasError, InputError
from eyas.recipe import EnginePart
from eyas.target.info import TargetInfo

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""the rope types that transformers (training) and the engines (serving) compute alike"""

EXPORT_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""the recipe's engine.dtype -> dtype of exported weights"""


@dataclass(frozen=True)
class Trained:
    """Config and tensors of train/final; tensor names are speculators' (layers.0.*).

    d2t and t2d are there unless the drafter has the target's whole vocabulary.
    """

    config: Eagle3SpeculatorConfig
    tensors: dict[str, torch.Tensor]

    @property
    def layer(self) -> Any:
        """The decoder layer's transformers config."""
        return self.config.transformer_layer_config

    @property
    def aux_layers(self) -> list[int]:
        """State after k target layers, ascending: speculators' and vLLM's convention."""
        return list(self.config.eagle_aux_hidden_state_layer_ids or [])

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size


def export_dtype(engine: EnginePart) -> torch.dtype:
    """The dtype in which the engine will run target and drafter: `auto` means bfloat16 for the drafter."""
    return EXPORT_DTYPES[engine.dtype]


def read_trained(directory: Path, target: TargetInfo) -> Trained:
    """Reads and checks train/final. Raises InputError when it is missing, EyasError when it does not fit the target.

    Checked: every expected tensor is there with its shape and nothing else is, all values are finite, the vocabulary
    map is consistent, and the sizes are the target's.
    """
    weights = directory / "model.safetensors"
    for path in (directory / "config.json", weights):
        if not path.is_file():
            raise InputError(f"no trained drafter: {path} is missing", fix="run `eyas train RECIPE` first")
    try:
        tensors = load_file(weights)
    except SafetensorError as e:
        raise EyasError(f"{weights} is damaged: {e}", fix="run `eyas train RECIPE` again") from None
    config = Eagle3SpeculatorConfig.from_pretrained(str(directory))
    if not isinstance(config, Eagle3SpeculatorConfig):
        raise EyasError(f"{directory / 'config.json'} is the config of a {type(config).__name__}, expected EAGLE-3's")
    trained = Trained(config, tensors)
    _check_config(trained, target, directory / "config.json")
    if {"d2t", "t2d"} <= tensors.keys():
        check_vocab_map(tensors["d2t"], tensors["t2d"], str(weights))
        if config.draft_vocab_size == target.vocab_size:  # the identity; vLLM refuses to load it
            del tensors["d2t"], tensors["t2d"]
    check_tensors(tensors, expected_shapes(config, target.vocab_size), str(weights))
    return trained


def expected_shapes(config: Eagle3SpeculatorConfig, target_vocab: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, under speculators' names. Weights are [out, in]."""
    layer: Any = config.transformer_layer_config
    sizes = LayerSizes(layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim, layer.intermediate_size)
    norms = NormOptions(config.norm_before_residual, config.norm_before_fc, config.norm_output, config.fc_norm)
    shapes = weight_shapes(
        layer.hidden_size,
        sizes,
        norms,
        layers=layer.num_hidden_layers,
        aux=len(config.eagle_aux_hidden_state_layer_ids or []),
        target_hidden=config.target_hidden_size,
    )
    shapes["lm_head.weight"] = (config.draft_vocab_size, layer.hidden_size)
    if config.draft_vocab_size != target_vocab:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (target_vocab,)}
    return shapes


def check_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]], where: str) -> None:
    """Raises EyasError unless names and shapes are exactly `expected` and every float is finite."""
    missing = sorted(set(expected) - set(tensors))
    extra = sorted(set(tensors) - set(expected))
    if missing or extra:
        raise EyasError(
            f"{where}: tensors missing: {', '.join(missing) or 'none'}; not part of the format: "
            f"{', '.join(extra) or 'none'}"
        )
    for name, shape in expected.items():
        found = tuple(tensors[name].shape)
        if found != shape:
            raise EyasError(f"{where}: {name} has shape {list(found)}, expected {list(shape)}")
        if tensors[name].is_floating_point() and not bool(torch.isfinite(tensors[name]).all()):
            raise EyasError(
                f"{where}: {name} holds NaN or infinite values",
                fix="train again with a lower train.lr, or look at train/log.jsonl for where the loss broke",
            )


def check_vocab_map(d2t: torch.Tensor, t2d: torch.Tensor, where: str) -> None:
    """d2t int64 [draft], an offset: target id = draft id + d2t[draft id]; t2d bool [target], true at those ids."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise EyasError(f"{where}: d2t is {d2t.dtype} and t2d {t2d.dtype}, expected int64 and bool")
    mapped = torch.arange(d2t.numel()) + d2t
    if not torch.equal(mapped, t2d.nonzero().flatten()):
        hint = " (d2t seems to hold target ids, not offsets)" if torch.equal(d2t, t2d.nonzero().flatten()) else ""
        raise EyasError(
            f"{where}: draft id + d2t[draft id] does not give the {int(t2d.sum())} true ids of t2d in order{hint}",
            fix="not one drafter's: run `eyas vocab RECIPE` and `eyas train RECIPE` again",
        )


def _check_config(trained: Trained, target: TargetInfo, path: Path) -> None:
    layer, aux = trained.layer, trained.aux_layers
    rope = layer.rope_parameters
    wrong: list[str] = []
    for key, found, expected in (
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("hidden_size", trained.config.target_hidden_size or layer.hidden_size, target.hidden_size),
        ("max_position_embeddings", layer.max_position_embeddings, target.max_position_embeddings),
    ):
        if found != expected:
            wrong.append(f"{key} is {found}, the target's is {expected}")
    if layer.model_type != "llama":
        wrong.append(f"the decoder layer is of type {layer.model_type}, the exported format holds llama layers")
    if layer.attention_bias or layer.mlp_bias:
        wrong.append("attention_bias and mlp_bias must be false")
    if not aux or aux != sorted(set(aux)) or aux[0] < 1 or aux[-1] > target.num_hidden_layers:
        wrong.append(
            f"eagle_aux_hidden_state_layer_ids is {aux}, expected ascending ids of 1..{target.num_hidden_layers}"
        )
    if rope.get("rope_type") not in ROPE_TYPES or "rope_theta" not in rope:
        wrong.append(f"rope_parameters is {rope}, expected rope_theta and a rope_type of {ROPE_TYPES}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        wrong.append("rope_parameters has partial_rotary_factor: vLLM would turn a part of the channels, training all")
    if trained.draft_vocab_size > target.vocab_size:
        wrong.append(f"draft_vocab_size {trained.draft_vocab_size} exceeds the target's {target.vocab_size} tokens")
    if wrong:
        raise EyasError(f"{path} does not fit the target {target.path}: {'; '.join(wrong)}")
