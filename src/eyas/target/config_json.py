"""config.json as raw JSON: where the language model's config is nested, and its sizes under any of their names."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.target.library_defaults import library_defaults
from eyas.target.values import Values, is_whole, nan_key

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
        return next((kind for level in self.levels if (kind := level.text("model_type"))), "")

    @property
    def values(self) -> Values:
        """The text config's values by type."""
        return Values(self.file, ".".join(self.nesting), self.text)

    @property
    def levels(self) -> list[Values]:
        """Of text and outer config, text first."""
        return [self.values] if self.text is self.outer else [self.values, Values(self.file, "", self.outer)]

    def find(self, field: str) -> Any:
        """The text config's value of `field` under any of its names, else what the installed transformers' own class
        for this model type has as its default, else None. Never a value of the outer config."""
        values, name = self._holder(field)
        return values.items.get(name)

    def says(self, field: str) -> bool:
        """The text config has `field` itself: it is not its class's default."""
        return any(self.text.get(name) is not None for name in ALIASES.get(field, (field,)))

    def number(self, field: str, *, above: float = -math.inf) -> float | None:
        """As `find`; InputError when it is no finite number above `above`."""
        values, name = self._holder(field)
        return values.number(name, above=above)

    def whole(self, field: str, *, low: int = 1) -> int | None:
        """As `find`; InputError when it is no integer of at least `low`."""
        values, name = self._holder(field)
        return values.whole(name, low=low)

    def largest(self, field: str) -> int | None:
        """As `find`, of a positive integer or a list of one for each layer."""
        values, name = self._holder(field)
        if not isinstance(values.items.get(name), list):
            return values.whole(name)
        expected = "a positive integer, or a list of them,"
        found = values.entries(name, lambda v: v is None or (is_whole(v) and v >= 0), expected)
        if not any(found):
            raise values.wrong(name, expected)
        return max(v or 0 for v in found)

    def size(self, field: str) -> int:
        """A positive integer; InputError naming the key when it is absent or not one."""
        values, name = self._holder(field)
        value = values.items.get(name)
        if field == "num_hidden_layers":
            value = layer_count(self.text) or value
        if isinstance(value, list) and value and is_whole(value[0]) and value.count(value[0]) == len(value):
            value = value[0]
        if value is None:
            where = ".".join(self.nesting) or "the top level"
            raise InputError(
                f"{self.file}: {where} has no {field}",
                fix=f"a language model's config needs one of: {', '.join(ALIASES[field])}",
            )
        if not is_whole(value) or value < 1:
            raise values.wrong(name, "a positive integer")
        return value

    def _holder(self, field: str) -> tuple[Values, str]:
        names = ALIASES.get(field, (field,))
        for name in names:
            if self.text.get(name) is not None:
                return self.values, name
        defaults = library_defaults(self.model_type)
        for name in names:
            if name not in self.text and defaults.get(name) is not None:
                return Values(self.file, f"(default of model_type {self.model_type})", defaults), name
        return self.values, names[0]


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
    if (key := nan_key(outer)) is not None:
        raise InputError(f"{file}: {key} is NaN, a number expected", fix="correct it from the model's own repository")
    return TargetConfig(file, outer, *found)


def layer_count(config: dict[str, Any]) -> int | None:
    """The number of layers that a config says itself, in a number or in a pattern of layers (Nemotron-H)."""
    for name in ALIASES["num_hidden_layers"]:
        if is_whole(config.get(name)):
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
    except RecursionError:
        raise InputError(f"{file} is no config: its JSON is nested too deep", fix="download it again") from None
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
        return any(config.get(name) is not None for name in ALIASES[field])  # of a wrong type: told when it is read

    # A nested text config may leave everything to its class (Gemma 3 leaves out the vocabulary).
    if nested:
        return has("hidden_size") or bool(config.get("model_type"))
    layers = has("num_hidden_layers") or layer_count(config) is not None
    return has("hidden_size") and layers and (has("vocab_size") or has("num_attention_heads"))
