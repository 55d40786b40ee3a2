"""What will be asked of the engine: which one, its exact launch line, and whether it supports this architecture."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from eyas.engine.capture_sizes import RING, buffer_rows
from eyas.engine.opening import longest_context
from eyas.engine.vllm_versions import NEWEST_VERSION
from eyas.errors import InputError
from eyas.recipe import Recipe
from eyas.report.costs import Drafter, engine_width, state_bytes
from eyas.report.machine import Gpu, Machine
from eyas.report.plan_problems import Problem
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo
from eyas.units import size


@dataclass(frozen=True)
class CaptureMemory:
    """Bytes that capture takes in a server of the vllm engine, beside what vLLM takes."""

    counted_for: str | None
    """the machine that this is about, where it is not known: a given server's. None: this machine"""
    step_tokens: int
    """tokens of a step at most: `max-num-batched-tokens`, or what vLLM chooses on such a GPU"""
    device: int
    """on each GPU: the buffer, and the steps on their way to the host; vLLM leaves that much less to the KV cache"""
    host: int
    """for these steps, pinned beside a GPU; on a CPU with the buffer itself"""
    in_flight: int
    """host memory that the rows of all requests in flight take if each is of the greatest length"""


def capture_memory(recipe: Recipe, target: TargetInfo, drafter: Drafter, machine: Machine) -> CaptureMemory:
    row = state_bytes(target, drafter, engine_width(recipe, target))
    gpus, counted_for = machine.gpus, None
    if recipe.engine.urls:
        gpus = gpus or (_USUAL_GPU,)
        counted_for = f"GPUs of {size(gpus[0].memory)}; which the server has is not known"
    step = _token_count(recipe.engine.options.get("max-num-batched-tokens"))
    if step is None:
        largest = max((gpu.memory for gpu in gpus), default=0) >> 30
        step = 16384 if largest >= 160 else 8192 if largest >= 70 else 2048
    buffer = buffer_rows(step) * row
    device, host = ((1 + RING) * buffer, RING * buffer) if gpus else (0, (1 + RING) * buffer)
    return CaptureMemory(counted_for, step, device, host, recipe.engine.concurrency * recipe.data.max_length * row)


_USUAL_GPU = Gpu("GPU", 80 << 30)
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def _token_count(value: Any) -> int | None:
    """A count as vLLM reads it: 8192, "8192", "8k" (thousands), "8K" (of 1,024)."""
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgKMG]?)", str(value).strip())
    return None if number is None else int(float(number[1]) * _UNITS.get(number[2], 1))


@dataclass(frozen=True)
class EngineFacts:
    kind: str
    version: str | None
    launch: list[str]
    """of the capturing server; with engine.urls, how the user starts one; empty for the hf engine"""
    environment: dict[str, str]
    """variables that the launch line needs"""
    supports_architecture: bool | None
    supports_eagle3: bool | None
    """auxiliary hidden states: needed for the capture and for serving the drafter; None: not known"""
    capture_memory: CaptureMemory | None
    """None for the hf engine"""


def engine_facts(
    recipe: Recipe, target: TargetInfo, drafter: Drafter, machine: Machine, run: RunDir, problems: list[Problem]
) -> EngineFacts:
    """Adds to `problems` what keeps the engine from working."""
    if recipe.engine.kind == "hf":
        return EngineFacts("hf", None, [], {}, None, None, None)
    from eyas.engine.vllm_server import Installed, given_servers, installed_vllm, launch_environment, launch_line
    from eyas.target.vllm_support import vllm_support

    given = [httpx.URL(url) for url in recipe.engine.urls]
    try:
        vllm = installed_vllm(recipe.engine.python)
        version: str | None = vllm.version
    except InputError as e:
        if not given:  # a given server may have its vLLM elsewhere
            problems.append(Problem(e.message, e.fix or "install vLLM"))
        vllm, version = Installed(recipe.engine.python or "python", "vllm", NEWEST_VERSION), None
    launch = launch_line(
        recipe.server,
        target,
        vllm,
        port=(given[0].port if given else None) or 8000,
        max_model_len=longest_context(recipe, target),
        layers=[*drafter.aux_layers, target.num_hidden_layers],
        states_dir=run.states,
    )
    environment = launch_environment(target, vllm, capture=True)
    memory = capture_memory(recipe, target, drafter, machine)
    if given:
        try:
            given_servers(recipe.engine)
        except InputError as e:
            problems.append(Problem(e.message, e.fix or "correct engine.api_key_file"))
        return EngineFacts("vllm", None, launch, environment, None, None, memory)
    package = None if recipe.engine.python is None else _package_of(recipe.engine.python)
    support = vllm_support(target.architecture, package, version)
    if version is not None and support.eagle3 is False:
        known = "does not know" if support.architecture is False else "gives no auxiliary hidden states for"
        problems.append(
            Problem(
                f"vLLM {version} {known} the architecture {target.architecture}: no capture, and no EAGLE-3 "
                "drafter can be served",
                "use a vLLM version that does, or choose engine.kind: hf to harvest and train without serving",
            )
        )
    if version is not None and vllm.cpu and target.experts and "int4" in (target.quantization or ""):
        problems.append(
            Problem(
                f"vLLM on a CPU has no kernel for INT4 experts ({target.quantization})",
                "run on a GPU, or choose engine.kind: hf",
            )
        )
    return EngineFacts("vllm", version, launch, environment, support.architecture, support.eagle3, memory)


def _package_of(python: str) -> Path | None:
    """The vLLM package of another interpreter, found without importing it."""
    import subprocess

    probe = "import importlib.util as u; s = u.find_spec('vllm'); print(s.origin if s else '')"
    try:
        out = subprocess.run(
            [python, "-c", probe], capture_output=True, text=True, timeout=60, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(out).parent if out else None
