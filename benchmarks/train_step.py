"""One EAGLE-3 training step: eyas against speculators' own forward, same weights, same packs, one process.

    python benchmarks/train_step.py                 # one GPU, Kimi and 8B shapes: about 10 minutes
    python benchmarks/train_step.py --shapes kimi --ttt 3 --supervised 50
    python benchmarks/train_step.py --tiny          # CPU, a toy shape: checks that the benchmark runs

Measured for each shape, number of TTT steps and supervised share: forward + backward and the whole step (clip and
optimizer) in ms (median), peak memory, and the share of the card's measured bf16 matrix peak that the *needed*
arithmetic reaches (eyas computes fewer rows; both are held to the same number of useful operations). speculators runs
compiled, with its fused loss kept out of the graph where torch.compile rejects it (torch 2.11), and with its own
default optimizer as well as AdamW. The frozen matrices hold bf16 values, as most targets' do, so that eyas keeps them
in bf16 (`hold_frozen_in`). With --profile, eyas' kernels of one forward + backward are listed by their share of time.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from drafters import Shape, build, config
from speculators.losses import resolve_loss_config
from speculators.models.attention import create_float_mask
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.train.optimizers import build_optimizers

from eyas.draft.loss import loss_config
from eyas.draft.model import Eagle3Drafter
from eyas.draft.rows import DraftBatch, plan_steps
from eyas.recipe import TrainPart
from eyas.train.optimizers import build_optimizer

RESULTS = Path(__file__).resolve().parent / "results"


SHAPES = {
    "kimi": Shape(7168, 18432, 64, 64, 128, 163840, 32000, 8192, 1024),
    "8b": Shape(4096, 12288, 32, 8, 128, 151936, 32000, 8192, 1024),
    "tiny": Shape(64, 96, 4, 2, 16, 512, 128, 256, 64),
}


def model_of(kind: type[Eagle3DraftModel], shape: Shape, device: torch.device) -> Eagle3DraftModel:
    implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
    model = build(kind, shape, config(shape, implementation, 50000.0), device)
    if isinstance(model, Eagle3Drafter) and device.type == "cuda":
        model.hold_frozen_in(torch.bfloat16)
    return model.train()


def make_batch(shape: Shape, share: float, steps: int, device: torch.device) -> DraftBatch:
    """Documents of shape.document / 2 to * 3 / 2 tokens; the last `share` of each is supervised."""
    generator = torch.Generator().manual_seed(0)
    n, lengths = shape.tokens, []
    while sum(lengths) < n:
        drawn = int(torch.randint(shape.document // 2, shape.document * 3 // 2, (1,), generator=generator))
        lengths.append(min(drawn, n - sum(lengths)))
    documents = torch.cat([torch.full((x,), i) for i, x in enumerate(lengths)])
    mask = torch.cat([torch.arange(x) >= round(x * (1 - share)) for x in lengths])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    states = torch.Generator(device).manual_seed(1)
    return DraftBatch(
        input_ids=torch.randint(0, shape.vocab, (1, n), generator=generator),
        label_ids=torch.randint(0, shape.vocab, (1, n), generator=generator),
        aux_states=torch.randn(1, n, 3 * shape.hidden, generator=states, dtype=dtype, device=device),
        last_states=torch.randn(1, n, shape.hidden, generator=states, dtype=dtype, device=device),
        document_ids=documents[None],
        position_ids=torch.cat([torch.arange(1, x + 1) for x in lengths])[None],
        label_mask=mask[None],
        plan=plan_steps(documents, mask, steps, nested=device.type == "cpu"),
        tokens=n,
    ).to(device)


def useful_flops(shape: Shape, batch: DraftBatch) -> float:
    """Matrix operations (forward and backward, 6 for each weight and row) of the cheapest exact method that we know.

    Attention's own products, under 3 % at these shapes, are not counted.
    """
    h, q = shape.hidden, shape.heads * shape.head_dim
    kv = 2 * shape.kv_heads * shape.head_dim
    needed = plan_steps(batch.document_ids[0].cpu(), batch.label_mask[0].cpu(), len(batch.plan.rows), nested=True)
    rows = sum(x.numel() for x in needed.rows)
    later = sum(x.numel() for x in needed.rows[1:])
    with_loss = float(batch.plan.counts.sum())
    per_row = h * q + q * h + 3 * h * shape.mlp
    # the embeddings' half of q, k and v once for each token, not at every step; nor it nor fc pass a gradient on
    ends = batch.tokens * (3 * h * h + h * kv) + needed.read.numel() * h * q
    head = with_loss * shape.draft_vocab * h * 4 + batch.supervised * shape.draft_vocab * h * 2  # frozen; teacher once
    return 6 * (rows * per_row + (batch.tokens + later) * h * kv) + 4 * ends + head


def ours(model: Eagle3Drafter, batch: DraftBatch, steps: int, device: torch.device) -> Callable[[], torch.Tensor]:
    losses = loss_config("kl_div", device)
    return lambda: model(batch, losses).loss


def theirs(model: Eagle3DraftModel, batch: DraftBatch, steps: int, device: torch.device) -> Callable[[], torch.Tensor]:
    if device.type == "cuda":
        import speculators.losses.fused as fused

        if not hasattr(fused.fused_kl_div_loss, "_torchdynamo_disable"):
            fused.fused_kl_div_loss = torch.compiler.disable(fused.fused_kl_div_loss)
    else:
        model._create_mask_fn = lambda *a, **k: create_float_mask(*a, dtype=torch.float32, **k)
    losses = resolve_loss_config("kl_div", "fused" if device.type == "cuda" else "eager")

    def forward() -> torch.Tensor:
        return model(
            hidden_states=batch.aux_states,
            input_ids=batch.input_ids,
            document_ids=batch.document_ids,
            loss_mask=batch.label_mask.clone(),
            position_ids=batch.position_ids,
            verifier_last_hidden_states=batch.last_states,
            ttt_steps=steps,
            loss_config=losses,
        )[1]

    return forward


def timed(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median ms of `repeats` runs after two that are not counted."""
    found = []
    for i in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 2:
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def matrix_peak(device: torch.device) -> float:
    """TFLOP/s of an 8192-cubed bf16 product (CPU: 512-cubed float32)."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / (timed(lambda: _product(a, b), device, 10) * 1e9)


def _product(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b)


def optimizers_of(side: str, model: Any) -> dict[str, list[torch.optim.Optimizer]]:
    """Each project's default and AdamW. speculators' command line defaults to Muon with AdamW for the rest."""
    if side == "eyas":
        return {"default": [build_optimizer(model, TrainPart())]}
    from speculators.train.trainer import TrainerConfig

    def built(kind: Any) -> list[torch.optim.Optimizer]:
        return build_optimizers(model, TrainerConfig(lr=1e-4, num_epochs=1, save_path="unused", optimizer=kind))

    return {"default": built("muon"), "adamw": built("adamw")}


def kernel_shares(work: Callable[[], None], device: torch.device, top: int = 24) -> dict[str, float]:
    """Kernel name (shortened) -> its share of the device's busy time in one run of `work`; largest first.

    Beside them busy_ms, and span_ms from the first kernel's start to the last one's end.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds if device.type == "cuda" else kinds[:1]) as profiler:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        if spent > 0 and (device.type == "cpu" or event.device_type == torch.autograd.DeviceType.CUDA):
            times[event.key[:100]] = times.get(event.key[:100], 0.0) + spent
    spans = [e.time_range for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    span = max((x.end for x in spans), default=0.0) - min((x.start for x in spans), default=0.0)
    busy = sum(times.values())
    largest = sorted(times.items(), key=lambda item: -item[1])[:top]
    return {"busy_ms": busy / 1e3, "span_ms": span / 1e3, **{name: spent / busy for name, spent in largest}}


def measure(
    side: str, shape: Shape, share: float, steps: int, device: torch.device, repeats: int, *, profiled: bool
) -> dict[str, Any]:
    kind, forward_of = (Eagle3Drafter, ours) if side == "eyas" else (Eagle3DraftModel, theirs)
    model: Any = model_of(kind, shape, device)
    batch = make_batch(shape, share, steps, device)
    forward = forward_of(model, batch, steps, device)
    trained = [p for p in model.parameters() if p.requires_grad]

    last: list[torch.Tensor] = []

    def forward_backward() -> None:
        for p in trained:
            p.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = forward()
        loss.backward()
        last[:] = [loss.detach()]

    started = time.perf_counter()
    forward_backward()
    found: dict[str, Any] = {"first_call_s": time.perf_counter() - started}
    if not repeats:
        return found
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found["fwd_bwd_ms"] = timed(forward_backward, device, repeats)
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    found["loss"] = float(last[0])
    found["grad_norm"] = float(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
    if profiled:
        found["profile"] = kernel_shares(forward_backward, device)
    for name, optimizers in optimizers_of(side, model).items():

        def whole_step(optimizers: list[torch.optim.Optimizer] = optimizers) -> None:
            forward_backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for o in optimizers:
                o.step()

        found[f"step_{name}_ms"] = timed(whole_step, device, repeats)
        for o in optimizers:
            o.state.clear()
    found.setdefault("step_adamw_ms", found["step_default_ms"])  # AdamW is eyas' default
    found["useful_tflop"] = useful_flops(shape, batch) / 1e12
    return found


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu{os.cpu_count()}"
    return torch.cuda.get_device_name(device).lower().removeprefix("nvidia ").split()[0]


def ratios(measured: dict[str, dict[str, Any]], peak: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for case in {key.split("/", 1)[1] for key in measured}:
        a, b = measured.get(f"eyas/{case}"), measured.get(f"speculators/{case}")
        if a is None or "error" in a:
            continue
        found[f"mfu/{case}"] = a["useful_tflop"] / (a["fwd_bwd_ms"] * 1e-3) / peak
        if b is None or "error" in b:
            continue
        found[f"fwd_bwd_speedup/{case}"] = b["fwd_bwd_ms"] / a["fwd_bwd_ms"]
        found[f"step_speedup/{case}"] = b["step_default_ms"] / a["step_default_ms"]
        found[f"step_speedup_adamw/{case}"] = b["step_adamw_ms"] / a["step_adamw_ms"]
        if "peak_gib" in a:
            found[f"peak_memory/{case}"] = a["peak_gib"] / b["peak_gib"]
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a toy shape on the CPU")
    parser.add_argument("--shapes", nargs="+", choices=["kimi", "8b"], default=["kimi", "8b"])
    parser.add_argument("--ttt", nargs="+", type=int, default=[3, 7])
    parser.add_argument("--supervised", nargs="+", type=int, default=[25, 50, 100], help="percent")
    parser.add_argument("--sides", nargs="+", choices=["eyas", "speculators"], default=["eyas", "speculators"])
    parser.add_argument("--profile", action="store_true", help="list eyas' kernels by share of time")
    parser.add_argument("--repeats", type=int, default=5, help="0: only compile, for a later run to find the kernels")
    parser.add_argument("--commit", help="what the results name where git does not know it")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda")
    shapes = ["tiny"] if args.tiny else args.shapes
    peak = matrix_peak(device)
    print(f"{machine(device)}, torch {torch.__version__}, matrix peak {peak:.1f} TFLOP/s", flush=True)
    measured: dict[str, dict[str, Any]] = {}
    for steps in args.ttt:
        for name in shapes:
            torch._dynamo.reset()  # each shape is compiled as in a run of its own; all shares use the same kernels
            for share in args.supervised:
                for side in args.sides:
                    case = f"{side}/{name}/ttt{steps}/sup{share}"
                    try:
                        profiled = args.profile and side == "eyas"
                        measured[case] = measure(
                            side, SHAPES[name], share / 100, steps, device, args.repeats, profiled=profiled
                        )
                    except (RuntimeError, torch.cuda.OutOfMemoryError) as e:
                        measured[case] = {"error": f"{type(e).__name__}: {str(e)[:300]}"}
                    release(device)
                    print(case, {k: _short(v) for k, v in measured[case].items() if k != "profile"}, flush=True)
                if args.repeats:
                    write(args.out, device, measured, peak, args.commit)
    for key, value in ratios(measured, peak).items() if args.repeats else ():
        print(f"{key:48s} {value:8.3f}")


def write(
    directory: Path, device: torch.device, measured: dict[str, dict[str, Any]], peak: float, given: str | None
) -> None:
    """The results so far, so that a run that is cut short leaves what it measured."""
    directory.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "benchmark": "train_step",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() if commit.returncode == 0 else given,
        "machine": machine(device),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
        "matrix_peak_tflops": peak,
        "measurements": measured,
        "ratios": ratios(measured, peak),
    }
    path = directory / f"train_step-{machine(device)}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
