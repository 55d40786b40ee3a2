"""`eyas doctor`: is this installation sound? Versions, vLLM, GPU, memory, disk, numerics and, if asked, the engine."""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.engine import vllm_versions
from eyas.engine.vllm_server import installed_vllm
from eyas.errors import EyasError, InputError
from eyas.progress import Progress
from eyas.recipe import EnginePart, Recipe
from eyas.report.machine import Machine, this_machine
from eyas.report.versions import installed_versions
from eyas.units import size

LEAST_MEMORY = 4_000_000_000
LEAST_DISK = 2_000_000_000
"""below these not even the demo runs"""
IMPORT_SECONDS = 300
ENGINE_TOKENS = 16
PLUGIN = "eyas_capture"

_PROBE = f"""
import importlib.metadata as m
names = [e.name for e in m.entry_points(group="vllm.general_plugins")]
print("plugin", {PLUGIN!r} in names)
import vllm
print("imported", vllm.__version__)
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str
    expected: str
    fix: str | None = None
    """what to do where it is not ok"""


def examine(recipe: Recipe | None = None, *, engine: bool = False, progress: Progress | None = None) -> list[Check]:
    """All checks. With a recipe: its engine and its run directory's disk. `engine`: also starts that engine.

    Raises InputError when `engine` comes without a recipe.
    """
    if engine and recipe is None:
        raise InputError("the engine of which recipe?", fix="eyas doctor RECIPE --engine")
    part = EnginePart() if recipe is None else recipe.engine  # type: ignore[call-arg]
    machine = this_machine(Path("." if recipe is None else recipe.run_dir))
    # vLLM takes seconds to import, in a process of its own: meanwhile the numerics are tested here
    importing = None if part.kind == "hf" or part.urls else _start_import(part.python)
    checks = [_package(p.name, p.ok, p.version, p.tested) for p in installed_versions()]
    checks += _room(machine)
    try:
        checks += [*_gpu(machine), *_numerics()]
    finally:
        found = None if importing is None else _imported(importing)
    if found is not None:
        checks += _vllm(part.python, *found)
    if engine and recipe is not None:
        checks += _engine(recipe, progress or Progress(quiet=True))
    return checks


def print_checks(checks: list[Check], console: Console) -> None:
    table = Table(show_header=True, box=None, pad_edge=False)
    for column in ("", "check", "found", "expected"):
        table.add_column(column, overflow="fold")
    for c in checks:
        mark = Text("ok", style="green") if c.ok else Text("WRONG", style="bold red")
        table.add_row(mark, Text(c.name), Text(c.found), Text(c.expected))
    console.print(table)
    wrong = [c for c in checks if not c.ok]
    for c in wrong:
        console.print(Text(f"{c.name}: ", style="bold red") + Text(c.found))
        console.print(Text("    fix: ", style="bold") + Text(c.fix or "see what was expected"))
    console.print(
        Text(f"{len(wrong)} of {len(checks)} checks failed", style="bold red")
        if wrong
        else Text(f"all {len(checks)} checks passed", style="bold green")
    )


def _package(name: str, ok: bool, version: str | None, tested: str) -> Check:
    fix = f"pip install '{name}{tested}'" if name != "python" else f"make the environment with python {tested}"
    return Check(name, ok, version or "not installed", tested, fix)


def _room(machine: Machine) -> list[Check]:
    free = min(psutil.virtual_memory().available, machine.memory)
    return [
        Check(
            "memory",
            free >= LEAST_MEMORY,
            f"{size(free)} free of {size(machine.memory)}, {machine.cores} CPU cores",
            f"at least {size(LEAST_MEMORY)} free",
            "end what else uses it, or take a larger machine",
        ),
        Check(
            "disk",
            machine.disk_free >= LEAST_DISK,
            f"{size(machine.disk_free)} free",
            f"at least {size(LEAST_DISK)} free; `eyas plan RECIPE` says what a run needs",
            "set run_dir on a larger disk",
        ),
    ]


def _gpu(machine: Machine) -> list[Check]:
    """The driver's GPUs and torch's must be the same ones."""
    try:
        import torch

        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        built = torch.version.cuda
    except (ImportError, OSError) as e:
        return [Check("GPU", False, f"torch cannot be imported: {_short(e)}", "torch", "install eyas again")]
    if not machine.gpus and not seen:
        return [Check("GPU", True, "none: everything runs on the CPU", "any or none")]
    named = f"{len(machine.gpus)} x {machine.gpus[0].name}, {size(machine.gpus[0].memory)}" if machine.gpus else "none"
    return [
        Check(
            "GPU",
            seen > 0 and machine.gpus != (),
            f"{named} by the driver, {seen} by torch (built for CUDA {built})",
            "both see them",
            "install the torch build for this driver's CUDA (`nvidia-smi` names it), and check CUDA_VISIBLE_DEVICES",
        )
    ]


def _numerics() -> list[Check]:
    try:
        from eyas.report.selftest import measure

        return [
            Check(
                m.name,
                m.ok,
                f"off by {m.difference:.1e}",
                f"at most {m.allowed:.0e}",
                "this installation computes something else: install tested versions of torch and speculators",
            )
            for m in measure()
        ]
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError, EyasError) as e:
        fix = "install tested versions of torch, transformers and speculators"
        if "torchvision" in str(e):
            fix = "torchvision does not fit this torch, and eyas needs none: pip uninstall torchvision torchaudio"
        return [Check("numerics", False, _short(e), "the self-test runs", fix)]


def _start_import(python: str | None) -> "subprocess.Popen[str] | OSError":
    command = [python or sys.executable, "-c", _PROBE]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as e:
        return e


def _imported(importing: "subprocess.Popen[str] | OSError") -> tuple[str, str]:
    """(stdout, stderr) of the import, whatever became of it."""
    if isinstance(importing, OSError):
        return "", str(importing)
    try:
        return importing.communicate(timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        importing.kill()
        return importing.communicate()[0], f"vLLM was not imported within {IMPORT_SECONDS} s"


def _vllm(python: str | None, out: str, err: str) -> list[Check]:
    oldest, newest = (f"{a}.{b}" for a, b in (vllm_versions.OLDEST, vllm_versions.NEWEST))
    expected = f"{oldest} to {newest}, and eyas beside it"
    where = python or "this interpreter"
    try:
        vllm = installed_vllm(python)
    except InputError as e:
        return [Check("vllm", False, e.message, expected, e.fix)]
    checks = [Check("vllm", True, f"{vllm.distribution} {vllm.version} of {where}", expected)]
    last = (err.strip().splitlines() or ["no message"])[-1]
    imported = "imported " in out
    checks.append(
        Check(
            "vllm can be imported",
            imported,
            "yes" if imported else last,
            "yes",
            f"{vllm.python} -c 'import vllm' shows the whole error; torchvision, torchaudio and torchcodec of another "
            "torch build are the usual cause",
        )
    )
    seen = "plugin True" in out
    checks.append(
        Check(
            "vllm finds eyas's plugin",
            seen,
            "yes" if seen else "no",
            f"entry point {PLUGIN} in vllm.general_plugins",
            f"{vllm.python} -m pip install eyas",
        )
    )
    return checks


def _engine(recipe: Recipe, progress: Progress) -> list[Check]:
    """Starts the recipe's engine with capture, asks for a few tokens and reproduces its log probabilities."""
    from eyas.data.checks import compare, disagreement, tolerance
    from eyas.draft.sizes import aux_layers
    from eyas.engine.base import Request
    from eyas.engine.opening import open_engine
    from eyas.rundir import RunDir
    from eyas.states.shard import Shard
    from eyas.target.resolve import resolve_target
    from eyas.target.teacher import Teacher
    from eyas.target.tokenizer import load_tokenizer

    name = f"engine {recipe.engine.kind} answers, states are its own"
    root = Path(tempfile.mkdtemp(prefix="eyas-doctor-"))
    try:
        run = RunDir(root)
        run.states.mkdir()
        target = resolve_target(recipe.target.path, remote_code=recipe.target.remote_code)
        tokenizer: Any = load_tokenizer(target, remote_code=recipe.target.remote_code)
        layers = [*aux_layers(target, recipe.draft), target.num_hidden_layers]
        asked = [{"role": "user", "content": "Name three birds of prey."}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=False)
        sampling = recipe.engine.sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": None})
        with open_engine(recipe, target, run, layers, progress) as engine:
            (answer,) = engine.generate([Request("doctor", list(ids), ENGINE_TOKENS)], sampling)
        if answer.captured is None:
            raise EyasError("the engine kept no hidden states")
        states = Shard(answer.captured.shard).sample(answer.captured.index).states
        tokens = [*answer.prompt_ids, *answer.output_ids]
        positions = list(range(len(answer.prompt_ids), len(tokens)))
        difference = compare(Teacher(target), states, tokens, positions, answer.output_logprobs)
        allowed = tolerance(states.dtype, states.dtype)
        wrong = disagreement(difference, allowed)
    except EyasError as e:
        return [Check(name, False, f"{e.message} (files: {root})", "it answers", e.fix)]
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    shutil.rmtree(root, ignore_errors=True)
    return [
        Check(
            name,
            wrong is None,
            wrong or f"{len(answer.output_ids)} tokens, log probabilities off by {difference.worst:.1e}",
            f"log probabilities from the states within {allowed.worst:g}",
            "check that target.path is the checkpoint that the engine serves",
        )
    ]


def _short(e: BaseException) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
