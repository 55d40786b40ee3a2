"""Two GPUs against one: the same losses on the same global batch, and how much faster.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/two_gpus.py            # two GPUs: about 2 minutes
    python -m torch.distributed.run --nproc-per-node 2 benchmarks/two_gpus.py --tiny     # gloo on the CPU, a toy shape

The product's own trainer trains a synthetic drafter on synthetic packs that lie ready on the device, in four ways:
one GPU with two packs a step (accumulate), two GPUs with a pack each (DDP, then FSDP), and one GPU with one pack a
step. The first three see the same global batches: their losses of each step are compared. Scaling efficiency is
tokens/s of two GPUs over twice the tokens/s of one: `same_batch` with the same global batch (the one GPU pays its
optimizer step once in two packs), `same_share` with one pack on each GPU and step.
"""

import argparse
import datetime
import faulthandler
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from drafters import Shape, build, config

from eyas.draft.loss import loss_config
from eyas.draft.model import Eagle3Drafter
from eyas.progress import Progress
from eyas.recipe import TrainPart
from eyas.states.store import Sample
from eyas.train.data import Batches, Layout, Loaded, collate
from eyas.train.loop import DrafterTrainer, Log, in_bfloat16, training_arguments, training_device
from eyas.train.packing import Schedule, share_out

STARTED = time.monotonic()
RESULTS = Path(__file__).resolve().parent / "results"
OF_TORCHRUN = re.compile("RANK|WORLD_SIZE|MASTER_|LOCAL_|GROUP_|ROLE_|TORCHELASTIC_")


SHAPES = {
    "8b": Shape(4096, 14336, 32, 8, 128, 128256, 32000, 4096, 1024),
    "tiny": Shape(64, 96, 4, 2, 16, 512, 128, 128, 32),
}


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    accumulate: int
    sharding: str


ALONE = (Way("one", 2, "none"), Way("one, a pack a step", 1, "none"))
TOGETHER = (Way("ddp", 1, "none"), Way("fsdp", 1, "fsdp"))


@dataclass(frozen=True)
class Measured:
    losses: list[float]
    """of the first steps"""
    tokens_per_s: float
    """of all ranks together, over the timed steps"""
    seconds: float
    """of one step"""
    peak_gib: float | None
    """of rank 0's GPU"""


class Ready:
    """Packs on the device, as the trainer's reader."""

    def __init__(self, packs: list[Loaded]) -> None:
        self._packs = packs

    def __iter__(self) -> Iterator[Loaded]:
        return iter(self._packs)

    def close(self) -> None:
        pass


class Unsaved(DrafterTrainer):
    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        pass


def drafter(shape: Shape, device: torch.device, part: TrainPart) -> Eagle3Drafter:
    model = build(Eagle3Drafter, shape, config(shape, "eager", 500000.0), device)
    model.verifier_lm_head.weight = model.lm_head.weight  # one matrix, as a run holds it
    if in_bfloat16(part, device):
        model.hold_frozen_in(torch.bfloat16)
    return model


def samples(shape: Shape, seed: int) -> list[Sample]:
    """Documents that fill one pack; the second half of each is supervised; states are a function of the token."""
    drawn = torch.Generator().manual_seed(seed)
    table = torch.randn(997, 4, shape.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    left, found = shape.tokens, []
    while left > 4:
        rows = int(torch.randint(shape.document // 2, shape.document * 3 // 2, (1,), generator=drawn))
        rows = left if left - rows <= 4 else rows
        ids = torch.randint(0, shape.draft_vocab, (rows + 2,), generator=drawn)
        mask = torch.arange(rows + 2) >= rows // 2
        found.append(Sample(f"{seed}/{len(found)}", ids, mask, table[ids[:-1] % 997], torch.zeros(0)))
        left -= rows
    return found


def measure(way: Way, shape: Shape, args: argparse.Namespace) -> Measured:
    """Trains args.compared + args.timed steps."""
    total = args.compared + args.timed
    part = TrainPart(
        ttt_steps=args.ttt,
        tokens_per_batch=shape.tokens,
        optimizer=args.optimizer,
        accumulate=way.accumulate,
        sharding=way.sharding,
        schedule="constant",
        warmup=0.0,
        compute=args.compute,
    )
    device = training_device()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    batch = world * way.accumulate
    numbers = [[[(s * batch + i) % (2 * args.compared)] for i in range(batch)] for s in range(total)]
    steps = [share_out(group, world) for group in numbers]
    how = Layout([0, 1, 2], 3, shape.hidden, args.ttt, device.type == "cpu", None)
    mine = [pack[0] for step in steps for pack in step[rank]]
    ready = {n: Loaded(collate(samples(shape, n), how).to(device), [str(n)]) for n in set(mine)}
    with tempfile.TemporaryDirectory() as directory, Progress(quiet=True).task("", total=None, unit="") as task:
        root = Path(directory)
        trainer = Unsaved(
            drafter(shape, device, part),
            training_arguments(part, root, total, device),
            part=part,
            losses=loss_config(part.loss, device),
            batches=Batches(lambda first: Ready([ready[n] for n in mine]), total, way.accumulate),
            held_out=None,
            schedule=Schedule(steps, [total], 0),
            made_of={},
            log=Log(root / "log.jsonl", writes=not rank),
            task=task,
            interrupted=lambda: False,
        )
        trainer.train()
        lines = (root / "log.jsonl").read_text().splitlines() if not rank else []
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    del trainer
    release(device)
    if rank:
        return Measured([], 0.0, 0.0, None)
    entries = [json.loads(line) for line in lines]
    seconds = entries[-1]["seconds"] - entries[args.compared - 1]["seconds"]
    print(
        f"{way.name}: {time.monotonic() - STARTED:.0f} s after the start, {1e3 * seconds / args.timed:.0f} ms a step",
        flush=True,
    )
    tokens = sum(e["tokens"] for e in entries[args.compared :])
    return Measured([e["loss"] for e in entries[: args.compared]], tokens / seconds, seconds / args.timed, peak)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def alone(args: argparse.Namespace) -> dict[str, Measured]:
    """The ways of one GPU, in a process that torchrun knows nothing of."""
    environment = {k: v for k, v in os.environ.items() if not OF_TORCHRUN.match(k)}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "alone.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--alone", str(file)]
        subprocess.run(command, env=environment, check=True, timeout=args.limit)
        return {name: Measured(**found) for name, found in json.loads(file.read_text()).items()}


def difference(found: list[float], expected: list[float]) -> float:
    """The largest relative one."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def ratios(measured: dict[str, Measured]) -> dict[str, float]:
    one, single = (measured[way.name] for way in ALONE)
    found: dict[str, float] = {}
    for way in TOGETHER:
        two = measured[way.name]
        found[f"loss_difference/{way.name}"] = difference(two.losses, one.losses)
        found[f"scaling_efficiency/{way.name}/same_batch"] = two.tokens_per_s / (2 * one.tokens_per_s)
        found[f"scaling_efficiency/{way.name}/same_share"] = two.tokens_per_s / (2 * single.tokens_per_s)
    return found


def machine() -> str:
    if not torch.cuda.is_available():
        return f"cpu{len(os.sched_getaffinity(0))}"
    name = torch.cuda.get_device_name().lower().split()
    return f"{name[1] if name[0] == 'nvidia' else name[0]}x2"


def table(measured: dict[str, Measured], found: dict[str, float]) -> None:
    compared = [way.name for way in (ALONE[0], *TOGETHER)]
    print(f"{'step':>6}" + "".join(f"{f'loss, {name}':>16}" for name in compared))
    for step, losses in enumerate(zip(*(measured[name].losses for name in compared), strict=True)):
        print(f"{step + 1:>6}" + "".join(f"{loss:>16.7f}" for loss in losses))
    print(f"\n{'way':24}{'tokens/s':>12}{'ms a step':>12}{'peak GiB':>10}")
    for name, m in measured.items():
        peak = "-" if m.peak_gib is None else f"{m.peak_gib:.1f}"
        print(f"{name:24}{m.tokens_per_s:>12,.0f}{1e3 * m.seconds:>12.1f}{peak:>10}")
    print()
    for name, value in found.items():
        print(f"{name:44}{value:>12.3g}")


def write(args: argparse.Namespace, shape: Shape, measured: dict[str, Measured], found: dict[str, float]) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "benchmark": "two_gpus",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() if commit.returncode == 0 else args.commit,
        "machine": machine(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "command": " ".join(
            ["python -m torch.distributed.run --nproc-per-node 2 benchmarks/two_gpus.py", *sys.argv[1:]]
        ),
        "shape": {**asdict(shape), "ttt_steps": args.ttt, "compute": args.compute, "optimizer": args.optimizer},
        "measurements": {name: asdict(m) for name, m in measured.items()},
        "ratios": found,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"two_gpus-{machine()}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\n{path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a toy shape")
    parser.add_argument("--ttt", type=int, default=3)
    parser.add_argument("--compared", type=int, default=8, help="steps whose losses are compared; not timed")
    parser.add_argument("--timed", type=int, default=12, help="steps after those")
    parser.add_argument("--compute", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which everything is given up")
    parser.add_argument("--commit", help="what the results name where git does not know it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit, exit=True)
    shape = SHAPES["tiny" if args.tiny else "8b"]
    if args.tiny:
        torch.set_num_threads(1)
    if args.alone is not None:
        args.alone.write_text(json.dumps({way.name: asdict(measure(way, shape, args)) for way in ALONE}))
        return
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error("start it with: python -m torch.distributed.run --nproc-per-node 2 benchmarks/two_gpus.py")
    measured = alone(args) if os.environ["RANK"] == "0" else {}  # the other rank waits for the process group
    for way in TOGETHER:
        measured[way.name] = measure(way, shape, args)
    if os.environ["RANK"] == "0":
        found = ratios(measured)
        table(measured, found)
        write(args, shape, measured, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
