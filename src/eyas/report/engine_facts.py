"""What will be asked of the engine: which one, its exact launch line, and whether it supports this architecture."""

from dataclasses import dataclass
from pathlib import Path

from eyas.errors import InputError
from eyas.recipe import Recipe
from eyas.report.costs import Drafter
from eyas.report.plan_problems import Problem
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo


@dataclass(frozen=True)
class EngineFacts:
    kind: str
    version: str | None
    launch: list[str]
    """empty where eyas starts no server"""
    supports_architecture: bool | None
    supports_eagle3: bool | None
    """auxiliary hidden states: needed for the capture and for serving the drafter; None: not known"""


def engine_facts(
    recipe: Recipe, target: TargetInfo, drafter: Drafter, run: RunDir, problems: list[Problem]
) -> EngineFacts:
    """Adds to `problems` what keeps the engine from working."""
    if recipe.engine.kind == "hf":
        return EngineFacts("hf", None, [], None, None)
    if recipe.engine.urls:
        return EngineFacts("vllm", None, [], None, None)
    from eyas.engine.vllm_server import Installed, installed_vllm, launch_line
    from eyas.target.vllm_support import vllm_support

    try:
        vllm = installed_vllm(recipe.engine.python)
        version: str | None = vllm.version
    except InputError as e:
        problems.append(Problem(e.message, e.fix or "install vLLM"))
        vllm, version = Installed(recipe.engine.python or "python", "vllm", "0"), None
    launch = launch_line(
        recipe.server,
        target,
        vllm,
        port=8000,
        max_model_len=recipe.data.max_length,
        layers=[*drafter.aux_layers, target.num_hidden_layers],
        states_dir=run.states,
    )
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
    return EngineFacts("vllm", version, launch, support.architecture, support.eagle3)


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
