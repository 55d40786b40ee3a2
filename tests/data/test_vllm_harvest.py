"""A harvest of two-turn conversations from the real vLLM: its server is killed in the middle, then it goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from eyas.data.harvest import harvest
from eyas.data.schema import part_files
from eyas.engine.opening import open_engine
from eyas.engine.vllm import VllmEngine
from eyas.progress import Progress
from eyas.recipe import load_recipe
from eyas.rundir import RunDir
from eyas.states.store import HarvestStore
from eyas.target.resolve import resolve_target
from eyas.target.tokenizer import load_tokenizer

EYAS = (sys.executable, "-c", "from eyas.cli import main; main()")
LAYERS = [2, 15, 27, 30]
COUNTRIES = [
    "France",
    "Italy",
    "Spain",
    "Japan",
    "Egypt",
    "Greece",
    "Norway",
    "Peru",
    "Kenya",
    "Cuba",
    "Chile",
    "Poland",
]


def servers_below(pid: int) -> list[psutil.Process]:
    """The API server processes among the descendants of `pid` (not their supervisors)."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = process.cmdline()
            if "vllm.entrypoints.openai.api_server" in line and "eyas.engine.supervise" not in line:
                found.append(process)
    return found


def samples(run: RunDir) -> list[dict[str, Any]]:
    return [row for part in part_files(run.samples) for row in pq.read_table(part).to_pylist()]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_server_is_killed_and_the_rerun_does_the_rest(tmp_path: Path, smollm2: Path) -> None:
    questions = [
        [f"What is the capital of {c}? Answer with its name only.", "And its language? One word, please."]
        for c in COUNTRIES
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"turns": q}) + "\n" for q in questions))
    run = RunDir(tmp_path / "run")
    path = tmp_path / "recipe.yaml"
    recipe_text = {
        "run_dir": str(run.root),
        "target": {"path": str(smollm2)},
        "data": {"prompts": ["p.jsonl"], "max_length": 384, "holdout": 2},
        "engine": {"dtype": "float32", "concurrency": 4, "sampling": {"max_tokens": 96}},
        "states": {"dtype": "engine"},
        "draft": {"aux_layers": LAYERS[:3], "vocab_size": 1024},
    }
    path.write_text(yaml.safe_dump(recipe_text))
    assert subprocess.run([*EYAS, "prepare", str(path)], capture_output=True).returncode == 0

    first = subprocess.Popen([*EYAS, "harvest", str(path)], stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 400
    while not part_files(run.samples):
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)
    (server,) = servers_below(first.pid)
    os.kill(server.pid, signal.SIGKILL)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 1, err
    assert "the vLLM server ended (exit status" in err
    assert not psutil.pid_exists(server.pid)
    before = {row["id"] for row in samples(run)}
    assert 0 < len(before) < 2 * len(COUNTRIES)

    recipe, target = load_recipe(path), resolve_target(str(smollm2))
    asked: list[str] = []
    with open_engine(recipe, target, run, LAYERS, Progress(quiet=True)) as engine:
        assert isinstance(engine, VllmEngine)
        inner = engine.generate

        def generate(requests: Any, sampling: Any, *, timed: bool = False) -> Any:
            if timed:
                return inner(requests, sampling, timed=True)

            def noted() -> Any:
                for request in requests:
                    asked.append(request.id)
                    yield request

            return inner(noted(), sampling)

        engine.generate = generate  # type: ignore[method-assign]
        harvest(recipe, target, run, LAYERS, Progress(quiet=True), lambda: contextlib.nullcontext(engine))
        found = {row["id"]: row for row in samples(run)}
        assert set(found) == before | set(asked)
        assert not before & set(asked)
        assert len(asked) == len(set(asked))
        conversations = pq.read_table(run.prepared)["id"].to_pylist()
        assert {f"{c}/0" for c in conversations} <= set(found)
        served = served_prompts(engine, run, found, load_tokenizer(target))
    assert len(served) >= 6, "second turns"
    for id_, prompts in served.items():
        for prompt in prompts:
            assert found[id_]["token_ids"][: found[id_]["prompt_length"]] == prompt
    store = HarvestStore(run)
    assert len(store.samples()) == len(found)
    for ref in store.samples():
        assert len(store.load(ref).states) == ref.rows
    assert {p.stem for p in run.states.iterdir()} == {p.stem for p in part_files(run.samples)}


def served_prompts(
    engine: VllmEngine, run: RunDir, found: dict[str, dict[str, Any]], tokenizer: Any
) -> dict[str, list[list[int]]]:
    """What the running server makes of each second turn's history: by /tokenize, and as a chat request."""
    assert engine.server is not None
    served = {}
    prepared = pq.read_table(run.prepared).to_pylist()
    with httpx.Client(
        base_url=engine.server.url, headers={"Authorization": f"Bearer {engine.server.key}"}, timeout=60
    ) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        for conversation in prepared:
            first, second = (found.get(f"{conversation['id']}/{turn}") for turn in range(2))
            if first is None or second is None:
                continue
            said = tokenizer.decode(first["token_ids"][first["prompt_length"] :], skip_special_tokens=True)
            asked = json.loads(conversation["messages"])
            history = [asked[0], {"role": "assistant", "content": said}, asked[1]]
            tokens = http.post("/tokenize", json={"model": model, "messages": history, "add_generation_prompt": True})
            chat = http.post(
                "/v1/chat/completions",
                json={"model": model, "messages": history, "max_tokens": 1, "return_token_ids": True},
            )
            served[second["id"]] = [tokens.json()["tokens"], chat.json()["prompt_token_ids"]]
    return served
