"""The train stage: from the harvest and the draft vocabulary to train/final, resumable after any interruption."""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig

from eyas.draft.config import aux_layers, draft_config
from eyas.draft.init import init_drafter, load_drafter
from eyas.draft.inputs import draft_inputs
from eyas.draft.loss import loss_config
from eyas.draft.model import Eagle3Drafter
from eyas.draft.vocab import Vocab, load_vocab
from eyas.errors import InputError, ProofError
from eyas.files import fingerprint
from eyas.progress import Progress
from eyas.recipe import FREE_TRAIN_SETTINGS, Recipe, TrainPart
from eyas.rundir import Proof, RunDir
from eyas.states.store import HarvestStore, SampleRef
from eyas.target.info import TargetInfo
from eyas.train import checkpoints
from eyas.train.data import AHEAD, Batches, Layout, Reader, layout
from eyas.train.interrupt import wish_to_stop
from eyas.train.loop import DrafterTrainer, Log, in_bfloat16, training_arguments, training_device
from eyas.train.memory import Load, check_memory
from eyas.train.packing import check_budget, make_schedule, pack, rows_of, trainable
from eyas.train.sharding import whole


def train(
    recipe: Recipe,
    target: TargetInfo,
    run: RunDir,
    progress: Progress,
    stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Trains the drafter and writes train/final. Returns counts for run.json.

    Continues from the newest whole checkpoint of the same inputs. On Ctrl-C, or once `stop` says so, a checkpoint is
    written after the current step, then KeyboardInterrupt is raised. Raises InputError on settings that cannot work,
    ProofError on a step that is not finite.
    """
    part = recipe.train
    device, world, rank = training_device(), int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if rank:
        progress = Progress(quiet=True)
    config = draft_config(target, recipe.draft, part.ttt_steps)
    vocab, store = load_vocab(run), HarvestStore(run)
    losses = loss_config(part.loss, device)
    seen, held_out = (trainable(store.samples(split)) for split in ("train", "holdout"))
    if not seen:
        raise InputError(f"{run.samples} has no trainable sample", fix="harvest answers of at least 2 tokens first")
    check_budget([*seen, *held_out], part.tokens_per_batch)
    schedule = make_schedule(seen, part.tokens_per_batch, part.epochs, part.seed, world, part.accumulate)
    how = layout(
        store.layers(),
        aux_layers(target, recipe.draft),
        target.num_hidden_layers,
        hidden=target.hidden_size,
        steps=part.ttt_steps,
        nested=device.type == "cpu",
        pad_to=part.tokens_per_batch if device.type == "cuda" else None,
    )
    made_of = _made_of(recipe, target, vocab, [*seen, *held_out], world)
    if not rank:
        run.train.mkdir(parents=True, exist_ok=True)
        checkpoints.tidy(run.train)
    found = checkpoints.resumable(run.train, made_of)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what an engine in this process left
        check_memory(recipe, target, Load.of(seen, schedule, world), torch.cuda.mem_get_info(device)[0])
    model = init_drafter(config, vocab, target, train_head=part.train_head, seed=part.seed)
    if recipe.draft.from_ is not None:
        load_drafter(model, Path(recipe.draft.from_))
    if in_bfloat16(part, device):
        model.hold_frozen_in(torch.bfloat16)
    first_norms = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad and p.ndim == 1}
    start, total = (0 if found is None else found.step), len(schedule.steps)
    if found is not None:
        progress.say(f"train: continuing after step {start:,} of {total:,}")
    log = Log(run.train / "log.jsonl", writes=not rank)
    log.start_at(start)

    def read_from(first: int) -> Reader:
        packs = [pack for step in schedule.steps[first:] for pack in step[rank]]
        return Reader(lambda: HarvestStore(run), seen, packs, how, device, ahead=max(AHEAD, part.accumulate))

    batches = Batches(read_from, total, part.accumulate)
    batches.start = start
    wish = wish_to_stop(progress.say) if stop is None else nullcontext(threading.Event())  # else the parent tells
    with progress.task("train", total=total, unit="steps", done=start) as task, wish as asked:
        trainer = DrafterTrainer(
            model,
            training_arguments(part, run.train, total, device),
            part=part,
            losses=losses,
            batches=batches,
            held_out=_held_out(run, held_out, part.tokens_per_batch, how, device, rank, world),
            schedule=schedule,
            made_of=made_of,
            log=log,
            task=task,
            interrupted=stop or asked.is_set,
        )
        try:
            trainer.train(resume_from_checkpoint=None if found is None else str(found.path))
        finally:
            batches.close()
    if trainer.stopped_early and trainer.state.global_step < total:
        raise KeyboardInterrupt
    weights = final_weights(model)
    if not rank:
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        _prove(run, {n: weights[n] for n in names}, first_norms, part, in_bfloat16(part, device))
        write_final(weights, config, vocab, run.train / "final")
    if trainer.interrupted():  # after the last step: everything is kept, but the wish to stop holds
        raise KeyboardInterrupt
    return _counts(trainer, schedule.tokens, len(seen), len(held_out), vocab)


def _prove(
    run: RunDir, trained: dict[str, torch.Tensor], first_norms: dict[str, torch.Tensor], part: TrainPart, half: bool
) -> None:
    """Raises ProofError if a weight is not finite, or a norm weight is what it was (as in training in pure bf16)."""
    bad = [n for n, p in trained.items() if not bool(torch.isfinite(p).all())]
    still = [n for n, p in first_norms.items() if torch.equal(p, trained[n])]
    proofs = [
        Proof("train: weights are finite", not bad, f"{len(trained) - len(bad)} tensors", f"{len(trained)} tensors"),
        Proof(
            "train: norm weights moved",
            not still,
            f"{len(first_norms) - len(still)} norms",
            f"{len(first_norms)} norms",
        ),
    ]
    run.write_proofs(proofs)
    if bad or still:
        said = [f"{', '.join(bad)} is not finite"] * bool(bad)
        said += [f"{', '.join(still)} is as it was before"] * bool(still)
        # in float32, a norm stays only where its updates are below a rounding step
        ways = ["set train.compute: float32"] * half
        ways += [f"lower train.lr ({part.lr:g}) or train.clip ({part.clip:g})"] * bool(bad)
        ways += [f"raise train.lr ({part.lr:g}) or train.clip ({part.clip:g})"] * (bool(still) and not bad)
        raise ProofError(
            f"after training, {' and '.join(said)}", fix=f"{', or '.join(ways)}, and look at train/log.jsonl"
        )


def final_weights(model: Eagle3Drafter) -> dict[str, torch.Tensor]:
    """The trained weights and the head, float32 on the CPU; not the embedding. Every rank must ask."""
    foreign = ("embed_tokens.", "verifier_")
    kept = ((n, p) for n, p in model.named_parameters() if not n.startswith(foreign))
    return {n: whole(p.detach()).float().cpu().contiguous() for n, p in kept}


def write_final(weights: dict[str, torch.Tensor], config: Eagle3SpeculatorConfig, vocab: Vocab, path: Path) -> None:
    """`final_weights`, the vocabulary map and the config."""
    with checkpoints.directory_aside(path) as aside:
        save_file(weights | {"d2t": vocab.d2t, "t2d": vocab.t2d}, aside / "model.safetensors", {"format": "pt"})
        # not save_pretrained, which adds a copy of speculators' config.py and an auto_map to it
        (aside / "config.json").write_text(config.to_json_string(), encoding="utf-8")


def _held_out(
    run: RunDir, refs: list[SampleRef], budget: int, how: Layout, device: torch.device, rank: int, world: int
) -> Callable[[], Reader] | None:
    """Opens this rank's share of the held-out packs, as many as every rank's; None when nothing is held out."""
    if not refs:
        return None
    packs = pack([rows_of(ref) for ref in refs], budget, np.random.default_rng(0))
    mine = [*packs, *([[]] * (-len(packs) % world))][rank::world]
    return lambda: Reader(lambda: HarvestStore(run), refs, mine, how, device)


def _made_of(recipe: Recipe, target: TargetInfo, vocab: Vocab, refs: Sequence[SampleRef], world: int) -> dict[str, str]:
    digest = hashlib.sha256()
    for ref in refs:
        digest.update(f"{ref.id}\t{ref.split}\t{ref.tokens}\t{ref.supervised}\n".encode())
    settings = recipe.train.model_dump(mode="json")
    return {
        "target": target.fingerprint,
        "data": digest.hexdigest()[:16],
        "vocabulary": vocab.fingerprint,
        "draft settings": fingerprint(draft_inputs(recipe.draft)),
        "train settings": fingerprint({k: v for k, v in settings.items() if k not in FREE_TRAIN_SETTINGS}),
        "number of ranks": str(world),
    }


def _counts(trainer: DrafterTrainer, tokens: int, seen: int, held_out: int, vocab: Vocab) -> dict[str, Any]:
    last, evaluation = trainer.log_file.last("step"), trainer.log_file.last("eval")
    return {
        "steps": trainer.state.global_step,
        "epochs": trainer.part.epochs,
        "samples": seen,
        "held_out": held_out,
        "tokens_per_epoch": tokens,
        "trained_parameters": sum(p.numel() for p in trainer.drafter.parameters() if p.requires_grad),
        "draft_vocab": vocab.size,
        "loss": None if last is None else last["loss"],
        "mean_length": None if last is None else last["mean_length"],
        "held_out_loss": None if evaluation is None else evaluation["eval_loss"],
        "held_out_mean_length": None if evaluation is None else evaluation["eval_mean_length"],
    }
