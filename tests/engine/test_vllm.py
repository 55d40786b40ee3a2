"""The real vLLM with eyas's capture, against transformers in float32. One server for all tests of this file."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        concurrency=64,
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
    assert said[-1].startswith("vLLM answers after"), said
    assert [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


@pytest.fixture(scope="module")
def hf(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HfEngine]:
    part = EnginePart(kind="hf", dtype="float32", concurrency=8)  # type: ignore[call-arg]
    with HfEngine(part, smollm2_info(smollm2), LAYERS, tmp_path_factory.mktemp("hf")) as engine:
        yield engine


def some_requests(n: int, shared: int = 0, longest: int = 90, new: int = 8) -> list[Request]:
    g = torch.Generator().manual_seed(1)
    prefix = torch.randint(20, 40000, (shared,), generator=g).tolist()
    return [
        Request(
            f"c{i}",
            prefix + torch.randint(20, 40000, (1 + 13 * i % longest,), generator=g).tolist(),
            1 if i % 6 == 5 else new + i % 7,
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


async def cut_off(url: str, key: str, prompts: list[list[int]]) -> int:
    """Capturing requests that their clients give up on, one after another."""
    cut = 0
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}) as client:
        for ids in prompts:
            body = {"model": "target", "prompt": ids, "max_tokens": 400, "ignore_eos": True}
            body["kv_transfer_params"] = {"capture": True}
            try:
                await client.post("/v1/completions", json=body, timeout=1.0)
            except httpx.ReadTimeout:
                cut += 1
    return cut


def test_everything_at_once_equals_one_at_a_time(vllm: VllmEngine, hf: HfEngine) -> None:
    """64 in flight, a KV cache for ten of them, steps of 96 tokens, shared prefixes, aborts: every sample is right."""
    assert vllm.server is not None
    before = preemptions(vllm)
    requests = some_requests(64, shared=40, longest=24, new=26)
    cut: list[int] = []
    prefix = requests[0].prompt_ids[:40]
    server = vllm.server
    assert server.key is not None
    aborted = [[*prefix, 7, i] for i in range(8)]
    url, key = server.url, server.key
    thread = threading.Thread(target=lambda: cut.append(asyncio.run(cut_off(url, key, aborted))))
    thread.start()
    together = {a.id: a for a in vllm.generate(requests, GREEDY)}
    thread.join()
    assert cut[0] >= 4
    assert preemptions(vllm) > before
    assert set(together) == {r.id for r in requests}
    for request in requests:
        check(request, together[request.id], hf)
    for request in requests[5::12]:
        (alone,) = vllm.generate([request], GREEDY)
        assert alone.output_ids == together[request.id].output_ids
        a, b = sample_of(alone).states, sample_of(together[request.id]).states
        assert ((a - b).norm(dim=-1) / a.norm(dim=-1)).max() < 1e-4


def post(vllm: VllmEngine, **body: Any) -> dict[str, Any]:
    assert vllm.server is not None
    headers = {"Authorization": f"Bearer {vllm.server.key}"}
    body = {"model": "target", "kv_transfer_params": {"capture": True}, "return_token_ids": True, **body}
    reply = httpx.post(f"{vllm.server.url}/v1/completions", headers=headers, json=body, timeout=120)
    return dict(reply.raise_for_status().json())


def shard_of(told: dict[str, Any]) -> Shard:
    path, end = Path(told["path"]), time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    return Shard(path)


def test_a_stop_string_leaves_no_states_and_a_stop_token_id_leaves_all(vllm: VllmEngine, hf: HfEngine) -> None:
    (greedy,) = vllm.generate([Request("a", [50, 60, 70], 12)], GREEDY)
    text = post(vllm, prompt=[50, 60, 70], max_tokens=12, temperature=0.0)["choices"][0]["text"]
    stopped = post(vllm, prompt=[50, 60, 70], max_tokens=12, temperature=0.0, stop=[text[4:8]])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped.get("kv_transfer_params") is None  # the client refuses such a reply
    stop = greedy.output_ids[3]
    reply = post(vllm, prompt=[50, 60, 70], max_tokens=12, temperature=0.0, stop_token_ids=[stop])
    told, choice = reply["kv_transfer_params"]["capture"], reply["choices"][0]
    first = greedy.output_ids.index(stop)
    assert choice["token_ids"] == greedy.output_ids[: first + 1]
    sample = shard_of(told).sample(told["index"])
    assert sample.tokens.tolist() == [50, 60, 70, *choice["token_ids"]]
    states, _ = hf.forward(sample.tokens[:-1].tolist())
    assert ((sample.states - states).norm(dim=-1) / states.norm(dim=-1)).max() < 1e-4


def test_several_answers_to_one_prompt_give_the_states_of_one_whole_answer(vllm: VllmEngine, hf: HfEngine) -> None:
    reply = post(vllm, prompt=[50, 60, 70], max_tokens=9, temperature=1.0, seed=3, n=3)
    told = reply["kv_transfer_params"]["capture"]
    sample = shard_of(told).sample(told["index"])
    answers = [c["token_ids"] for c in reply["choices"]]
    assert len({tuple(a) for a in answers}) == 3
    assert sample.tokens.tolist()[3:] in answers
    assert sample.missing_rows == 0
    states, _ = hf.forward(sample.tokens[:-1].tolist())
    assert ((sample.states - states).norm(dim=-1) / states.norm(dim=-1)).max() < 1e-4


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
