"""transformers' Trainer with our batches and loss, exact resume, checkpoints of ours, and a look before each step."""

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from speculators.losses import LossConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from eyas.draft.model import COUNT_EPS, DraftOutput, Eagle3Drafter, StepCounts
from eyas.errors import ProofError
from eyas.files import write_text
from eyas.progress import Task
from eyas.recipe import TrainPart
from eyas.train import checkpoints
from eyas.train.data import Batches, Reader, StepBatches
from eyas.train.optimizers import build_optimizer, lr_factor
from eyas.train.packing import Schedule
from eyas.train.sharding import Sharded, mine, release, shard, whole


class Log:
    """train/log.jsonl: one JSON object for each step ("kind": "step") and evaluation ("kind": "eval")."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path, self._writes = path, writes

    def start_at(self, step: int) -> None:
        """Forgets what was logged after `step`: those steps are run again; and what is no entry."""
        if self._writes:
            write_text(self.path, "".join(json.dumps(e) + "\n" for e in self._entries() if e["step"] <= step))

    def last(self, kind: str) -> dict[str, Any] | None:
        return next((e for e in reversed(self._entries()) if e["kind"] == kind), None)

    def _entries(self) -> list[dict[str, Any]]:
        """Of the lines that are entries: one may be cut by a kill, or damaged, and the checkpoints are what counts."""
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        return [entry for line in lines if (entry := _entry(line)) is not None]

    def add(self, entry: dict[str, Any]) -> None:
        if self._writes:
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(entry) + "\n")


_NUMBERS = {"step": ("loss", "mean_length"), "eval": ("eval_loss", "eval_mean_length")}
"""what an entry of each kind holds beside its step, and readers rely on"""


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        needed = [entry[key] for key in _NUMBERS[entry["kind"]]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return entry if type(entry["step"]) is int and all(type(x) is float for x in needed) else None


class DrafterTrainer(Trainer):
    """Evaluates, saves and stops where `Rhythm` says; everything else is the Trainer's own loop."""

    def __init__(
        self,
        model: Eagle3Drafter,
        args: TrainingArguments,
        *,
        part: TrainPart,
        losses: LossConfig,
        batches: Batches,
        held_out: Callable[[], Reader] | None,
        schedule: Schedule,
        made_of: dict[str, str],
        log: Log,
        task: Task,
        interrupted: Callable[[], bool],
    ) -> None:
        self.drafter = model
        self.part, self.losses, self.batches, self.held_out = part, losses, batches, held_out
        self.schedule, self.made_of, self.log_file, self.task = schedule, made_of, log, task
        self.interrupted = interrupted
        self.stopped_early = False
        self.last_evaluation: dict[str, Any] | None = None
        self._step: StepBatches | None = None
        self._counts: StepCounts | None = None
        self._asked_to_stop = torch.zeros(())
        self._began = time.monotonic()
        super().__init__(model=model, args=args, callbacks=[Rhythm(self)])
        self.remove_callback(PrinterCallback)
        # DDP would cut compiled graphs at its buckets; our pieces take weights as arguments, and attention resists it
        torch._dynamo.config.optimize_ddp = False
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True  # else gradients are held twice
        if part.sharding == "fsdp" and args.world_size > 1:
            shard(model, args.device)
        self.model_accepts_loss_kwargs = True  # our denominators are of the whole step: Trainer must not divide again

    # what Trainer asks for

    def get_train_dataloader(self) -> Any:
        return self.batches

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not isinstance(model, FSDPModule):
            return super()._wrap_model(model, *args, **kwargs)
        # Trainer prepares nothing that is wrapped: autocast must be set here
        return Sharded(self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.drafter if model is None else model, self.part)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            factor = lr_factor(self.part, num_training_steps)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self._optimizer(), factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None
        return self.optimizer

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The step's batches, and by what its loss sums are divided: known before the first backward pass."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        self._step = StepBatches([batch["loaded"] for batch in batches])
        return batches, self._denominators(self._step.labels)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert self._step is not None
        stream = self.args.process_index * self.args.gradient_accumulation_steps + self._step.done
        torch.manual_seed(self.part.seed * 1_000_003 + self.state.global_step * 1009 + stream)
        output: DraftOutput = model(
            inputs["loaded"].batch,
            self.losses,
            decay=self.part.step_decay,
            denominators=num_items_in_batch,
            noise=self.part.noise,
        )
        self._step.add(output.counts)
        return (output.loss, output) if return_outputs else output.loss

    def _denominators(self, labels: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks at each TTT step over the number of ranks, so that DDP's mean is the global batch's loss.

        The ranks also tell each other whether this is to be the last step; `_clip_grad_norm` reads it, where the host
        waits for the device anyway.
        """
        stop = torch.full((1,), float(self.interrupted()), device=labels.device)
        shared = self._sum(torch.cat([labels, stop]))
        self._asked_to_stop = shared[-1]
        return shared[:-1] / self.args.world_size

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.args.world_size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clips, after the proof that loss and gradient are finite: the optimizer never sees what is not."""
        assert self._step is not None
        self._counts = StepCounts.unstack(self._sum(self._step.counts))
        named = [(n, p) for n, p in self.drafter.named_parameters() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None]))
        finite = torch.isfinite(norm) & torch.isfinite(self._counts.loss).all()
        good, stop = torch.stack([finite.float(), self._asked_to_stop]).tolist()
        self.stopped_early = stop > 0
        if not good:
            self._refuse_step(named, self._step)
        torch.nn.utils.clip_grads_with_norm_([p for _, p in named], self.part.clip, norm)
        return norm

    def _refuse_step(self, named: list[tuple[str, nn.Parameter]], step: StepBatches) -> None:
        """All ranks come here together: what they judge by is the same for all."""
        assert self._counts is not None
        bad = [n for n, p in named if p.grad is not None and not bool(torch.isfinite(mine(p.grad)).all())]
        wrong = not bool(torch.isfinite(step.counts[0]).all())
        every = self._gathered((wrong, step.ids))
        ids = [i for wrong, ids in every if wrong for i in ids] or [i for _, ids in every for i in ids]
        done = self.state.global_step
        kept = checkpoints.whole_checkpoints(Path(str(self.args.output_dir)))
        left = f"{kept[-1].path.name} is still good" if kept else "there is no checkpoint yet"
        raise ProofError(
            f"training step {done + 1} (epoch {self.schedule.epoch_of(done) + 1}): the loss or its gradient is not "
            f"finite; loss sums by TTT step {self._counts.loss.tolist()}, gradients not finite in "
            f"{', '.join(bad[:3]) or 'none'}; samples {', '.join(ids[:8])}. No weight was changed by this step",
            fix=f"lower train.lr or train.clip, or look at these samples' states; {left}",
        )

    def _gathered(self, own: tuple[bool, list[str]]) -> list[tuple[bool, list[str]]]:
        every = [own] * self.args.world_size
        if self.args.world_size > 1:
            dist.all_gather_object(every, own)
        return every

    # what is logged

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "grad_norm" not in logs or self._counts is None or self._step is None:
            return
        step = self.state.global_step
        sizes = self._sum(torch.tensor(self._step.sizes, device=self.args.device))
        tokens, supervised = (int(x) for x in sizes.tolist())
        measured = self.measures(self._counts)
        entry = {
            "kind": "step",
            "step": step,
            "epoch": self.schedule.epoch_of(step - 1) + 1,
            **measured,
            "lr": logs["learning_rate"],
            "grad_norm": logs["grad_norm"],
            "tokens": tokens,
            "supervised": supervised,
            "seconds": round(time.monotonic() - self._began, 3),
        }
        self.log_file.add(entry)
        self.task.advance(1, note=f"loss {entry['loss']:.3f}", tokens=tokens, supervised_tokens=supervised)
        shown = {**logs, "loss": measured["loss"]}
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, shown)

    def measures(self, counts: StepCounts) -> dict[str, float]:
        """loss; accuracy_k (argmax agreement), conditional_k (acceptance given all before) of TTT step k; mean_length.

        mean_length is the acceptance length, bonus token included, over all supervised positions: an engine starts
        only where its last draft ended, so the walk of `eyas.prove.acceptance` gives a little less.
        """
        loss, rows, agree, accepted, reached = counts.stack().double().cpu().tolist()
        decay = self.part.step_decay
        return {
            "loss": sum(decay**k * x / (n + COUNT_EPS) for k, (x, n) in enumerate(zip(loss, rows, strict=True))),
            **_ratios("accuracy", agree, rows),
            **_ratios("conditional", accepted, reached),
            "mean_length": 1 + sum(accepted) / max(reached[0], 1),
        }

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The held-out loss and acceptance, over all ranks. Returns {} when nothing is held out."""
        self.control.should_evaluate = False
        if self.held_out is None:
            return {}
        self.drafter.eval()
        total = torch.zeros(5, self.part.ttt_steps, device=self.args.device)
        with torch.no_grad():
            for loaded in self.held_out():
                total += self.drafter(loaded.batch, self.losses).counts.stack()
        release(self.drafter)
        self.drafter.train()
        measured = self.measures(StepCounts.unstack(self._sum(total)))
        step = self.state.global_step
        metrics = {f"eval_{key}": value for key, value in measured.items()}
        entry = {"kind": "eval", "step": step, "epoch": self.schedule.epoch_of(step - 1) + 1, **metrics}
        self.last_evaluation = entry
        self.log_file.add(entry)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step, root = self.state.global_step, Path(str(self.args.output_dir))
        weights = checkpoints.trained_weights(self.drafter)
        moments = checkpoints.moments(self.drafter, self._optimizer())
        if self.args.should_save:
            evaluation = self.last_evaluation
            loss = evaluation["eval_loss"] if evaluation is not None and evaluation["step"] == step else None
            with checkpoints.directory_aside(root / f"{checkpoints.PREFIX}{step}") as aside:
                checkpoints.save(weights, moments, aside)
                self.state.save_to_json(str(aside / checkpoints.STATE))
                checkpoints.seal(aside, step, self.made_of, loss)
            checkpoints.retain(root, self.part.keep)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.load_weights(self.drafter, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        checkpoints.load_optimizer(self.drafter, self._optimizer(), Path(checkpoint))
        scheduler, step = self.lr_scheduler, self.state.global_step
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        scheduler.last_epoch = step
        rates = [base * f(step) for base, f in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(self._optimizer().param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing to load: compute_loss seeds every step."""


class Rhythm(TrainerCallback):
    """Decides after each step whether to evaluate, save or stop."""

    def __init__(self, trainer: DrafterTrainer) -> None:
        self._trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        part, schedule, step = self._trainer.part, self._trainer.schedule, state.global_step
        boundary, last = step in schedule.epoch_ends, step == len(schedule.steps)
        control.should_log = True
        control.should_evaluate = last or (step % part.eval_every == 0 if part.eval_every else boundary)
        control.should_save = last or (step % part.save_every == 0 if part.save_every else boundary)
        if self._trainer.stopped_early:
            control.should_save = control.should_training_stop = True
        return control


def in_bfloat16(part: TrainPart, device: torch.device) -> bool:
    """Whether matrix products are bf16 (weights and moments are float32 in any case)."""
    return device.type == "cuda" if part.compute == "auto" else part.compute == "bfloat16"


def training_arguments(part: TrainPart, directory: Path, total: int, device: torch.device) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=total,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=part.accumulate,
        learning_rate=part.lr,
        max_grad_norm=part.clip,
        seed=part.seed,
        bf16=in_bfloat16(part, device),
        use_cpu=device.type == "cpu",
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        logging_nan_inf_filter=False,
        ignore_data_skip=True,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # one process, several GPUs: Trainer would spread it over them with nn.DataParallel
    return arguments


def training_device() -> torch.device:
    """This rank's GPU, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _ratios(name: str, part: list[float], whole: list[float]) -> dict[str, float]:
    return {f"{name}_{k}": a / b for k, (a, b) in enumerate(zip(part, whole, strict=True)) if b}
