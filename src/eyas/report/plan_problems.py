"""Every reason why a planned run cannot work, each with its fix."""

from dataclasses import dataclass
from pathlib import Path

from eyas.recipe import Recipe
from eyas.report.costs import Drafter, TrainingMemory
from eyas.report.machine import Machine
from eyas.rundir import RunDir
from eyas.target.config_json import read_json_object
from eyas.target.info import TargetInfo
from eyas.target.tokens import chat_template_text


@dataclass(frozen=True)
class Problem:
    message: str
    fix: str


def find_problems(
    recipe: Recipe,
    target: TargetInfo,
    drafter: Drafter,
    machine: Machine,
    memory: TrainingMemory,
    states_bytes: int | None,
    checkpoint_bytes: int,
    run: RunDir,
) -> list[Problem]:
    """Problems of target, draft, memory and disk. Only what surely fails is one: estimates do not stop a run."""
    return [
        *_target_problems(recipe, target),
        *_draft_problems(recipe, target, drafter),
        *_memory_problems(recipe, target, machine, memory),
        *_disk_problems(machine, states_bytes, checkpoint_bytes, run),
    ]


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
    if own_code and not recipe.target.remote_code and not (target.path / "tokenizer.json").is_file():
        found.append(
            Problem(
                f"the tokenizer of {target.path} is code of the checkpoint, which the recipe does not allow",
                "read that code, and set target.remote_code: true",
            )
        )
    return found


def _draft_problems(recipe: Recipe, target: TargetInfo, drafter: Drafter) -> list[Problem]:
    found: list[Problem] = []
    if recipe.draft.vocab_size > target.vocab_size:
        found.append(
            Problem(
                f"draft.vocab_size is {recipe.draft.vocab_size:,}, but the target has only "
                f"{target.vocab_size:,} tokens",
                f"set draft.vocab_size to at most {target.vocab_size}",
            )
        )
    aux, n = list(drafter.aux_layers), target.num_hidden_layers
    if not aux or aux != sorted(set(aux)) or aux[0] < 1 or aux[-1] > n - 1:
        whose = "the default" if recipe.draft.aux_layers is None else "draft.aux_layers"
        found.append(
            Problem(
                f"draft.aux_layers: {whose} {aux} does not fit a target of {n} layers; expected different "
                "numbers from 1 to "
                f"{n - 1} in ascending order",
                f"set draft.aux_layers, e.g. {sorted({1, max(1, n // 2), max(1, n - 1)})}",
            )
        )
    if drafter.heads % drafter.key_value_heads:
        found.append(
            Problem(
                f"draft.key_value_heads: {drafter.key_value_heads} does not divide the {drafter.heads} attention heads",
                "set draft.key_value_heads to a divisor of draft.attention_heads",
            )
        )
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
    if machine.gpus and not recipe.engine.urls and recipe.engine.tensor_parallel > len(machine.gpus):
        found.append(
            Problem(
                f"engine.tensor_parallel is {recipe.engine.tensor_parallel}, this machine has "
                f"{len(machine.gpus)} GPU(s)",
                f"set engine.tensor_parallel to at most {len(machine.gpus)}",
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


def _disk_problems(machine: Machine, states: int | None, checkpoints: int, run: RunDir) -> list[Problem]:
    need = max(0, (states or 0) - _stored(run.states)) + max(0, checkpoints - _stored(run.train))
    if need <= machine.disk_free:
        return []
    return [
        Problem(
            f"not enough disk: hidden states ({size(states or 0)}) and checkpoints ({size(checkpoints)}) need "
            f"{size(need)} more, "
            f"{size(machine.disk_free)} are free at {run.root}",
            "set states.window or data.limit, a smaller engine.sampling.max_tokens, or run_dir on a larger disk",
        )
    ]


def _stored(directory: Path) -> int:
    return sum(f.stat().st_size for f in directory.rglob("*.safetensors")) if directory.is_dir() else 0


def size(n: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:,.1f} {unit}"
        n /= 1000
    raise AssertionError
