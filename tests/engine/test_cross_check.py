"""vLLM's own extract_hidden_states (speculative decoding, example connector) gives the states that eyas captures."""

import json
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eyas.engine.base import Request
from eyas.engine.vllm import VllmEngine
from eyas.engine.vllm_server import VllmServer
from eyas.recipe import EnginePart, SamplingPart
from eyas.states.shard import Shard

from .targets import smollm2_info

pytestmark = [pytest.mark.engine, pytest.mark.heavy]
LAYERS = [2, 15, 27, 30]
PROMPTS = [[50, 60, 70], list(range(100, 160)), [9, 8, 7, 6, 5, 4]]
NEW = 12


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """The file appears after the reply, and is not renamed into place."""
    end = time.monotonic() + 30
    while True:
        try:
            return load_file(path)
        except (OSError, SafetensorError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def test_extract_hidden_states_agrees(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "plugins"))
    target = smollm2_info(smollm2)
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
    }
    transfer = {
        "kv_connector": "ExampleOnCpu",
        "kv_connector_module_path": "example_on_cpu",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    args = {"speculative-config": json.dumps(speculative), "kv-transfer-config": json.dumps(transfer)}
    theirs = []
    part = EnginePart(dtype="float32", concurrency=4, args=args)  # type: ignore[call-arg]
    with VllmServer(part, target, None, None, tmp_path / "theirs.log", max_model_len=256) as server:
        for ids in PROMPTS:
            body = {"model": "target", "prompt": ids, "max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
            body |= {"kv_transfer_params": {"include_output_tokens": True}}
            headers = {"Authorization": f"Bearer {server.key}"}
            reply = httpx.post(f"{server.url}/v1/completions", headers=headers, json=body, timeout=120)
            theirs.append(loaded(Path(reply.raise_for_status().json()["kv_transfer_params"]["hidden_states_path"])))

    requests = [Request(str(i), x["token_ids"].tolist(), 1) for i, x in enumerate(theirs)]
    part = EnginePart(dtype="float32", concurrency=4)  # type: ignore[call-arg]
    engine = VllmEngine(part, target, LAYERS, tmp_path / "states", log_file=tmp_path / "ours.log", max_model_len=256)
    with engine:
        prefilled = {a.id: a for a in engine.generate(requests, SamplingPart())}  # type: ignore[call-arg]
        again = [Request(str(i), ids, NEW) for i, ids in enumerate(PROMPTS)]
        generated = {a.id: a for a in engine.generate(again, SamplingPart())}  # type: ignore[call-arg]
    for i, (ids, x) in enumerate(zip(PROMPTS, theirs, strict=True)):
        assert x["token_ids"].tolist()[: len(ids)] == ids
        assert len(x["token_ids"]) == len(ids) + NEW - 1
        for answers in (prefilled, generated):
            captured = answers[str(i)].captured
            assert captured is not None
            sample = Shard(captured.shard).sample(captured.index)
            rows = min(len(sample.states), len(x["hidden_states"]))
            assert rows >= len(ids) + NEW - 1 or answers is generated  # a stop token ends the answer earlier
            assert sample.tokens[:rows].tolist() == x["token_ids"][:rows].tolist()
            error = (sample.states[:rows] - x["hidden_states"][:rows]).norm(dim=-1) / sample.states[:rows].norm(dim=-1)
            assert error.max() < 1e-4, error.amax(0)
