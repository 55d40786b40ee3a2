"""The demo's target as a TargetInfo by hand, so that these tests need only the engine."""

from pathlib import Path

from eyas.target.info import TargetInfo, TensorRef


def smollm2_info(path: Path) -> TargetInfo:
    weights = path / "model.safetensors"
    embedding = TensorRef("model.embed_tokens.weight", weights, (49152, 576), "F32")
    return TargetInfo(
        path=path,
        architecture="LlamaForCausalLM",
        text_architecture="LlamaForCausalLM",
        model_type="llama",
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        attention="gqa",
        sliding_window=None,
        quantization=None,
        embedding=embedding,
        head=embedding,
        final_norm=TensorRef("model.norm.weight", weights, (576,), "F32"),
        norm_plus_one=False,
        logit_softcap=None,
        logit_scale=1.0,
        embedding_scale=1.0,
        eos_token_ids=(2,),
        fingerprint="0" * 16,
    )
