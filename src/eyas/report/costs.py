"""What a run costs in bytes and hours: formulas and reference rates, each with its source."""

from dataclasses import dataclass

from eyas.draft.sizes import CHUNK_ELEMENTS, chosen_aux_layers, layer_sizes
from eyas.recipe import Recipe
from eyas.report.machine import Machine
from eyas.rundir import RunDir
from eyas.target.info import TargetInfo

STORED_BYTES = {"bf16": 2, "f32": 4}
_KEPT = 1.3
"""338 KB a row and step at Kimi's shape on an H200, where the formula has 262 KB (benchmarks/results)"""
# Reference rates: floating-point operations a second that the work really reached, batching and waiting included.
_GENERATION_GPU = (2.3e13, "2,912 tok/s of Kimi-K2.5 (32 G active) on 8 cards of 96 GB")
_GENERATION_CORE = (6.9e9, "51 tok/s of SmolLM2-135M in float32 on two CPU cores")
_TRAINING_GPU = (3.4e14, "8,192 tokens of a Kimi-size drafter in 0.21 s on one H200, optimizer included")
_TRAINING_CORE = (4.0e10, "SmolLM2's drafter, 6 s an epoch of 6,000 tokens on two CPU cores")
_LOAD = (0.44e9, "Kimi-K2.5 (595 GB) in 22.5 min")
_ENGINE_START = 46.0


@dataclass(frozen=True)
class Drafter:
    """Sizes of the drafter (a test compares them with the model's own), without importing any framework."""

    heads: int
    key_value_heads: int
    head_dim: int
    intermediate_size: int
    layers: int
    aux_layers: tuple[int, ...]
    trainable: int
    """parameters that are trained"""
    frozen: int
    """embedding, and the head's rows unless they are trained"""


def drafter_sizes(target: TargetInfo, recipe: Recipe) -> Drafter:
    part, hidden = recipe.draft, target.hidden_size
    sizes = layer_sizes(target, part)
    heads, kv, head_dim, mlp = sizes.heads, sizes.key_value_heads, sizes.head_dim, sizes.intermediate_size
    aux = tuple(chosen_aux_layers(target, part))
    trainable = len(aux) * hidden * hidden + hidden  # fc, final norm
    if part.preset == "eagle3.1":
        trainable += len(aux) * hidden
    for layer in range(part.layers):
        wide = 2 * hidden if layer == 0 else hidden  # the first layer sees embedding and state side by side
        trainable += wide * head_dim * (heads + 2 * kv) + heads * head_dim * hidden + 3 * hidden * mlp
        trainable += (3 if layer == 0 else 2) * hidden
    head = part.vocab_size * hidden
    frozen = target.vocab_size * hidden
    if recipe.train.train_head:
        trainable += head
    else:
        frozen += head
    return Drafter(heads, kv, head_dim, mlp, part.layers, aux, trainable, frozen)


def state_bytes(target: TargetInfo, drafter: Drafter, width: int) -> int:
    """Of one token: the auxiliary layers and the last one, `width` bytes a value (fp8: 1, its scales apart)."""
    return (len(drafter.aux_layers) + 1) * target.hidden_size * width


def stored_width(recipe: Recipe, target: TargetInfo) -> int:
    if recipe.states.dtype != "engine":
        return STORED_BYTES[recipe.states.dtype]
    return engine_width(recipe, target)


def engine_width(recipe: Recipe, target: TargetInfo) -> int:
    """Bytes of a value of the states as the engine computes them."""
    engine = target.dtype if recipe.engine.dtype == "auto" else recipe.engine.dtype
    return 4 if engine == "float32" else 2


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device."""

    weights: int
    """trained and frozen ones, and the copies that a step works with"""
    gradients: int
    moments: int
    activations: int
    """the step's packs, and what the backward pass keeps"""
    logits: int
    gradients_stay: bool
    """they are there while a forward pass computes: accumulation, DDP's buckets"""

    @property
    def total(self) -> int:
        """At the peak: as a backward pass gives up activations, gradients take their place, unless they stay."""
        step = self.activations + self.logits
        both = self.gradients + step if self.gradients_stay else max(self.gradients, step)
        return self.weights + self.moments + both

    @property
    def certain(self) -> int:
        """What no batch size makes smaller."""
        return self.weights + self.gradients + self.moments


def training_memory(
    target: TargetInfo, recipe: Recipe, drafter: Drafter, *, cuda: bool, ranks: int = 1, rows: int | None = None
) -> TrainingMemory:
    """rows: supervised rows of the fullest pack; default: all of them, an upper bound.

    Trained weights, gradients and moments are float32 (Muon keeps one moment for a matrix), and with bf16 products
    there is a bf16 copy of the weights. Frozen rows (embedding, head, and the teacher where it is not the head) are
    held in bf16 where that changes nothing. Under FSDP each rank has its share and, in a step, all weights and their
    gradients. Activations are those of the supervised rows at every TTT step; `_KEPT` is what was measured of more
    than the formula counts. Logits: one chunk's, draft's and teacher's with their gradient.
    """
    part, hidden = recipe.train, target.hidden_size
    half = part.compute == "bfloat16" or (part.compute == "auto" and cuda)
    compute, frozen_width = (2, 2 if target.dtype == "bfloat16" else 4) if half else (4, 4)
    rows = min(part.tokens_per_batch if rows is None else rows, part.tokens_per_batch)
    teacher = recipe.draft.vocab_size * hidden if part.train_head or target.logit_scale != 1.0 else 0
    attention = drafter.head_dim * (2 * drafter.heads + 2 * drafter.key_value_heads)
    one_step = 6 * hidden + attention + 3 * drafter.intermediate_size
    kept = int(_KEPT * rows * one_step * part.ttt_steps * drafter.layers)
    states = 2 * part.tokens_per_batch * (len(drafter.aux_layers) + 1) * hidden * (part.accumulate + 1)
    chunk = min(rows * recipe.draft.vocab_size, CHUNK_ELEMENTS["cuda" if cuda else "cpu"])
    sharded = part.sharding == "fsdp" and ranks > 1
    own, whole = -(-drafter.trainable // ranks) if sharded else drafter.trainable, drafter.trainable * sharded
    copies = drafter.trainable * compute if half else 0
    return TrainingMemory(
        weights=4 * (own + whole) + copies + frozen_width * (drafter.frozen + teacher),
        gradients=4 * (own + whole),
        moments=(8 if part.optimizer == "adamw" else 4) * own,
        activations=compute * kept + states,
        logits=4 * compute * chunk,
        gradients_stay=part.accumulate > 1 or (ranks > 1 and not sharded),
    )


def checkpoint_bytes(recipe: Recipe, drafter: Drafter) -> tuple[int, int]:
    """(one checkpoint, the largest sum under `train.keep`: one more while it is written, the final weights,
    the export)."""
    moments = 8 if recipe.train.optimizer == "adamw" else 4
    one = (4 + moments) * drafter.trainable
    exported = 4 * (drafter.trainable + recipe.draft.vocab_size)  # at most float32
    return one, (recipe.train.keep + 1) * one + 4 * drafter.trainable + len(recipe.export.formats) * exported


def active_parameters(target: TargetInfo, experts_per_token: int | None, expert_width: int | None) -> int:
    """Weights that one token passes, roughly: attention, one MLP or the chosen experts, and the head."""
    hidden = target.hidden_size
    attention = hidden * target.head_dim * 2 * (target.num_attention_heads + target.num_key_value_heads)
    mlp = 3 * hidden * target.intermediate_size
    if experts_per_token:
        mlp = 3 * hidden * (expert_width or target.intermediate_size) * (experts_per_token + 1)
    return target.num_hidden_layers * (attention + mlp) + target.vocab_size * hidden


@dataclass(frozen=True)
class StageTime:
    stage: str
    seconds: float
    rate: str
    source: str


def stage_times(
    target: TargetInfo,
    recipe: Recipe,
    drafter: Drafter,
    machine: Machine,
    run: RunDir,
    *,
    active: int,
    samples: int,
    tokens: int,
    answers: int,
) -> list[StageTime]:
    """Seconds of each stage: from what this run directory measured where it did, else from reference rates."""
    start = _ENGINE_START + target.weight_bytes / _LOAD[0]
    generation, said = _generation_rate(run, machine, active)
    supervised = min(answers, tokens)
    harvest_tokens = answers if recipe.data.responses == "regenerate" else tokens / 10  # prefill is far quicker
    per_second, training_source = _TRAINING_GPU if machine.gpus else _TRAINING_CORE
    units = max(1, len(machine.gpus)) if machine.gpus else machine.cores
    flops = 6.0 * drafter.trainable * supervised * recipe.train.ttt_steps * recipe.train.epochs
    verified = 2 * recipe.verify.prompts * min(recipe.engine.sampling.max_tokens, answers / max(1, samples))
    load = f"load at {_LOAD[0] / 1e9:.2f} GB/s ({_LOAD[1]}) and {_ENGINE_START:.0f} s"
    return [
        _measured(run, "prepare")
        or StageTime("prepare", tokens / 2e5 + 5, "200,000 tok/s", "one CPU core's tokenizer"),
        _measured(run, "harvest")
        or StageTime("harvest", start + harvest_tokens / generation, _per_second(generation), f"{said}; {load}"),
        _measured(run, "vocab") or StageTime("vocab", 2 + supervised / 1e7, "10 M tok/s", "counting"),
        _measured(run, "train")
        or StageTime(
            "train", flops / (per_second * units) + 10, f"{per_second * units / 1e12:.2g} TFLOP/s", training_source
        ),
        _measured(run, "export") or StageTime("export", 2 + drafter.trainable * 4 / 1e9, "1 GB/s", "disk"),
        _measured(run, "verify")
        or StageTime("verify", start + verified / generation, _per_second(generation), f"{said}; {load}"),
    ]


def _generation_rate(run: RunDir, machine: Machine, active: int) -> tuple[float, str]:
    record = run.record("harvest")
    measured = None if record is None else record.counts.get("tokens_per_s")
    if isinstance(measured, (int, float)) and measured > 0:
        return float(measured), "measured in this run directory"
    per_unit, source = _GENERATION_GPU if machine.gpus else _GENERATION_CORE
    units = len(machine.gpus) if machine.gpus else machine.cores
    return per_unit * units / (2.0 * active), f"scaled by active weights from {source}"


def _per_second(tokens: float) -> str:
    return f"{tokens:,.0f} tok/s" if tokens >= 10 else f"{tokens:.2g} tok/s"


def _measured(run: RunDir, stage: str) -> StageTime | None:
    record = run.record(stage)
    if record is None or record.status != "done" or record.seconds <= 0:
        return None
    return StageTime(stage, record.seconds, "-", "measured in this run directory")
