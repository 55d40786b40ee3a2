"""The tiny Kimi-K2.5 in a real vLLM: captured states give the engine's own log probabilities through the roles."""

from pathlib import Path

import pytest
import torch

from eyas.engine.base import Request
from eyas.engine.vllm import VllmEngine
from eyas.recipe import EnginePart, SamplingPart
from eyas.states.shard import Shard
from eyas.target.resolve import resolve_target
from eyas.target.teacher import Teacher
from eyas.target.tokenizer import load_tokenizer
from target.tiny_kimi import kimi_k25

ENGINE = EnginePart.model_validate(
    {
        "dtype": "float32",
        "attention_backend": "CPU_MLA",
        "args": {"enforce-eager": True, "language-model-only": True},
        "start_timeout": 400,
    }
)


@pytest.mark.engine
@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_states_reproduce_log_probabilities(tmp_path: Path) -> None:
    target = resolve_target(str(kimi_k25(tmp_path / "kimi")))
    tokenizer = load_tokenizer(target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"what is {k} plus {k + 1}?"}], add_generation_prompt=True, return_dict=False
        )
        for k in range(6)
    ]
    requests = [Request(f"r{k}", ids, 24) for k, ids in enumerate(prompts)]
    layers = [1, 2, 3, 4]
    states = tmp_path / "states"
    states.mkdir()
    teacher = Teacher(target)
    log_file = tmp_path / "vllm.log"
    done = 0
    with VllmEngine(ENGINE, target, layers, states, log_file=log_file, max_model_len=256) as engine:
        sampling = SamplingPart.model_validate({"temperature": 0.0, "max_tokens": 24})
        for completion in engine.generate(requests, sampling):
            assert completion.captured is not None
            sample = Shard(completion.captured.shard).sample(completion.captured.index)
            last = sample.states[len(completion.prompt_ids) - 1 :, -1].float()
            outputs = torch.tensor(completion.output_ids)
            found = teacher.log_probs(last, outputs)
            assert torch.allclose(found, torch.tensor(completion.output_logprobs), atol=1e-3)
            done += 1
    assert done == len(prompts)
