"""The report's plots, as SVG data URIs: training curves, acceptance by position, lengths of samples."""

import base64
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
Series = dict[str, list[tuple[float, float]]]
COLORS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")


def lines(series: Series, *, x: str, y: str, share: bool = False) -> str | None:
    """One line for each series ("train, what" or "held out, what") of (x, y); None when there is nothing to draw."""
    drawn = {name: points for name, points in series.items() if points}
    if not drawn:
        return None
    figure, axes = _axes(x, y)
    kinds = list(dict.fromkeys(_kind(name) for name in drawn))
    for name, points in drawn.items():
        held_out = name.startswith("held out")
        axes.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            color=COLORS[kinds.index(_kind(name)) % len(COLORS)],
            linewidth=1.8,
            linestyle="--" if held_out else "-",
            marker="o" if len(points) < 40 else None,
            markersize=3.5,
            label=name,
        )
    if share:
        _as_share(axes)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return _data_uri(figure)


def bars(groups: dict[str, list[float]], *, labels: list[str], y: str) -> str | None:
    """Bars of shares, one cluster for each label; `groups`: "whose, served" is filled, "whose, predicted" hatched."""
    drawn = {name: values for name, values in groups.items() if values}
    if not drawn:
        return None
    figure, axes = _axes("", y)
    width = 0.8 / len(drawn)
    owners = list(dict.fromkeys(name.rpartition(", ")[0] for name in drawn))
    for i, (name, values) in enumerate(drawn.items()):
        at = [j + (i - (len(drawn) - 1) / 2) * width for j in range(len(values))]
        predicted = "predicted" in name
        color = COLORS[owners.index(name.rpartition(", ")[0]) % len(COLORS)]
        rects = axes.bar(
            at,
            values,
            width * 0.9,
            label=name,
            color="white" if predicted else color,
            edgecolor=color,
            hatch="///" if predicted else None,
        )
        axes.bar_label(rects, [f"{v:.0%}" for v in values], fontsize=8, color=INK, padding=2)
    axes.set_xticks(range(len(labels)), labels)
    _as_share(axes)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return _data_uri(figure)


def histogram(series: dict[str, dict[str, int]], *, x: str, y: str = "samples") -> str | None:
    """Bars of counts over the same bins for each series {bin: count}."""
    drawn = {name: counts for name, counts in series.items() if any(counts.values())}
    if not drawn:
        return None
    bins = sorted({b for counts in drawn.values() for b in counts}, key=lambda b: float(b.rstrip("%")))
    figure, axes = _axes(x, y)
    width = 0.8 / len(drawn)
    for i, (name, counts) in enumerate(drawn.items()):
        at = [j + (i - (len(drawn) - 1) / 2) * width for j in range(len(bins))]
        rects = axes.bar(at, [counts.get(b, 0) for b in bins], width * 0.9, label=name, color=COLORS[i % len(COLORS)])
        axes.bar_label(rects, [f"{n:,}" if (n := counts.get(b, 0)) else "" for b in bins], fontsize=7, color=INK)
    axes.set_xticks(range(len(bins)), [b if "%" in b else f"{int(b):,}" for b in bins])
    if len(drawn) > 1:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return _data_uri(figure)


@dataclass
class Curves:
    """Series of train/log.jsonl, each of (step, value); a series is called "train, what" or "held out, what"."""

    loss: Series = field(default_factory=dict)
    length: Series = field(default_factory=dict)
    """mean acceptance length over all supervised positions"""
    conditional: Series = field(default_factory=dict)
    """share of right tokens of one TTT step among those whose earlier steps were all right"""


def curves(log: Iterable[dict[str, Any]]) -> Curves:
    """Sorts the entries of train/log.jsonl ("kind": "step" or "eval"); what has no curve is left out."""
    found = Curves()
    for entry in log:
        step = entry.get("step")
        if not isinstance(step, int | float):
            continue
        where = "held out" if entry.get("kind") == "eval" else "train"
        for key, value in entry.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if key == "loss":
                found.loss.setdefault(f"{where}, loss", []).append((step, value))
            elif key == "mean_length":
                found.length.setdefault(f"{where}, acceptance length", []).append((step, value))
            elif key.startswith("conditional_"):
                name = f"{where}, draft token {int(key.removeprefix('conditional_')) + 1}"
                found.conditional.setdefault(name, []).append((step, value))
    return found


def _kind(name: str) -> str:
    """What a series is about, whether of training or held out: both have one colour, the second is dashed."""
    return name.partition(", ")[2]


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x, color=MUTED, fontsize=9)
    axes.set_ylabel(y, color=MUTED, fontsize=9)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    return figure, axes


def _as_share(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1.05)


def _data_uri(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode("ascii")
