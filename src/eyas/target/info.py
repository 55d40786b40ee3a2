"""What eyas knows about a target model: sizes, conventions, and where its embedding, head and final norm lie."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Attention = Literal["mha", "gqa", "mla", "hybrid"]


@dataclass(frozen=True)
class TensorRef:
    """One tensor of the checkpoint."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TargetInfo:
    path: Path
    """local checkpoint directory"""
    architecture: str
    """of the outer config, e.g. KimiK25ForConditionalGeneration"""
    text_architecture: str
    """of the language model inside it, e.g. DeepseekV3ForCausalLM; the same where nothing is nested"""
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """rows of the embedding, padding included"""
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """in the transformers-5 spelling: rope_type, rope_theta, and what the type needs"""
    attention: Attention
    sliding_window: int | None
    quantization: str | None
    embedding: TensorRef
    head: TensorRef
    """the same tensor as `embedding` when tied"""
    final_norm: TensorRef
    norm_plus_one: bool
    """the final norm multiplies by 1 + weight (Gemma)"""
    logit_softcap: float | None
    logit_scale: float
    """the head's output is multiplied by this before the soft cap"""
    embedding_scale: float
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """of config.json, the tokenizer files and the checkpoint's header"""

    @property
    def tied(self) -> bool:
        return self.head.name == self.embedding.name
