"""What eyas knows about a target model: sizes, conventions, and where its embedding, head and final norm lie."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Attention = Literal["mha", "gqa", "mla", "hybrid"]
PackingKind = Literal["scaled", "pack-quantized", "nvfp4", "awq", "gptq"]


@dataclass(frozen=True)
class Packing:
    """How a quantized weight is stored; `eyas.target.dequantize` undoes it."""

    kind: PackingKind
    """scaled: low-precision values times a scale for each tensor, row or block; the others pack several in a word"""
    bits: int
    block: tuple[int, int] | None
    """rows and columns that share a scale, where the config tells"""
    zero_offset: int
    """added to stored zero points (GPTQ)"""
    parts: dict[str, "TensorRef"] = field(hash=False)
    """stored tensors by their suffix, e.g. weight_packed, weight_scale"""


@dataclass(frozen=True)
class TensorRef:
    """One tensor of the checkpoint."""

    name: str
    file: Path
    shape: tuple[int, ...]
    """of the weight as the model uses it ([out, in], also where it is stored packed)"""
    dtype: str
    """as stored"""
    packing: Packing | None = None
    """None: stored plainly"""


@dataclass(frozen=True)
class Quantization:
    """What a quantized target's config and tensors say."""

    method: str
    """e.g. compressed-tensors int4, fp8 block, awq int4, gptq int4, nvfp4, mxfp4"""
    bits: int
    targets: tuple[str, ...]
    """kinds of modules whose weights are quantized, e.g. mlp.experts.*.down_proj"""
    tensors: int
    """how many weights are quantized"""


@dataclass(frozen=True)
class EngineSupport:
    """What the installed vLLM can do with this target's architecture; None where it cannot be known."""

    version: str | None
    architecture: bool | None
    eagle3: bool | None
    """its class gives the auxiliary hidden states that EAGLE-3 and the capture read"""


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
    norm_kind: Literal["rms", "layer"] = "rms"
    """layer: the final norm subtracts the mean as well (Cohere, Phi, GPT-2)"""
    final_norm_bias: TensorRef | None = None
    head_bias: TensorRef | None = None
    quantized: Quantization | None = None
    """more than the name that `quantization` gives"""
    weight_bytes: int = 0
    """size of the weight files"""
    layer_types: tuple[str, ...] = ()
    """kind of each layer where the config tells, e.g. full_attention, sliding_attention, linear_attention"""
    experts: int | None = None
    special_tokens: dict[str, int] = field(default_factory=dict, hash=False)
    """bos, eos, pad, unk with their ids, where the files tell"""
    thinking_tokens: tuple[str, str] | None = None
    """what opens and closes a thinking block, e.g. <think> and </think>"""
    dtype: str = "float32"
    """of the model's computation, as config.json says"""
    trunk: str = ""
    """key prefix of the module that owns the decoder layers, e.g. language_model.model."""
    notes: tuple[str, ...] = ()
    """what is odd about the checkpoint, one sentence each"""

    @property
    def tied(self) -> bool:
        return self.head.name == self.embedding.name
