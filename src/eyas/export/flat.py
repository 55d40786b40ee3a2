"""The flat LlamaForCausalLMEagle3 layout that vLLM and SGLang share: names of tensors, fields of config.json."""

from typing import Any

import torch

from eyas.export.trained import Trained
from eyas.target.info import TargetInfo


def flat_tensors(trained: Trained) -> dict[str, torch.Tensor]:
    """speculators' names -> the published references' names: the first layer is `midlayer`."""
    return {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: tensor
        for name, tensor in trained.tensors.items()
    }


def flat_config(trained: Trained, target: TargetInfo, dtype: torch.dtype) -> dict[str, Any]:
    """What both engines read alike; the auxiliary layer ids are left to the caller (their conventions differ).

    rope is written twice: `rope_parameters` (transformers 5, vLLM) and `rope_theta` / `rope_scaling` (older readers).
    """
    layer, config = trained.layer, trained.config
    rope = dict(layer.rope_parameters)
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    eos = list(target.eos_token_ids)
    flat: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": layer.num_hidden_layers,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.hidden_act,
        "rms_norm_eps": layer.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": trained.draft_vocab_size,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "num_aux_hidden_states": len(trained.aux_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if config.target_hidden_size is not None:
        flat["target_hidden_size"] = config.target_hidden_size
    if eos:
        flat["eos_token_id"] = eos if len(eos) > 1 else eos[0]
    return flat
