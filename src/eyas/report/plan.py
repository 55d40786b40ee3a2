"""`eyas plan`: what was understood of the target, what the run costs, and every problem with its fix.

Loads no weights.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import InputError
from eyas.recipe import Recipe
from eyas.report.costs import (
    Drafter,
    StageTime,
    TrainingMemory,
    active_parameters,
    checkpoint_bytes,
    drafter_sizes,
    stage_times,
    state_bytes,
    stored_width,
    training_memory,
)
from eyas.report.data_estimate import DataEstimate, estimate_data
from eyas.report.engine_facts import EngineFacts, engine_facts
from eyas.report.machine import Machine, this_machine
from eyas.report.plan_problems import Problem, device_shortage, find_problems
from eyas.report.plan_tables import print_plan as print_plan
from eyas.rundir import RunDir
from eyas.target.config_json import read_config
from eyas.target.info import TargetInfo
from eyas.target.resolve import resolve_target
from eyas.units import size


@dataclass(frozen=True)
class StatesPlan:
    bytes_per_token_bf16: int
    bytes_per_token_fp8: int
    bytes_per_token_stored: int
    """at `states.dtype`"""
    total_bytes_bf16: int | None
    total_bytes_fp8: int | None
    disk_bytes: int | None
    """what lies on disk at once, at `states.dtype`"""


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, times in seconds; None where the data could not be read."""

    target: TargetInfo
    drafter: Drafter
    engine: EngineFacts
    machine: Machine
    data: DataEstimate | None
    states: StatesPlan
    training: TrainingMemory
    checkpoint: int
    checkpoints: int
    times: list[StageTime]
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def error(self) -> InputError:
        """All problems in one error, one line each with its fix."""
        if len(self.problems) == 1:
            return InputError(self.problems[0].message, fix=self.problems[0].fix)
        return InputError("\n".join(f"{p.message} - {p.fix}" for p in self.problems))

    def as_json(self) -> dict[str, Any]:
        t = self.target
        return {
            "ok": self.ok,
            "problems": [asdict(p) for p in self.problems],
            "target": _target_json(t),
            "engine": asdict(self.engine),
            "data": None if self.data is None else asdict(self.data),
            "states": asdict(self.states),
            "drafter": {**asdict(self.drafter), "aux_layers": list(self.drafter.aux_layers)},
            "training_memory": {**asdict(self.training), "total": self.training.total},
            "checkpoints": {"one": self.checkpoint, "total": self.checkpoints},
            "times": [asdict(time) for time in self.times],
            "machine": {**asdict(self.machine), "gpus": [asdict(g) for g in self.machine.gpus]},
            "notes": self.notes,
        }


def build_plan(recipe: Recipe, target: TargetInfo | None = None) -> Plan:
    """Plans a run. What cannot work becomes a problem of the plan; a target that cannot be resolved raises
    InputError."""
    target = target or resolve_target(recipe.target.path, remote_code=recipe.target.remote_code)
    run = RunDir(Path(recipe.run_dir))
    machine = this_machine(run.root)
    drafter = drafter_sizes(target, recipe)
    problems: list[Problem] = []
    try:
        run.check_place()
    except InputError as e:
        problems.append(Problem(e.message, e.fix or "correct run_dir"))
    data: DataEstimate | None = None
    try:
        data = estimate_data(recipe, target, run)
    except InputError as e:
        problems.append(Problem(e.message, e.fix or "correct data.prompts"))
    engine = engine_facts(recipe, target, drafter, machine, run, problems)
    states = _states(recipe, target, drafter, data)
    memory = training_memory(target, recipe, drafter, cuda=bool(machine.gpus), ranks=max(1, len(machine.gpus)))
    one, kept = checkpoint_bytes(recipe, drafter)
    problems += find_problems(recipe, target, machine, memory, states.disk_bytes, kept, run)
    problems = list(dict.fromkeys(problems))  # reading the data finds a missing chat template too
    times = [] if data is None else _times(recipe, target, drafter, machine, run, data)
    notes = list(target.notes)
    if (short := device_shortage(recipe.engine, machine)) is not None:  # the plan may be for another machine
        notes.append(f"{short.message}; `eyas run` here would stop before it starts the engine")
    captured = None if recipe.engine.urls else engine.capture_memory  # a given server's memory is not known
    if captured is not None and (most := captured.in_flight) > machine.memory // 2:
        fitting = max(1, recipe.engine.concurrency * machine.memory // 2 // most)
        notes.append(
            f"if all {recipe.engine.concurrency} requests in flight reach data.max_length, their states take "
            f"{size(most)} of host memory; capture stops at half of this machine's ({size(machine.memory // 2)}): with "
            f"engine.concurrency {fitting} they always fit"
        )
    if recipe.engine.urls and "VLLM_CPU_KVCACHE_SPACE" in engine.environment:
        notes.append(
            "the launch line is for the vLLM that is installed here, which computes on the CPU; for a server with "
            "GPUs leave out --enforce-eager and the VLLM_CPU variables, and name its python"
        )
    return Plan(target, drafter, engine, machine, data, states, memory, one, kept, times, problems, notes)


def _states(recipe: Recipe, target: TargetInfo, drafter: Drafter, data: DataEstimate | None) -> StatesPlan:
    bf16, fp8 = state_bytes(target, drafter, 2), state_bytes(target, drafter, 1)
    stored = state_bytes(target, drafter, stored_width(recipe, target))
    if data is None:
        return StatesPlan(bf16, fp8, stored, None, None, None)
    return StatesPlan(bf16, fp8, stored, bf16 * data.tokens, fp8 * data.tokens, stored * data.tokens)


def _times(
    recipe: Recipe, target: TargetInfo, drafter: Drafter, machine: Machine, run: RunDir, data: DataEstimate
) -> list[StageTime]:
    text = read_config(target.path).text
    chosen = text.get("num_experts_per_tok") or text.get("num_experts_per_token")
    width = text.get("moe_intermediate_size")
    active = active_parameters(
        target, chosen if isinstance(chosen, int) else None, width if isinstance(width, int) else None
    )
    counts = {"samples": data.samples, "tokens": data.tokens, "answers": data.answer_tokens}
    return stage_times(target, recipe, drafter, machine, run, active=active, **counts)


def _target_json(t: TargetInfo) -> dict[str, Any]:
    return {
        "path": str(t.path),
        "architecture": t.architecture,
        "text_architecture": t.text_architecture,
        "model_type": t.model_type,
        "hidden_size": t.hidden_size,
        "intermediate_size": t.intermediate_size,
        "num_hidden_layers": t.num_hidden_layers,
        "num_attention_heads": t.num_attention_heads,
        "num_key_value_heads": t.num_key_value_heads,
        "head_dim": t.head_dim,
        "vocab_size": t.vocab_size,
        "max_position_embeddings": t.max_position_embeddings,
        "rope_parameters": t.rope_parameters,
        "attention": t.attention,
        "sliding_window": t.sliding_window,
        "experts": t.experts,
        "quantization": t.quantization,
        "quantized_modules": [] if t.quantized is None else list(t.quantized.targets),
        "embedding": t.embedding.name,
        "head": t.head.name,
        "final_norm": t.final_norm.name,
        "tied": t.tied,
        "norm": ("1 + w " if t.norm_plus_one else "") + ("RMSNorm" if t.norm_kind == "rms" else "LayerNorm"),
        "logit_softcap": t.logit_softcap,
        "logit_scale": t.logit_scale,
        "embedding_scale": t.embedding_scale,
        "eos_token_ids": list(t.eos_token_ids),
        "thinking_tokens": None if t.thinking_tokens is None else list(t.thinking_tokens),
        "dtype": t.dtype,
        "weight_bytes": t.weight_bytes,
        "fingerprint": t.fingerprint,
    }
