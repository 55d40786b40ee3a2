"""A plan as tables for the terminal."""

import shlex
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.units import size

if TYPE_CHECKING:
    from eyas.report.plan import Plan


_BLOCKS = "▁▂▃▄▅▆▇█"


def print_plan(plan: "Plan", console: Console) -> None:
    console.print(_table("Target", _target_rows(plan)))
    console.print(_table("Engine", _engine_rows(plan)))
    if plan.engine.launch:  # not in the table, so that it can be copied
        variables = [f"{name}={value}" for name, value in plan.engine.environment.items()]
        console.print(Text(shlex.join(["env", *variables, *plan.engine.launch])), soft_wrap=True)
        console.print()
    console.print(_table("Data and hidden states", _data_rows(plan)))
    console.print(_table("Training", _training_rows(plan)))
    if plan.times:
        console.print(_times(plan))
    for note in plan.notes:
        console.print(Text(f"note: {note}"))
    for problem in plan.problems:
        console.print(Text("problem: ", style="bold red") + Text(problem.message))
        console.print(Text("    fix: ", style="bold") + Text(problem.fix))
    console.print(Text("plan: ok", style="bold green") if plan.ok else Text("plan: cannot work", style="bold red"))


def _target_rows(plan: "Plan") -> list[tuple[str, str]]:
    t = plan.target
    layers = f"{t.num_hidden_layers} layers, hidden {t.hidden_size:,}, MLP {t.intermediate_size:,}"
    experts = f", {t.experts} experts" if t.experts else ""
    window = f", sliding window {t.sliding_window:,}" if t.sliding_window else ""
    kind = f"{t.attention.upper()}, {t.num_attention_heads}/{t.num_key_value_heads} heads of {t.head_dim}{window}"
    scales = [f"x {t.logit_scale:g}"] if t.logit_scale != 1 else []
    scales += [f"soft cap {t.logit_softcap:g}"] if t.logit_softcap else []
    norm = ("1 + w " if t.norm_plus_one else "") + ("RMSNorm" if t.norm_kind == "rms" else "LayerNorm")
    rope = ", ".join(f"{k} {v}" for k, v in t.rope_parameters.items())
    same = "" if t.text_architecture == t.architecture else f" around {t.text_architecture}"
    quantized = "none" if t.quantized is None else f"{t.quantization}: {t.quantized.tensors:,} weights"
    if t.quantized is not None:
        quantized += "".join(f"\n{target}" for target in t.quantized.targets[:6])
    return [
        ("checkpoint", f"{t.path} ({size(t.weight_bytes)}, {t.dtype})"),
        ("architecture", t.architecture + same),
        ("sizes", layers + experts),
        ("attention", kind),
        ("positions", f"{t.max_position_embeddings:,}; {rope}"),
        ("vocabulary", f"{t.vocab_size:,} rows"),
        ("embedding", t.embedding.name),
        ("head", t.head.name + (" (tied)" if t.tied else "") + (f", logits {', '.join(scales)}" if scales else "")),
        ("final norm", f"{t.final_norm.name} ({norm}, eps {t.rms_norm_eps:g})"),
        ("quantization", quantized),
        ("stop tokens", ", ".join(map(str, t.eos_token_ids))),
        ("thinking", " ... ".join(t.thinking_tokens) if t.thinking_tokens else "none found"),
    ]


def _engine_rows(plan: "Plan") -> list[tuple[str, str]]:
    e = plan.engine
    said = {True: "yes", False: "no", None: "not known"}
    rows = [("engine", f"{e.kind} {e.version or ''}".strip())]
    if e.kind == "vllm":
        rows.append(("gives EAGLE-3 states", said[e.supports_eagle3]))
    if (m := e.capture_memory) is not None:
        device = f"{size(m.device)} on each GPU, {size(m.host)} pinned" if m.device else size(m.host)
        rows.append(
            (
                "capture memory",
                f"{device} (steps of {m.step_tokens:,} tokens); rows in flight: {size(m.in_flight)} at most"
                + ("" if m.counted_for is None else f"; counted for {m.counted_for}"),
            )
        )
    return rows


def _data_rows(plan: "Plan") -> list[tuple[str, str]]:
    s, d = plan.states, plan.data
    rows = [] if d is None else [
        ("conversations", f"{d.conversations:,}, {d.samples:,} samples"),
        ("tokens", f"{d.tokens:,}, of them {d.answer_tokens:,} supervised"),
        ("from", d.source),
        *([("shapes", _counts(d.shapes))] if d.shapes else []),
        *([("rows left out", _counts(d.dropped))] if d.dropped else []),
        ("prompt tokens", length_line(d.prompt_lengths)),
        ("answer tokens", length_line(d.answer_lengths)),
        ("supervised share", histogram_line(d.supervised_shares)),
    ]  # fmt: skip
    rows.append(("bytes a token", f"{s.bytes_per_token_bf16:,} (bf16), {s.bytes_per_token_fp8:,} (fp8)"))
    if s.total_bytes_bf16 is not None and s.total_bytes_fp8 is not None and s.disk_bytes is not None:
        rows.append(("all states", f"{size(s.total_bytes_bf16)} (bf16), {size(s.total_bytes_fp8)} (fp8)"))
        rows.append(("on disk at once", f"{size(s.disk_bytes)}; {size(plan.machine.disk_free)} free"))
    return rows


def _training_rows(plan: "Plan") -> list[tuple[str, str]]:
    d, m = plan.drafter, plan.training
    have = (
        f"one GPU has {size(plan.machine.gpus[0].memory)}"
        if plan.machine.gpus
        else f"memory {size(plan.machine.memory)}"
    )
    parts = {
        "weights": m.weights, "gradients": m.gradients, "moments": m.moments, "activations": m.activations,
        "logits": m.logits,
    }  # fmt: skip
    return [
        (
            "drafter",
            f"{d.trainable / 1e6:,.1f} M trained, {d.frozen / 1e6:,.1f} M frozen; layers read: {list(d.aux_layers)}",
        ),
        ("layer", f"{d.layers} x {d.heads}/{d.key_value_heads} heads of {d.head_dim}, MLP {d.intermediate_size:,}"),
        ("memory", f"{size(m.total)} at most: " + ", ".join(f"{k} {size(v)}" for k, v in parts.items()) + f"; {have}"),
        (
            "checkpoints",
            f"{size(plan.checkpoint)} each, {size(plan.checkpoints)} at most with the final weights and exports",
        ),
    ]


def _times(plan: "Plan") -> Table:
    table = Table(title=f"Time on {plan.machine.name}", title_justify="left")
    for name in ("stage", "time", "rate", "source"):
        table.add_column(name, justify="right" if name == "time" else "left")
    for t in plan.times:
        table.add_row(t.stage, duration(t.seconds), t.rate, t.source)
    table.add_row("all", duration(sum(t.seconds for t in plan.times)), "", "")
    return table


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.0f} s"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items(), key=lambda item: -item[1]))


def length_line(lengths: dict[str, Any]) -> str:
    """Quantiles and histogram of eyas.data.lengths in one line."""
    quantiles = ", ".join(f"{name} {lengths[name]:,}" for name in ("median", "p95", "max"))
    return f"{quantiles}   {histogram_line(lengths['histogram'])}"


def histogram_line(histogram: dict[str, int]) -> str:
    """One block for each bin from the first to the last that is not empty, between their upper bounds."""
    names = [name for name, n in histogram.items() if n]
    if not names:
        return "none"
    bins = list(histogram)
    shown = bins[bins.index(names[0]) : bins.index(names[-1]) + 1]
    most = max(histogram.values())
    blocks = "".join(" " if not histogram[b] else _BLOCKS[(histogram[b] * len(_BLOCKS) - 1) // most] for b in shown)
    return f"up to {shown[0]} |{blocks}| up to {shown[-1]}"
