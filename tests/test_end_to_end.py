"""Prepare to verify against the real vLLM: interrupted once, continued, proven; then nothing is done twice."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

EYAS = (sys.executable, "-c", "from eyas.cli import main; main()")


def servers_of(marker: str) -> list[int]:
    """Ids of processes that name `marker` in their command line."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if marker in " ".join(p.info["cmdline"] or [])]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_smoke_run_of_every_stage(tmp_path: Path, smollm2: Path) -> None:
    demo = Path(__file__).parent.parent / "src/eyas/demo"
    base = yaml.safe_load((demo / "recipe.yaml").read_text())
    run_dir = tmp_path / "run"
    base |= {"run_dir": str(run_dir), "target": {"path": str(smollm2)}}
    base["data"] |= {"prompts": [str(demo / "prompts.jsonl")], "holdout": 2, "limit": 10}
    base["engine"]["sampling"]["max_tokens"] = 40
    base["train"] |= {"epochs": 20}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(base))
    command = [*EYAS, "run", str(recipe), "--json"]

    # Ctrl-C while the server loads: exit code 130, no server left
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 120
    while not servers_of("vllm.entrypoints") and time.monotonic() < limit:
        time.sleep(0.2)
    assert servers_of("vllm.entrypoints")
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=90)
    assert first.returncode == 130, err
    assert json.loads(out)["error"]["message"] == "interrupted"
    assert "the same command continues" in err
    assert not servers_of("vllm.entrypoints")
    assert json.loads((run_dir / "run.json").read_text())["stages"]["prepare"]["status"] == "done"

    # the same command continues it, to the end
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "prepare: unchanged, skipped" in second.stderr
    result = json.loads(second.stdout)
    assert result["ok"] is True
    verified = json.loads((run_dir / "verify.json").read_text())
    assert result["verify"] == verified
    assert verified["lossless"] is True
    assert verified["engine"].startswith("vllm")
    assert verified["num_speculative_tokens"] == 3
    for group in ("seen", "held_out"):
        found = verified[group]
        assert found["drafts"] > 0
        assert found["tokens_per_s"] > 0
        assert len(found["acceptance_rate_per_position"]) == 3
        assert found["acceptance_length"] == pytest.approx(1 + sum(found["acceptance_rate_per_position"]), abs=1e-6)
        assert abs(found["acceptance_length"] - found["predicted_acceptance_length"]) <= 0.05
    assert verified["seen"]["acceptance_length"] > 1.5
    rates = json.loads((run_dir / "baseline.json").read_text())["rates"]
    assert {name: len(rate["ids"]) for name, rate in rates.items()} == {"seen": 8, "held_out": 2}
    assert all(p["ok"] for p in json.loads((run_dir / "proofs.json").read_text()))
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert (run_dir / "drafter/vllm/model.safetensors").exists()
    assert not servers_of("vllm.entrypoints")

    # nothing is done twice
    third = subprocess.run(command, capture_output=True, text=True)
    assert third.returncode == 0, third.stderr
    assert third.stderr.count("unchanged, skipped") == 6
