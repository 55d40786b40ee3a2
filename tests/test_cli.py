"""The command line: exit codes and messages of bad input, help with examples, JSON errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from eyas.cli import app
from eyas.errors import ProofError
from eyas.pipeline import Run
from eyas.rundir import Proof, StageRecord

COMMANDS = (
    "run",
    "prepare",
    "harvest",
    "vocab",
    "train",
    "export",
    "verify",
    "demo",
    "plan",
    "doctor",
    "report",
    "show",
)


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def recipe(tmp_path: Path, target: object, prompts: object = "p.jsonl", **parts: object) -> Path:
    path = tmp_path / "recipe.yaml"
    base = {
        "run_dir": str(tmp_path / "run"),
        "target": {"path": str(target)},
        "data": {"prompts": str(prompts), "max_length": 256},
        "engine": {"dtype": "float32", "sampling": {"max_tokens": 32}},
        "draft": {"vocab_size": 256},
    }
    path.write_text(yaml.safe_dump({**base, **parts}))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Example" in result.output


def test_missing_recipe_is_exit_code_2_also_as_json() -> None:
    result = invoke("run", "none.yaml", "--json")
    assert result.exit_code == 2
    assert "error: no recipe file none.yaml" in result.stderr
    error = json.loads(result.stdout)["error"]
    assert error["exit_code"] == 2
    assert error["fix"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run", "Missing argument"),
        ("run r.yaml --limt 3", "No such option: --limt"),
        ("run r.yaml --limit x", "--limit"),
        ("rum r.yaml", "No such command 'rum'"),
        ("--what", "No such option: --what"),
        ("report r", "No such option: --json"),
    ],
)
def test_usage_errors_as_json(line: str, message: str) -> None:
    result = invoke(*line.split(), "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert message in found["error"]["message"]
    assert "--help` lists" in found["error"]["fix"]
    assert "Usage: " in result.stderr
    assert invoke(*line.split()).stdout == ""


def test_a_plan_that_cannot_work_as_json(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    path = recipe(tmp_path, smollm2, draft={"vocab_size": 1_000_000})
    for command in ("plan", "run"):
        result = invoke(command, path, "--json")
        assert result.exit_code == 2
        found = json.loads(result.stdout)
        assert found["ok"] is False
        assert found["problems"] == [{"message": found["error"]["message"], "fix": found["error"]["fix"]}]
        assert found["error"]["message"] in result.stderr


def test_a_failed_proof_is_printed_once(tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Run, first: str, last: str) -> None:
        run.dir.write_proofs([Proof("good", True, "1", "1"), Proof("bad", False, "two", "three")])
        run.dir.write_record("harvest", StageRecord("f", "failed"))
        raise ProofError("bad: found two; expected three", fix="do it again")

    monkeypatch.setattr("eyas.pipeline.run_stages", fail)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    result = invoke("run", recipe(tmp_path, smollm2), "--json")
    assert result.exit_code == 1
    assert [result.stderr.count(word) for word in ("good", "bad", "two", "three")] == [1, 1, 1, 1]
    found = json.loads(result.stdout)
    assert (found["ok"], found["error"]["fix"]) == (False, "do it again")
    assert [p["ok"] for p in found["proofs"]] == [True, False]
    assert found["stages"]["harvest"]["status"] == "failed"
    assert found["run_dir"] == str(tmp_path / "run")


def test_proofs_of_stages_that_were_not_asked_for_are_not_told(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def harvested(run: Run, first: str, last: str) -> None:
        mine, stale = Proof("mine", True, "1", "1"), Proof("stale", True, "2", "2")
        run.dir.write_proofs([mine, stale])
        run.dir.write_record("harvest", StageRecord("f", "done", proofs=[mine]))
        run.dir.write_record("verify", StageRecord("f", "done", proofs=[stale]))

    monkeypatch.setattr("eyas.pipeline.run_stages", harvested)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "good day"}\n')
    path = recipe(tmp_path, smollm2)
    for through, expected in (("vocab", ["mine"]), ("verify", ["mine", "stale"])):
        result = invoke("run", path, "--through", through, "--json")
        assert [p["name"] for p in json.loads(result.stdout)["proofs"]] == expected
        assert [name for name in ("mine", "stale") if f"proof ok     {name}" in result.stderr] == expected


def test_an_interruption_as_json(tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eyas.pipeline.run_stages", interrupted)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    result = invoke("run", recipe(tmp_path, smollm2), "--json")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert (found["ok"], found["error"]["message"]) == (False, "interrupted")


def test_unknown_stage(tmp_path: Path, smollm2: Path) -> None:
    result = invoke("run", recipe(tmp_path, smollm2), "--through", "trian")
    assert result.exit_code == 2
    assert "one of prepare, harvest, vocab, train, export, verify" in result.stderr


def test_a_stage_without_its_predecessor(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "good day"}\n' * 3)
    result = invoke("train", recipe(tmp_path, smollm2))
    assert result.exit_code == 2
    assert "stage train needs stage prepare, which has not been run" in result.stderr


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (None, "p.jsonl"),
        ("", "p.jsonl"),
        (" \n\n", "p.jsonl holds no row"),
        ('{"prompt": "a"}\n{"prompt": \n', "p.jsonl, line 2: broken JSON"),
        ('{"what": 1}\n{"what": 2}\n', "p.jsonl"),
    ],
)
def test_bad_prompts(tmp_path: Path, smollm2: Path, lines: str | None, expected: str) -> None:
    if lines is not None:
        (tmp_path / "p.jsonl").write_text(lines)
    result = invoke("run", recipe(tmp_path, smollm2))
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_target_without_config_or_weights(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n')
    empty = tmp_path / "empty"
    empty.mkdir()
    result = invoke("run", recipe(tmp_path, empty))
    assert result.exit_code == 2
    assert "config.json" in result.stderr
    (empty / "config.json").write_text((smollm2 / "config.json").read_text())
    result = invoke("run", recipe(tmp_path, empty))
    assert result.exit_code == 2
    assert "safetensors" in result.stderr


def test_engine_that_is_not_installed(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "good day"}\n')
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    path = recipe(tmp_path, smollm2, engine={"python": str(python), "sampling": {"max_tokens": 32}})
    result = invoke("run", path)
    assert result.exit_code == 2, result.output
    assert "vllm" in result.stderr.lower()
    assert "eyas[" in result.stderr


def test_a_directory_of_another_target(tmp_path: Path, smollm2: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "good day"}\n')
    run = tmp_path / "run"
    run.mkdir()
    (run / "target.json").write_text('{"path": "/models/other", "fingerprint": "0"}')
    result = invoke("prepare", recipe(tmp_path, smollm2))
    assert result.exit_code == 2
    assert "belongs to the target /models/other" in result.stderr


@pytest.mark.parametrize("module", ["eyas", "eyas.cli"])
def test_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "plan", "none.yaml"], capture_output=True, text=True)
    assert (done.returncode, "error: no recipe file none.yaml" in done.stderr) == (2, True)
