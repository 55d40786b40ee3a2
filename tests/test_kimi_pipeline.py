"""Every stage on a tiny Kimi-K2.5 through the command line: captured and served by vLLM; the INT4 variant by `hf`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.rundir import RunDir
from target.block_size_plugin import write_block_size_plugin
from target.tiny_kimi import kimi_k25

EYAS = (sys.executable, "-c", "from eyas.cli import main; main()")
SUBJECTS = ("the river", "a falcon", "her map", "the old clock", "this bridge", "winter", "a small engine", "bread")
QUESTIONS = ("Where does {} begin?", "Describe {} in one line.", "Why is {} slow today?")


def write_recipe(path: Path, target: Path, engine: dict[str, Any], **parts: dict[str, Any]) -> Path:
    prompts = [{"prompt": question.format(subject)} for question in QUESTIONS for subject in SUBJECTS]
    (path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
    recipe = {
        "run_dir": str(path / "run"),
        "target": {"path": str(target)},
        "data": {"prompts": "prompts.jsonl", "holdout": 6, "max_length": 128, **parts.get("data", {})},
        "engine": {"dtype": "float32", "sampling": {"temperature": 0.0, "max_tokens": 32}, **engine},
        "states": {"dtype": "engine"},
        "draft": {"vocab_size": 512, "aux_layers": [1, 2, 3], "norm_before_residual": False},  # as SGLang needs it
        "train": {"epochs": 40, "tokens_per_batch": 256, "lr": 3.0e-3, **parts.get("train", {})},
        "export": {"formats": ["vllm", "speculators", "sglang"]},
        "verify": {"speculative_tokens": 3},
    }
    file = path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def run(recipe: Path, *, python_path: Path | None = None) -> dict[str, Any]:
    """`eyas run RECIPE --json`; what it printed."""
    env = dict(os.environ)
    if python_path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(python_path), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run([*EYAS, "run", str(recipe), "--json"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert all(p["ok"] for p in found["proofs"]), found["proofs"]
    return found


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_captured_trained_and_served(tmp_path: Path) -> None:
    target = kimi_k25(tmp_path / "kimi")
    engine = {
        "attention_backend": "CPU_MLA",  # an AMX host would pick a backend that has no float32
        "args": {"language-model-only": True},
        "concurrency": 16,
        "start_timeout": 300,
    }
    found = run(write_recipe(tmp_path, target, engine), python_path=write_block_size_plugin(tmp_path / "plugin"))
    assert set(found["stages"]) == {"prepare", "harvest", "vocab", "train", "export", "verify"}
    proofs = {p["name"] for p in found["proofs"]}
    assert any("log probabilities" in name for name in proofs), proofs
    verified = found["verify"]
    assert verified["mode"] == "served"
    assert verified["lossless"] is True
    for group in ("seen", "held_out"):
        served = verified[group]
        assert served["drafts"] > 0
        assert (
            abs(served["acceptance_length"] - served["predicted_acceptance_length"]) <= 0.01
        )  # float32: drafts are the same
    assert verified["seen"]["acceptance_length"] > 2.0
    directory = RunDir(tmp_path / "run")
    config = json.loads((directory.drafter / "vllm/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["norm_before_residual"] is False
    for_sglang = json.loads((directory.drafter / "sglang/config.json").read_text())
    assert for_sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert (config["hidden_size"], config["head_dim"], config["vocab_size"]) == (128, 32, 1024)


@pytest.mark.timeout(300)
def test_int4_in_the_hf_engine(tmp_path: Path) -> None:
    """vLLM has no INT4 experts on a CPU; transformers has, so acceptance is predicted and nothing is served."""
    target = kimi_k25(tmp_path / "kimi", int4=True)
    recipe = write_recipe(
        tmp_path,
        target,
        {"kind": "hf", "concurrency": 12, "sampling": {"temperature": 0.0, "max_tokens": 16}},
        data={"limit": 12, "holdout": 3},
        train={"epochs": 20},
    )
    verified = run(recipe)["verify"]
    assert verified["mode"] == "replay"
    assert verified["lossless"] is None
    assert verified["seen"]["acceptance_length"] is None
    assert 1.0 <= verified["held_out"]["predicted_acceptance_length"] <= verified["seen"]["predicted_acceptance_length"]
