"""What the target is, from config.json and safetensors headers alone: no weights, no GPU, no code of the checkpoint."""

import hashlib

from eyas.errors import InputError
from eyas.target.attention import attention_facts
from eyas.target.config_json import TargetConfig, read_config
from eyas.target.conventions import conventions
from eyas.target.info import TargetInfo, TensorRef
from eyas.target.layers import check_layers
from eyas.target.library_defaults import causal_lm_class, library_defaults
from eyas.target.locate import locate
from eyas.target.quantization import find_quantization, packing_hints
from eyas.target.roles import Roles, find_roles
from eyas.target.rope import rope_parameters
from eyas.target.safetensors_files import Checkpoint, open_checkpoint
from eyas.target.tokens import eos_token_ids, special_tokens, thinking_tokens
from eyas.target.values import Values

_IDENTITY_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)  # fmt: skip
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "float", "half", "auto")


def resolve_target(path_or_id: str, *, remote_code: bool = False) -> TargetInfo:
    """Resolves a checkpoint directory or hub id.

    `remote_code` only decides whether a hub download includes the checkpoint's Python files; none is run here.
    Raises InputError on a missing, cut, contradictory or ambiguous checkpoint.
    """
    path = locate(path_or_id, remote_code=remote_code)
    config = read_config(path)
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    checkpoint = open_checkpoint(path)
    roles = find_roles(checkpoint, hidden=hidden, layers=layers, hints=packing_hints(config))
    head, notes = _decide_head(config, roles)
    vocab = roles.embedding.shape[0]
    notes += _vocab_notes(config, vocab)
    attention = attention_facts(config, hidden)
    notes += check_layers(config, checkpoint, roles.trunk, layers, attention.layer_types)
    logits = conventions(config, hidden)
    rope, contradictions = rope_parameters(config)
    notes += contradictions
    quantized = find_quantization(config, checkpoint)
    eos = eos_token_ids(path, config)
    if not eos:
        raise InputError(
            f"{path}: neither generation_config.json nor config.json names an eos_token_id",
            fix="add it to generation_config.json",
        )
    outside = [e for e in eos if not 0 <= e < vocab]
    if outside:
        raise InputError(
            f"{path}: eos token id {outside[0]} lies outside the {vocab} rows of {roles.embedding.name}",
            fix="config and weights are of different checkpoints",
        )
    return TargetInfo(
        path=path,
        architecture=_architecture(config),
        text_architecture=_text_architecture(config),
        model_type=config.model_type,
        hidden_size=hidden,
        intermediate_size=_intermediate_size(config, hidden),
        num_hidden_layers=layers,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.key_value_heads,
        head_dim=attention.head_dim,
        vocab_size=vocab,
        max_position_embeddings=config.size("max_position_embeddings"),
        rms_norm_eps=logits.eps,
        rope_parameters=rope,
        attention=attention.kind,
        sliding_window=attention.sliding_window,
        quantization=None if quantized is None else quantized.method,
        embedding=roles.embedding,
        head=head,
        final_norm=roles.final_norm,
        norm_plus_one=logits.norm_plus_one,
        logit_softcap=logits.logit_softcap,
        logit_scale=logits.logit_scale,
        embedding_scale=logits.embedding_scale,
        eos_token_ids=eos,
        fingerprint=_fingerprint(checkpoint, roles),
        norm_kind=logits.norm_kind,
        final_norm_bias=roles.final_norm_bias,
        head_bias=roles.head_bias,
        quantized=quantized,
        weight_bytes=sum((path / file).stat().st_size for file in checkpoint.files),
        layer_types=attention.layer_types,
        experts=_experts(config),
        special_tokens=special_tokens(path, config),
        thinking_tokens=thinking_tokens(path),
        dtype=_dtype(config, roles.final_norm),
        trunk=roles.trunk,
        notes=tuple(notes),
    )


def _decide_head(config: TargetConfig, roles: Roles) -> tuple[TensorRef, list[str]]:
    """Tied or separate: the tensors decide. InputError where the config says "not tied" and no head is there."""
    said = [flag for level in config.levels if (flag := level.flag("tie_word_embeddings")) is not None]
    if roles.head is not None:
        if said and all(said):
            note = (
                f"config.json says tied embeddings, but the checkpoint has its own head {roles.head.name}: that is used"
            )
            return roles.head, [note]
        return roles.head, []
    if not any(said):
        kinds = (str(config.outer.get("model_type")), config.model_type)
        defaults = [library_defaults(kind).get("tie_word_embeddings") for kind in kinds]
        if said or (False in defaults and True not in defaults):
            raise InputError(
                f"{config.file}: tie_word_embeddings is {'false' if said else 'absent (false for this model type)'}, "
                f"but no head tensor (lm_head.weight or the like) lies beside {roles.embedding.name}",
                fix="complete the checkpoint, or set tie_word_embeddings to true if the head is the embedding",
            )
    return roles.embedding, []


def _vocab_notes(config: TargetConfig, rows: int) -> list[str]:
    said = config.whole("vocab_size")
    if config.says("vocab_size") and said != rows:
        return [f"config.json says vocab_size {said}, the embedding has {rows} rows: the rows count"]
    return []


def _architecture(config: TargetConfig) -> str:
    names = _architectures(config.levels[-1])
    if not names:
        raise InputError(f"{config.file} names no architectures", fix='add the model class, e.g. ["LlamaForCausalLM"]')
    return names[0]


def _text_architecture(config: TargetConfig) -> str:
    own = _architectures(config.values)
    return own[0] if own else causal_lm_class(config.model_type) or _architecture(config)


def _architectures(level: Values) -> list[str]:
    return level.entries("architectures", lambda name: isinstance(name, str), 'a list such as ["LlamaForCausalLM"]')


def _intermediate_size(config: TargetConfig, hidden: int) -> int:
    return config.largest("intermediate_size") or 4 * hidden


def _experts(config: TargetConfig) -> int | None:
    for key in ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"):
        value = config.text.get(key)
        if isinstance(value, int) and value > 1:
            return value
    return None


def _dtype(config: TargetConfig, norm: TensorRef) -> str:
    for level in config.levels:
        for key in ("dtype", "torch_dtype"):
            name = (level.text(key) or "auto").removeprefix("torch.")
            if name not in _DTYPES:
                raise level.wrong(key, f"one of {', '.join(_DTYPES)}")
            if name != "auto":
                return name
    return {"BF16": "bfloat16", "F16": "float16"}.get(norm.dtype, "float32")


def _fingerprint(checkpoint: Checkpoint, roles: Roles) -> str:
    """Of the files that say what the target is, the role tensors' headers, and samples of the weights themselves:
    two fine-tunes of one model have the same headers."""
    digest = hashlib.sha256()
    code = sorted(file.name for file in checkpoint.path.glob("*.py"))
    for name in (*_IDENTITY_FILES, *code):
        file = checkpoint.path / name
        if file.is_file():
            digest.update(f"{name}:{file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    for ref in (roles.embedding, roles.head, roles.final_norm):
        digest.update(repr(None if ref is None else (ref.name, ref.shape, ref.dtype)).encode())
    for name in checkpoint.files:
        file = checkpoint.path / name
        size = file.stat().st_size
        digest.update(f"{name}:{size}\n".encode())
        with open(file, "rb") as f:
            start = 8 + int.from_bytes(f.read(8), "little")
            for place in (start, (start + size) // 2, max(start, size - 4096)):
                f.seek(place)
                digest.update(f.read(4096))
    start, end = checkpoint.header_of(roles.final_norm.name).data_range(roles.final_norm.name)
    with open(roles.final_norm.file, "rb") as f:
        f.seek(start)
        digest.update(f.read(end - start))
    return digest.hexdigest()[:16]
