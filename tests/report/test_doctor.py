"""`eyas doctor`: what it says of a sound installation, and that it sees what is wrong with another."""

import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from eyas.cli import app
from eyas.report import doctor, selftest, versions
from eyas.report.machine import Gpu, this_machine
from target import fixtures


def invoke(*args: object) -> Result:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, ["doctor", *map(str, args)])


def recipe(tmp_path: Path, engine: dict[str, Any]) -> Path:
    target = fixtures.llama(tmp_path / "target", tokenizer=True)
    file = tmp_path / "recipe.yaml"
    values = {
        "run_dir": str(tmp_path / "run"),
        "target": {"path": str(target)},
        "data": {"prompts": "none.jsonl", "max_length": 128},
        "engine": {"dtype": "float32", "sampling": {"max_tokens": 16}, **engine},
        "draft": {"vocab_size": 100, "aux_layers": [1, 2]},
    }
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return file


def test_this_installation_is_sound() -> None:
    result = invoke("--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"]
    checks = {c["name"]: c for c in found["checks"]}
    assert checks["speculators"]["expected"] == ">=0.9,<0.10"
    assert {"python", "memory", "disk", "GPU", "vllm", "vllm can be imported", "vllm finds eyas's plugin"} <= set(
        checks
    )
    assert {"float32 matrix product on cpu", "exported drafter, logits"} <= set(checks) or torch.cuda.is_available()


def test_with_the_engine_of_a_recipe(tmp_path: Path) -> None:
    result = invoke(recipe(tmp_path, {"kind": "hf"}), "--engine")
    assert result.exit_code == 0, result.output
    assert "engine hf answers" in " ".join(result.stdout.split())
    assert "checks passed" in result.stdout
    assert "vllm" not in result.stdout  # not what this recipe uses
    assert not list((tmp_path / "run").glob("*"))


def test_an_engine_that_does_not_start_is_one_failed_check(tmp_path: Path) -> None:
    path = recipe(tmp_path, {"kind": "hf"})
    (tmp_path / "target" / "model.safetensors").unlink()
    result = invoke(path, "--engine")
    assert result.exit_code == 1
    assert "1 of" in result.stdout
    assert "fix: " in result.stdout


def test_the_engine_of_no_recipe() -> None:
    result = invoke("--engine")
    assert result.exit_code == 2
    assert "fix: eyas doctor RECIPE --engine" in result.stderr


def test_versions_outside_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "tenacity":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.8.1" if name == "speculators" else real(name)

    monkeypatch.setattr(versions.metadata, "version", version)
    wrong = {p.name: p for p in versions.installed_versions() if not p.ok}
    assert set(wrong) == {"speculators", "tenacity"}
    check = doctor._package("speculators", False, wrong["speculators"].version, wrong["speculators"].tested)
    assert (check.found, check.fix) == ("0.8.1", "pip install 'speculators>=0.9,<0.10'")
    assert wrong["tenacity"].version is None


def test_numerics_that_are_off_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not selftest.Measured("a number that is none", float("nan"), 1.0).ok
    plan = selftest.plan_steps
    monkeypatch.setattr(
        selftest, "plan_steps", lambda ids, mask, steps, nested: plan(ids, mask.roll(1), steps, nested=nested)
    )
    wrong = [c.name for c in doctor._numerics() if not c.ok]
    assert wrong == ["loss of the supervised-row forward", "its gradients, worst tensor"]


def test_a_library_that_cannot_be_imported_is_one_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(selftest, "measure", broken)
    (check,) = doctor._numerics()
    assert not check.ok
    assert check.fix is not None
    assert "pip uninstall torchvision" in check.fix


def test_gpus_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(this_machine(tmp_path), gpus=(Gpu("NVIDIA H200", 141 << 30),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (check,) = doctor._gpu(machine)
    assert not check.ok
    assert check.found.startswith("1 x NVIDIA H200")
    assert doctor._gpu(replace(machine, gpus=()))[0].ok


def test_another_interpreter_without_vllm(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    found = doctor._imported(doctor._start_import(str(python)))
    (check,) = doctor._vllm(str(python), *found)
    assert not check.ok
    assert "vLLM is not installed for" in check.found
    missing = doctor._vllm("/no/python", *doctor._imported(doctor._start_import("/no/python")))
    assert "/no/python cannot be run" in missing[0].found


def test_vllm_that_breaks_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_vllm", lambda python: doctor_vllm())
    checks = doctor._vllm(None, "plugin True\n", "Traceback\nImportError: libcudart.so.13 not found\n")
    assert [c.ok for c in checks] == [True, False, True]
    assert checks[1].found == "ImportError: libcudart.so.13 not found"


def doctor_vllm() -> Any:
    from eyas.engine.vllm_server import Installed

    return Installed("python", "vllm", "0.32.0")


def test_room(tmp_path: Path) -> None:
    machine = replace(this_machine(tmp_path), memory=1 << 30, disk_free=1 << 20)
    assert [c.ok for c in doctor._room(machine)] == [False, False]
