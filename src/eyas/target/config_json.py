"""config.json as raw JSON: where the language model's config is nested, and its sizes under any of their names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.target.library_defaults import library_defaults

# In this order: a wrapper names its language model with one of these.
_NESTED = (
    "text_config", "llm_config", "language_config", "thinker_config", "language_model_config", "lm_config",
    "text_model_config", "text", "llm", "language_model", "decoder_config",
)  # fmt: skip

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim"),
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_vocab"),
    "max_position_embeddings": (
        "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "model_max_length",
        "seq_length", "n_ctx",
    ),
    "norm_eps": (
        "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon",
        "layernorm_epsilon", "ln_eps",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TargetConfig:
    """The outer config.json and the language model's part of it."""

    file: Path
    outer: dict[str, Any]
    text: dict[str, Any]
    nesting: tuple[str, ...]
    """keys from the outer config to the text config; empty where nothing is nested"""

    @property
    def model_type(self) -> str:
        return str(self.text.get("model_type") or self.outer.get("model_type") or "")

    def find(self, field: str) -> Any:
        """The text config's value of `field` under any of its names, else what the installed transformers' own class
        for this model type has as its default, else None. Never a value of the outer config."""
        for name in ALIASES.get(field, (field,)):
            if self.text.get(name) is not None:
                return self.text[name]
        defaults = library_defaults(self.model_type)
        for name in ALIASES.get(field, (field,)):
            if name not in self.text and defaults.get(name) is not None:
                return defaults[name]
        return None

    def size(self, field: str) -> int:
        """A positive integer; InputError naming the key when it is absent or not one."""
        value = self.find(field)
        if field == "num_hidden_layers":
            value = layer_count(self.text) or value
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            where = ".".join(self.nesting) or "the top level"
            raise InputError(
                f"{self.file}: {field} at {where} is {value!r}, a positive integer expected",
                fix=f"a language model's config needs one of: {', '.join(ALIASES[field])}",
            )
        return value

    def explicit(self, field: str) -> list[Any]:
        """What text and outer config say of `field` (text first), absent ones left out."""
        levels = [self.text] if self.text is self.outer else [self.text, self.outer]
        return [level[field] for level in levels if level.get(field) is not None]


def read_config(path: Path) -> TargetConfig:
    """Reads PATH/config.json. Raises InputError when it is missing, broken, or holds no language model."""
    file = path / "config.json"
    outer = read_json_object(file)
    if outer is None:
        raise InputError(
            f"{path} has no config.json", fix="point target.path at a checkpoint directory in Hugging Face layout"
        )
    found = _text_config(outer, ())
    if found is None:
        parts = sorted(key for key, value in outer.items() if isinstance(value, dict))
        raise InputError(
            f"{file} (model_type {outer.get('model_type')!r}) holds no language model: no hidden size and layer count "
            f"at the top level{' or in ' + ', '.join(parts) if parts else ''}",
            fix="point target.path at a text-generating model",
        )
    return TargetConfig(file, outer, *found)


def layer_count(config: dict[str, Any]) -> int | None:
    """The number of layers that a config says itself, in a number or in a pattern of layers (Nemotron-H)."""
    for name in ALIASES["num_hidden_layers"]:
        if isinstance(config.get(name), int):
            return int(config[name])
    for name in ("hybrid_override_pattern", "layers_block_type", "layer_types"):
        pattern = config.get(name)
        if isinstance(pattern, (str, list)) and pattern:
            return len(pattern)
    return None


def read_json_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`; None when there is no such file; InputError when it is not a JSON object."""
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise InputError(f"{file} is not valid JSON: {e}", fix="download it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{file} holds {type(value).__name__}, not a JSON object", fix="download it again")
    return value


def _text_config(config: dict[str, Any], nesting: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]] | None:
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, dict):
            found = _text_config(inner, (*nesting, key))
            if found is not None:
                return found
    return (config, nesting) if _is_language_model(config, nested=bool(nesting)) else None


def _is_language_model(config: dict[str, Any], *, nested: bool) -> bool:
    def has(field: str) -> bool:
        return any(isinstance(config.get(name), int) for name in ALIASES[field])

    # A nested text config may leave everything to its class (Gemma 3 leaves out the vocabulary).
    if nested:
        return has("hidden_size") or bool(config.get("model_type"))
    layers = has("num_hidden_layers") or layer_count(config) is not None
    return has("hidden_size") and layers and (has("vocab_size") or has("num_attention_heads"))
