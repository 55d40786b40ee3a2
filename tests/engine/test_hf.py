"""The hf engine on the demo's target."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eyas.engine.base import Completion, Request
from eyas.engine.hf import HfEngine, _sample
from eyas.errors import InputError
from eyas.recipe import EnginePart, SamplingPart
from eyas.states.shard import Shard

from .targets import smollm2_info

LAYERS = [2, 15, 27, 30]
GREEDY = SamplingPart()  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def engine(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HfEngine]:
    part = EnginePart(kind="hf", dtype="float32", concurrency=4)  # type: ignore[call-arg]
    with HfEngine(part, smollm2_info(smollm2), LAYERS, tmp_path_factory.mktemp("states")) as e:
        yield e


def some_requests() -> list[Request]:
    g = torch.Generator().manual_seed(3)
    lengths, limits = [5, 23, 1, 11, 40], [6, 1, 4, 9, 3]
    return [
        Request(f"r{i}", torch.randint(20, 40000, (n,), generator=g).tolist(), m, prompt_logprobs=i == 3)
        for i, (n, m) in enumerate(zip(lengths, limits, strict=True))
    ]


@pytest.fixture(scope="module")
def answers(engine: HfEngine) -> list[Completion]:
    return list(engine.generate(some_requests(), GREEDY))


def test_a_batch_of_mixed_lengths_gives_the_states_and_logprobs_of_each_sequence_alone(
    engine: HfEngine, answers: list[Completion]
) -> None:
    assert [a.id for a in answers] == ["r0", "r1", "r2", "r3", "r4"]
    for request, answer in zip(some_requests(), answers, strict=True):
        assert answer.prompt_ids == request.prompt_ids
        assert 1 <= len(answer.output_ids) <= request.max_tokens
        assert answer.finish_reason == ("length" if answer.output_ids[-1] != 2 else "stop")
        assert answer.captured is not None
        sample = Shard(answer.captured.shard).sample(answer.captured.index)
        tokens = answer.prompt_ids + answer.output_ids
        assert sample.tokens.tolist() == tokens
        states, logits = engine.forward(tokens[:-1])
        error = (sample.states - states).norm(dim=-1) / states.norm(dim=-1)
        assert error.max() < 1e-4
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        start = len(answer.prompt_ids) - 1
        assert answer.output_logprobs == pytest.approx(logprobs[start:].tolist(), abs=1e-3)
        assert answer.output_ids == logits[start:].argmax(-1).tolist()
        if request.prompt_logprobs:
            assert answer.prompt_logprobs == pytest.approx(logprobs[:start].tolist(), abs=1e-3)
        else:
            assert answer.prompt_logprobs is None


def test_the_last_layer_is_before_the_final_norm(engine: HfEngine) -> None:
    states, logits = engine.forward([5, 6, 7])
    with torch.no_grad():
        again = engine._model.lm_head(engine._decoder.norm(states[:, -1]))
    assert (again - logits).abs().max() < 1e-3


def test_sampled_answers_repeat_with_their_seed_and_not_with_another(engine: HfEngine) -> None:
    def outputs(seed: int) -> list[list[int]]:
        sampling = SamplingPart(temperature=1.0, seed=seed)  # type: ignore[call-arg]
        return [a.output_ids for a in engine.generate([Request("a", [50, 60], 8), Request("b", [70], 8)], sampling)]

    assert outputs(1) == outputs(1)
    assert outputs(1) != outputs(2)


def test_sampling_keeps_to_top_k_and_top_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = torch.Generator().manual_seed(0)

    def seen(**kwargs: float) -> set[int]:
        sampling = SamplingPart(temperature=1.0, **kwargs)  # type: ignore[arg-type]
        return {_sample(logits, sampling, generator) for _ in range(200)}

    assert seen() == {0, 1, 2, 3}
    assert seen(top_k=2) == {0, 1}
    assert seen(top_p=0.6) == {0, 1}
    assert seen(top_p=0.1) == {0}


def test_layers_out_of_range_and_missing_decoders_are_refused(smollm2: Path, tmp_path: Path) -> None:
    info = smollm2_info(smollm2)
    with pytest.raises(InputError, match=r"within 1\.\.30, found \[31\]"):
        HfEngine(EnginePart(kind="hf"), info, [31], tmp_path)  # type: ignore[call-arg]
