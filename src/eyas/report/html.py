"""report.html: one self-contained page about a run, from whatever its stages have left so far."""

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from eyas.files import read_json, write_text
from eyas.recipe import Recipe, dump_recipe
from eyas.report.plots import bars, curves, histogram, lines
from eyas.rundir import RunDir, StageRecord

STAGES = ("prepare", "harvest", "vocab", "train", "export", "verify")
GROUPS = {"seen": "seen in training", "held_out": "held out"}


def write_report(run: RunDir, recipe: Recipe) -> Path:
    """Writes run.report_html and returns it. Missing stages are named as such; nothing is loaded from a network."""
    environment = Environment(
        loader=PackageLoader("eyas.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["value"] = value_text
    page = environment.get_template("page.html").render(_content(run, recipe))
    write_text(run.report_html, page)
    return run.report_html


def value_text(value: Any) -> str:
    """A cell's text: numbers with separators, at most four significant decimals, words for yes, no and nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list | tuple | dict) and not value:
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(value_text(v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k}: {value_text(v)}" for k, v in value.items())
    return str(value)


def _content(run: RunDir, recipe: Recipe) -> dict[str, Any]:
    records = run.records()
    verified = _read(run.verify_json)
    proofs = run.proofs()
    drawn = curves(_log(run.train / "log.jsonl"))
    config = _read(run.drafter / "vllm" / "config.json")
    return {
        "title": f"EAGLE-3 drafter for {Path(recipe.target.path).name}",
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "run_dir": str(run.root),
        "tiles": _tiles(recipe, verified, [p.ok for p in proofs]),
        "target": _target(run, recipe, config),
        "stages": [_stage(name, records.get(name)) for name in STAGES],
        "details": [(n, _cells(records[n].counts)) for n in STAGES if n in records and records[n].counts],
        "verified": _verified(verified),
        "groups": _group_rows(verified),
        "proofs": proofs,
        "figures": [
            figure
            for figure in (
                _figure("Loss", lines(drawn.loss, x="optimizer step", y="loss")),
                _figure(
                    "Acceptance length while training",
                    lines(drawn.length, x="optimizer step", y="tokens"),
                    "Bonus token included, mean over all supervised positions. A served drafter starts only where its "
                    "last draft ended and gets a little less.",
                ),
                _figure(
                    "Conditional acceptance while training",
                    lines(drawn.conditional, x="optimizer step", y="share accepted", share=True),
                    "Share of right draft tokens among those whose earlier tokens were all right.",
                ),
                _figure(
                    "Acceptance by draft position",
                    _acceptance_bars(verified),
                    "Drafts that accepted at least so many tokens, as a share of all drafts (vLLM's counters are sums "
                    "over drafts).",
                ),
                *_length_figures(records),
            )
            if figure is not None
        ],
        "exported": _exported(run),
        "config": None if config is None else json.dumps(config, indent=2),
        "versions": sorted({item for r in records.values() for item in r.versions.items()}),
        "commands": _commands(run, recipe, verified),
        "recipe": dump_recipe(recipe),
    }


def _tiles(recipe: Recipe, verified: dict[str, Any] | None, proofs: list[bool]) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the headline."""
    tiles: list[tuple[str, str, str]] = []
    if verified is not None:
        longest = verified["num_speculative_tokens"] + 1
        for group, name in GROUPS.items():
            found = verified.get(group)
            if found is None:
                continue
            served = found["acceptance_length"]
            length = found["predicted_acceptance_length"] if served is None else served
            how = "predicted, not served" if served is None else f"of {longest}, served, bonus token included"
            tiles.append((f"Acceptance length, {name}", f"{length:.2f}", how))
        lossless = verified["lossless"]
        if lossless is None:
            tiles.append(("Output unchanged", "not tested", verified.get("why", "")))
        else:
            comparison = verified["comparison"]
            equal = f"{comparison['equal']} of {comparison['compared']} answers equal token for token"
            tiles.append(("Output unchanged", "yes" if lossless else "no", equal))
    if proofs:
        failed = proofs.count(False)
        tiles.append(
            ("Proofs", f"{proofs.count(True)} of {len(proofs)} ok", f"{failed} failed" if failed else "none failed")
        )
    if not tiles:
        tiles.append(("Target", Path(recipe.target.path).name, "nothing is verified yet"))
    return tiles


def _target(run: RunDir, recipe: Recipe, config: dict[str, Any] | None) -> list[tuple[str, str]]:
    owner = run.owner()
    rows = [("path", recipe.target.path), ("fingerprint", value_text(None if owner is None else owner.fingerprint))]
    if config is not None:
        for key in ("hidden_size", "vocab_size", "max_position_embeddings"):
            rows.append((key.replace("_", " "), value_text(config[key])))
        rows.append(("layers that the drafter reads", value_text(config["eagle_aux_hidden_state_layer_ids"])))
    return rows


def _stage(name: str, record: StageRecord | None) -> dict[str, str]:
    if record is None:
        return {"name": name, "status": "not run", "seconds": "-", "finished": "-", "fingerprint": "-"}
    return {
        "name": name,
        "status": record.status,
        "seconds": f"{record.seconds:,.1f} s",
        "finished": record.finished or "-",
        "fingerprint": record.fingerprint,
    }


def _cells(counts: dict[str, Any]) -> list[tuple[str, str]]:
    return [(k.replace("_", " "), value_text(v)) for k, v in counts.items()]


def _verified(verified: dict[str, Any] | None) -> list[tuple[str, str]]:
    if verified is None:
        return []
    keys = (
        "engine",
        "engine_version",
        "mode",
        "why",
        "num_speculative_tokens",
        "lossless",
        "identical",
        "reference",
        "baseline_source",
        "baseline_doubt",
    )
    rows = [(k.replace("_", " "), value_text(verified[k])) for k in keys if verified.get(k) is not None]
    differences = (verified.get("comparison") or {}).get("differences") or []
    return [*rows, *(("difference", value_text(d)) for d in differences)]


def _group_rows(verified: dict[str, Any] | None) -> list[tuple[str, list[str]]]:
    """One row for each quantity, one cell for each group."""
    if verified is None:
        return []
    found = [verified.get(g) or {} for g in GROUPS]
    quantities = {
        "prompts": "prompts",
        "acceptance_length": "acceptance length, served (bonus token included)",
        "predicted_acceptance_length": "acceptance length, predicted",
        "acceptance_rate_per_position": "accepted at position 1, 2, ... / drafts",
        "drafts": "drafts",
        "predicted_drafts": "drafts, predicted",
        "accepted_tokens": "accepted tokens",
        "timed_prompts": "timed prompts, asked at once",
        "tokens_per_s": "their tokens/s with the drafter",
        "baseline_tokens_per_s": "their tokens/s without",
    }
    rows = [(label, [value_text(g.get(key)) for g in found]) for key, label in quantities.items()]
    return [(label, cells) for label, cells in rows if any(c != "-" for c in cells)]


def _acceptance_bars(verified: dict[str, Any] | None) -> str | None:
    if verified is None:
        return None
    groups: dict[str, list[float]] = {}
    for group, name in GROUPS.items():
        found = verified.get(group) or {}
        groups[f"{name}, served"] = found.get("acceptance_rate_per_position") or []
        groups[f"{name}, predicted"] = found.get("predicted_acceptance_rate_per_position") or []
    count = verified["num_speculative_tokens"]
    return bars(groups, labels=[f"token {i + 1}" for i in range(count)], y="share of drafts")


def _length_figures(records: dict[str, StageRecord]) -> list[dict[str, str] | None]:
    """Lengths and supervised shares, harvested; before a harvest, prepared."""
    counts = {name: records[name].counts for name in ("prepare", "harvest") if name in records}
    harvested, prepared = counts.get("harvest", {}), counts.get("prepare", {})
    if "prompt_lengths" in harvested:
        lengths = {"prompts": harvested["prompt_lengths"], "answers": harvested["answer_lengths"]}
    else:
        lengths = {"prepared": prepared["lengths"]} if "lengths" in prepared else {}
    shares = harvested.get("supervised_shares") or prepared.get("supervised_shares") or {}
    told = "; ".join(
        f"{k}: median {v['median']:,}, 95 % up to {v['p95']:,}, longest {v['max']:,}" for k, v in lengths.items()
    )
    return [
        _figure("Lengths", histogram({k: v["histogram"] for k, v in lengths.items()}, x="tokens, at most"), told),
        _figure(
            "Supervised share",
            histogram({"samples": shares}, x="supervised share of the tokens, at most"),
            "Training cost follows the supervised tokens.",
        ),
    ]


def _figure(title: str, uri: str | None, remark: str = "") -> dict[str, str] | None:
    return None if uri is None else {"title": title, "uri": uri, "remark": remark}


def _exported(run: RunDir) -> list[tuple[str, str]]:
    if not run.drafter.is_dir():
        return []
    files = sorted(p for p in run.drafter.rglob("*") if p.is_file())
    return [(str(p.relative_to(run.root)), f"{p.stat().st_size:,} bytes") for p in files]


def _commands(run: RunDir, recipe: Recipe, verified: dict[str, Any] | None) -> list[tuple[str, str]]:
    tokens = recipe.verify.speculative_tokens if verified is None else verified["num_speculative_tokens"]
    speculative = {"method": "eagle3", "model": str(run.drafter / "vllm"), "num_speculative_tokens": tokens}
    serve = ["vllm", "serve", recipe.target.path, "--speculative-config", json.dumps(speculative)]
    commands = [("make this run again", f"eyas run {shlex.quote(str(run.recipe))}")]
    if (run.drafter / "vllm").is_dir():
        commands.append(("serve the target with this drafter", shlex.join(serve)))
    return commands


def _log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log that may still be written to."""
    entries: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_bytes().splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
                entries.append(entry)
    return entries


def _read(path: Path) -> dict[str, Any] | None:
    return dict(read_json(path)) if path.is_file() else None
