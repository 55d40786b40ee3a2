"""The real vLLM with eyas's capture, against transformers in float32. One server for all tests of this file."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from eyas.engine.base import Completion, Request
from eyas.engine.hf import HfEngine
from eyas.engine.spec_counters import SpecCounters
from eyas.engine.vllm import VllmEngine
from eyas.errors import EngineError
from eyas.recipe import EnginePart, SamplingPart
from eyas.states.shard import Shard, ShardSample

from .targets import smollm2_info

pytestmark = pytest.mark.engine
LAYERS = [2, 15, 27, 30]
GREEDY = SamplingPart()  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def vllm(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("run")
    # a small step budget and a small cache: prefills are chunked and running requests preempted
    part = EnginePart(  # type: ignore[call-arg]
        dtype="float32",
        concurrency=32,
        args={
            "max-num-batched-tokens": 96,
            "block-size": 32,
            "num-gpu-blocks-override": 20,
            "enable-prefix-caching": True,
        },
    )
    target = smollm2_info(smollm2)
    said: list[str] = []
    engine = VllmEngine(
        part,
        target,
        LAYERS,
        folder / "states",
        log_file=folder / "vllm.log",
        max_model_len=512,
        progress_say=said.append,
    )
    with engine:
        yield engine
        assert engine.server is not None
        started = psutil.Process().children(recursive=True)
        url = engine.server.url
    assert said[-1].startswith("vLLM answers after")
    assert [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


@pytest.fixture(scope="module")
def hf(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HfEngine]:
    part = EnginePart(kind="hf", dtype="float32", concurrency=8)  # type: ignore[call-arg]
    with HfEngine(part, smollm2_info(smollm2), LAYERS, tmp_path_factory.mktemp("hf")) as engine:
        yield engine


def some_requests(n: int, shared: int = 0) -> list[Request]:
    g = torch.Generator().manual_seed(1)
    prefix = torch.randint(20, 40000, (shared,), generator=g).tolist()
    return [
        Request(
            f"c{i}",
            prefix + torch.randint(20, 40000, (1 + 13 * i % 90,), generator=g).tolist(),
            1 if i % 6 == 5 else 8 + i % 7,
            prompt_logprobs=i % 5 == 2,
        )
        for i in range(n)
    ]


def sample_of(answer: Completion) -> ShardSample:
    assert answer.captured is not None
    shard = Shard(answer.captured.shard)
    assert shard.layers == LAYERS
    assert shard.requests[answer.captured.index]["bad_rows"] == 0
    assert (
        answer.captured.rows == shard.rows(answer.captured.index) == len(answer.prompt_ids) + len(answer.output_ids) - 1
    )
    return shard.sample(answer.captured.index)


def check(request: Request, answer: Completion, hf: HfEngine) -> None:
    """States to 1e-4 of transformers', and the engine's log probabilities from the last state to 1e-3."""
    assert answer.prompt_ids == request.prompt_ids
    sample = sample_of(answer)
    tokens = answer.prompt_ids + answer.output_ids
    assert sample.tokens.tolist() == tokens
    assert sample.prompt_length == len(request.prompt_ids)
    assert sample.missing_rows == 0
    states, _ = hf.forward(tokens[:-1])
    error = (sample.states - states).norm(dim=-1) / states.norm(dim=-1)
    assert error.max() < 1e-4, (request.id, error.max(0))
    with torch.no_grad():
        logits = hf._model.lm_head(hf._decoder.norm(sample.states[:, -1]))
    logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    start = len(request.prompt_ids) - 1
    assert answer.output_logprobs == pytest.approx(logprobs[start:].tolist(), abs=1e-3)
    if request.prompt_logprobs:
        assert answer.prompt_logprobs == pytest.approx(logprobs[:start].tolist(), abs=1e-3)


def preemptions(engine: VllmEngine) -> float:
    assert engine.server is not None
    text = httpx.get(f"{engine.server.url}/metrics").text
    return sum(float(x.rsplit(" ", 1)[1]) for x in text.splitlines() if x.startswith("vllm:num_preemptions_total"))


def test_mixed_requests_captured_and_not(vllm: VllmEngine, hf: HfEngine) -> None:
    assert vllm.server is not None
    server, requests = vllm.server, some_requests(14)
    stream = vllm.generate(iter(requests), GREEDY)
    headers = {"Authorization": f"Bearer {server.key}"}
    answers = []
    with httpx.Client(base_url=server.url, headers=headers, timeout=300) as client:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        for answer in stream:
            answers.append(answer)
            if len(answers) % 6 == 0:  # plain requests in between, one of them cut off by its client
                body = {"model": "target", "prompt": [5, 6, 7, len(answers)], "max_tokens": 3}
                assert "capture" not in str(client.post("/v1/completions", json=body).raise_for_status().json())
                body |= {"max_tokens": 400, "ignore_eos": True, "kv_transfer_params": {"capture": True}}
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body, timeout=0.5)
    by_id = {a.id: a for a in answers}
    assert set(by_id) == {r.id for r in requests}
    for request in requests:
        check(request, by_id[request.id], hf)
    assert {a.finish_reason for a in answers} <= {"length", "stop"}


def test_chunked_prefill_shared_prefixes_and_preemption_change_nothing(vllm: VllmEngine, hf: HfEngine) -> None:
    before = preemptions(vllm)
    requests = some_requests(20, shared=90)
    together = {a.id: a for a in vllm.generate(requests, GREEDY)}
    assert preemptions(vllm) > before
    for request in requests[:6]:
        check(request, together[request.id], hf)
    for request in requests[8::8]:
        (alone,) = vllm.generate([request], GREEDY)
        assert alone.output_ids == together[request.id].output_ids
        a, b = sample_of(alone).states, sample_of(together[request.id]).states
        assert ((a - b).norm(dim=-1) / a.norm(dim=-1)).max() < 1e-4


def test_both_engines_agree(vllm: VllmEngine, hf: HfEngine) -> None:
    requests = [Request(r.id, r.prompt_ids, r.max_tokens) for r in some_requests(4)]
    ours, theirs = ({a.id: a for a in e.generate(requests, GREEDY)} for e in (hf, vllm))
    for r in requests:
        assert ours[r.id].output_ids == theirs[r.id].output_ids
        a, b = sample_of_hf(ours[r.id]), sample_of(theirs[r.id]).states
        assert ((a - b).norm(dim=-1) / a.norm(dim=-1)).max() < 1e-4


def sample_of_hf(answer: Completion) -> torch.Tensor:
    assert answer.captured is not None
    return Shard(answer.captured.shard).sample(answer.captured.index).states


def test_sampled_answers_repeat_with_their_seed(vllm: VllmEngine) -> None:
    def outputs(seed: int) -> list[list[int]]:
        sampling = SamplingPart(temperature=1.0, top_k=50, top_p=0.9, seed=seed)  # type: ignore[call-arg]
        return [a.output_ids for a in vllm.generate([Request("a", [50, 60, 70], 8)], sampling)]

    assert outputs(1) == outputs(1)
    assert outputs(1) != outputs(2)


def test_a_request_that_does_not_fit_is_refused_in_the_servers_words(vllm: VllmEngine) -> None:
    with pytest.raises(EngineError, match=r"request long was refused .*HTTP 400.*512"):
        list(vllm.generate([Request("long", [5] * 600, 4)], GREEDY))


def test_without_a_drafter_the_counters_are_zero(vllm: VllmEngine) -> None:
    assert vllm.spec_counters() == SpecCounters(0, 0, 0, ())


def test_no_shard_is_left_without_its_name(vllm: VllmEngine) -> None:
    (answer,) = vllm.generate([Request("a", [50, 60, 70], 2)], GREEDY)
    assert answer.captured is not None
    names = [p.name for p in answer.captured.shard.parent.iterdir()]
    assert all(n.endswith(".safetensors") for n in names), names
