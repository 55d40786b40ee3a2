"""The report, from run directories in several states."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eyas.files import write_json
from eyas.recipe import Recipe
from eyas.report.html import value_text, write_report
from eyas.report.plan_tables import histogram_line, length_line
from eyas.report.plots import curves
from eyas.rundir import Proof, RunDir, StageRecord

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Checker(HTMLParser):
    """Every element is closed in order; collects text and references."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.sources += [v or "" for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check(path: Path) -> Checker:
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    parsed = Checker()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    assert all(s.startswith("data:image/") for s in parsed.sources)
    assert "<script" not in page
    assert "http://" not in page
    assert "https://" not in page
    return parsed


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe.model_validate(
        {"run_dir": str(tmp_path), "target": {"path": "/m/<b>Tiny</b> & co"}, "data": {"prompts": ["p.jsonl"]}}
    )


def test_an_empty_run(tmp_path: Path, recipe: Recipe) -> None:
    text = check(write_report(RunDir(tmp_path), recipe)).text
    assert "nothing is verified yet" in text
    assert text.count("not run") == 6


def verified(**changes: Any) -> dict[str, Any]:
    group = {
        "prompts": 48,
        "acceptance_length": 2.934,
        "acceptance_rate_per_position": [0.8, 0.65, 0.48],
        "drafts": 1234,
        "tokens_per_s": 98.7,
        "baseline_tokens_per_s": 106.2,
        "predicted_acceptance_length": 2.921,
        "predicted_acceptance_rate_per_position": [0.8, 0.64, 0.48],
        "predicted_drafts": 1234,
    }
    return {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "mode": "served",
        "num_speculative_tokens": 3,
        "lossless": True,
        "comparison": {"compared": 64, "equal": 64, "ties": 0, "tie_gap": 0.001, "noise": 0.0, "differences": []},
        "baseline_source": "the harvest",
        "seen": group,
        "held_out": {**group, "acceptance_length": 1.402},
        **changes,
    }


def test_a_whole_run(tmp_path: Path, recipe: Recipe) -> None:
    run = RunDir(tmp_path)
    for name in ("prepare", "harvest", "vocab", "train", "export", "verify"):
        counts = {"samples": 12345, "coverage": 0.98765, "note": "<script>alert(1)</script>"}
        run.write_record(name, StageRecord("ab" * 8, "done", 12.5, "2026-11-29", counts, {"torch": "2.13.0"}))
    run.write_proofs([Proof("states", True, "2e-5", "<= 1e-3"), Proof("served", False, "0.2 apart", "<= 0.05")])
    write_json(run.verify_json, verified())
    run.train.mkdir()
    measured = {"mean_length": 1.5, "conditional_0": 0.4, "conditional_1": 0.2}
    entries = [{"kind": "step", "step": i, "loss": 5 / (i + 1), "lr": 1e-4, **measured} for i in range(9)]
    entries += [{"kind": "eval", "step": 8, "loss": 2.5, **measured}]
    (run.train / "log.jsonl").write_text("\n".join(json.dumps(e) for e in entries) + '\n{"step": 9, "lo')
    write_json(
        run.drafter / "vllm" / "config.json",
        {
            "hidden_size": 576,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        },
    )
    parsed = check(write_report(run, recipe))
    for word in ("2.93", "1.40", "64 of 64", "1 of 2 ok", "1 failed", "12,345", "0.9877", "2, 15, 27", "2.13.0"):
        assert word in parsed.text, word
    assert "<script>alert(1)</script>" in parsed.text  # as text, not as an element
    assert "<b>Tiny</b> & co" in parsed.text
    assert "vllm serve" in parsed.text
    assert len(parsed.sources) == 4
    assert "failed" in parsed.text


def test_lengths_and_supervised_shares(tmp_path: Path, recipe: Recipe) -> None:
    run = RunDir(tmp_path)
    lengths = {"min": 3, "median": 21, "p95": 60, "max": 77, "histogram": {"16": 2, "32": 0, "64": 5, "128": 1}}
    run.write_record("prepare", StageRecord("ab" * 8, "done", counts={"lengths": lengths, "supervised_shares": None}))
    parsed = check(write_report(run, recipe))
    assert "prepared: median 21, 95 % up to 60, longest 77" in parsed.text
    assert len(parsed.sources) == 1
    shares = {f"{10 * i}%": i for i in range(1, 11)}
    counts = {"prompt_lengths": lengths, "answer_lengths": lengths, "supervised_shares": shares}
    run.write_record("harvest", StageRecord("ab" * 8, "done", counts=counts))
    parsed = check(write_report(run, recipe))
    assert "answers: median 21" in parsed.text
    assert len(parsed.sources) == 2


def test_a_replay_is_marked(tmp_path: Path, recipe: Recipe) -> None:
    run = RunDir(tmp_path)
    only = {"acceptance_length": None, "acceptance_rate_per_position": None, "drafts": None, "tokens_per_s": None}
    seen = {**verified()["seen"], **only}
    changes = {"mode": "replay", "lossless": None, "why": "the hf engine serves no drafter", "held_out": None}
    write_json(run.verify_json, verified(seen=seen, **changes))
    text = check(write_report(run, recipe)).text
    assert "predicted, not served" in text
    assert "not tested" in text


def test_log_entries_are_sorted_by_kind() -> None:
    found = curves(
        [
            {"kind": "step", "step": 1, "loss": 2.0, "mean_length": 1.5, "conditional_0": 0.5, "lr": 1.0},
            {"kind": "eval", "step": 1, "loss": 3.0, "mean_length": float("nan")},
            {"loss": 1},
        ]
    )
    assert found.loss == {"train, loss": [(1, 2.0)], "held out, loss": [(1, 3.0)]}
    assert found.length == {"train, acceptance length": [(1, 1.5)]}
    assert found.conditional == {"train, draft token 1": [(1, 0.5)]}


def test_value_text() -> None:
    assert [value_text(v) for v in (None, True, 12345, 0.123456, 12345.6, [1, 2.5], {})] == [
        "-",
        "yes",
        "12,345",
        "0.1235",
        "12,346",
        "1, 2.5",
        "none",
    ]


def test_histograms_in_one_line() -> None:
    lengths = {"min": 3, "median": 21, "p95": 1060, "max": 1077, "histogram": {"16": 2, "32": 0, "64": 8, "128": 1}}
    assert length_line(lengths) == "median 21, p95 1,060, max 1,077   up to 16 |▂ █▁| up to 128"
    assert histogram_line({"10%": 0, "20%": 3, "30%": 0}) == "up to 20% |█| up to 20%"
    assert histogram_line({"10%": 0}) == "none"
