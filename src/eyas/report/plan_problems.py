"""Every reason why a planned run cannot work, each with its fix."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from eyas.draft.sizes import misfits
from eyas.draft.start import start_problems
from eyas.export.limits import format_misfits
from eyas.recipe import EnginePart, Recipe, TrainPart
from eyas.report.costs import TrainingMemory
from eyas.report.machine import Machine
from eyas.rundir import RunDir
from eyas.target.config_json import read_json_object
from eyas.target.info import TargetInfo
from eyas.target.tokens import chat_template_text, tokenizer_size
from eyas.units import size


@dataclass(frozen=True)
class Problem:
    message: str
    fix: str


def find_problems(
    recipe: Recipe,
    target: TargetInfo,
    machine: Machine,
    memory: TrainingMemory,
    states_bytes: int | None,
    checkpoint_bytes: int,
    run: RunDir,
) -> list[Problem]:
    """Problems of target, draft, memory and disk. Only what surely fails is one: estimates do not stop a run."""
    return [
        *_target_problems(recipe, target),
        *_draft_problems(recipe, target),
        *_memory_problems(recipe, target, machine, memory),
        *_window_problems(recipe),
        *_disk_problems(machine, states_bytes, checkpoint_bytes, run, recipe.train),
    ]


def device_shortage(engine: EnginePart, machine: Machine) -> Problem | None:
    """What keeps this machine from starting the recipe's engine. It may be planned here and run elsewhere."""
    need = engine.tensor_parallel
    if engine.kind != "vllm" or engine.urls:
        return None
    have = len(machine.gpus) or machine.numa_nodes  # on a CPU, vLLM puts each rank on a NUMA node of its own
    if need <= have:
        return None
    has = f"{len(machine.gpus)} GPUs" if machine.gpus else f"0 GPUs and {machine.numa_nodes} NUMA node(s)"
    return Problem(
        f"this machine has {has}, the recipe needs {need} (engine.tensor_parallel)",
        f"run on a machine that has them, set engine.tensor_parallel to at most {have}, or name running servers in "
        "engine.urls",
    )


def _target_problems(recipe: Recipe, target: TargetInfo) -> list[Problem]:
    found: list[Problem] = []
    if not chat_template_text(target.path):
        found.append(
            Problem(
                f"{target.path} has no chat template",
                "use the instruction-tuned checkpoint, or add chat_template.jinja to it",
            )
        )
    vocabularies = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "tekken.json", "vocab.txt")
    own_code = "AutoTokenizer" in (
        (read_json_object(target.path / "tokenizer_config.json") or {}).get("auto_map") or {}
    )
    if not any((target.path / name).is_file() for name in vocabularies) and not own_code:
        found.append(
            Problem(
                f"{target.path} has no tokenizer ({', '.join(vocabularies[:4])} or the like)",
                "download the tokenizer files",
            )
        )
    tokens = tokenizer_size(target.path)
    if tokens is not None and tokens > target.vocab_size:
        found.append(
            Problem(
                f"{target.path}: the tokenizer has {tokens} tokens, the embedding only {target.vocab_size} rows",
                "tokenizer and weights are of different checkpoints: download both again",
            )
        )
    if own_code and not recipe.target.remote_code and not (target.path / "tokenizer.json").is_file():
        found.append(
            Problem(
                f"the tokenizer of {target.path} is code of the checkpoint, which the recipe does not allow",
                "read that code, and set target.remote_code: true",
            )
        )
    return found


def _draft_problems(recipe: Recipe, target: TargetInfo) -> list[Problem]:
    wrong = [*misfits(target, recipe.draft), *format_misfits(recipe, target)]
    if recipe.draft.from_ is not None and not wrong:
        wrong = start_problems(Path(recipe.draft.from_), target, recipe.draft)
    found = [Problem(e.message, e.fix or "correct it") for e in wrong]
    if recipe.data.max_length > target.max_position_embeddings:
        found.append(
            Problem(
                f"data.max_length is {recipe.data.max_length:,}, but the target ends at position "
                f"{target.max_position_embeddings:,}",
                f"set data.max_length to at most {target.max_position_embeddings}",
            )
        )
    return found


def _memory_problems(recipe: Recipe, target: TargetInfo, machine: Machine, memory: TrainingMemory) -> list[Problem]:
    found: list[Problem] = []
    used = machine.gpus[: recipe.engine.tensor_parallel] if recipe.engine.kind == "vllm" else machine.gpus
    have, where = (sum(g.memory for g in used), f"memory on {len(used)} GPU(s)") if used else (machine.memory, "memory")
    if not recipe.engine.urls and target.weight_bytes > have:
        found.append(
            Problem(
                f"not enough memory: the target's weights take {size(target.weight_bytes)}, this machine "
                f"({machine.name}) has "
                f"{size(have)} of {where}",
                "set a larger engine.tensor_parallel, run on a larger machine, "
                "or name a server that has the target in engine.urls",
            )
        )
    device = machine.gpus[0].memory if machine.gpus else machine.memory
    if memory.certain > device:
        found.append(
            Problem(
                f"not enough memory: the drafter's weights, gradients and moments take {size(memory.certain)}, "
                "one device has "
                f"{size(device)}",
                "set a smaller draft.intermediate_size or draft.vocab_size, train.optimizer: muon, or use a larger GPU",
            )
        )
    return found


def _window_problems(recipe: Recipe) -> list[Problem]:
    if recipe.states.window is None:
        return []
    return [
        Problem(
            f"states.window is {recipe.states.window:,}, but no stage can drop states and harvest them again yet: all "
            "are kept",
            "leave states.window out; data.limit bounds what is kept",
        )
    ]


def _disk_problems(
    machine: Machine, states: int | None, checkpoints: int, run: RunDir, train: TrainPart
) -> list[Problem]:
    more_states = max(0, (states or 0) - _stored(run.states, "*.safetensors"))
    more_checkpoints = max(0, checkpoints - _stored(run.train, "**/*.safetensors"))
    needs = [(run.root, machine.disk_free, more_states + more_checkpoints)]
    if run.states.is_dir() and run.states.stat().st_dev != run.root.stat().st_dev:  # states/ lies on a disk of its own
        free = shutil.disk_usage(run.states).free
        needs = [(run.states, free, more_states), (run.root, machine.disk_free, more_checkpoints)]
    short = [need for need in needs if need[2] > need[1]]
    if not short:
        return []
    place, free, need = short[0]
    harvest = run.record("harvest")
    harvested = not more_states or (harvest is not None and harvest.status == "done")
    ways = [] if harvested else ["set data.limit", "set a smaller engine.sampling.max_tokens"]
    if more_checkpoints and train.keep > 1:
        ways.append(f"set train.keep below {train.keep}")
    kept = [d / run.previous.name for d in (run.root, run.samples, run.states) if (d / run.previous.name).is_dir()]
    ways += [f"delete what you do not need of {', '.join(map(str, kept))}"] * bool(kept)
    return [
        Problem(
            f"not enough disk: hidden states ({size(states or 0)}) and checkpoints ({size(checkpoints)}) need "
            f"{size(need)} more, {size(free)} are free at {place}",
            ", ".join([*ways, "or put run_dir on a larger disk" if ways else "put run_dir on a larger disk"]),
        )
    ]


def _stored(directory: Path, files: str) -> int:
    return sum(f.stat().st_size for f in directory.glob(files)) if directory.is_dir() else 0
