"""Verification in the real engine: output unchanged, acceptance served as predicted, numbers in verify.json."""

import shutil
from dataclasses import asdict
from typing import Any

import torch

from eyas.engine.spec_counters import SpecCounters
from eyas.engine.vllm_server import installed_vllm
from eyas.errors import InputError, ProofError
from eyas.export.reference import ReferenceDrafter
from eyas.files import read_json, write_json
from eyas.progress import Progress
from eyas.prove.acceptance import Acceptance, predict_acceptance
from eyas.prove.answers import Answer, chosen, harvest_is_greedy, harvested
from eyas.prove.lossless import Losslessness, compare
from eyas.prove.rates import Rate, read_baseline, to_time
from eyas.prove.served import Served, answer_greedily, serve
from eyas.recipe import Recipe
from eyas.rundir import Proof, RunDir
from eyas.states.store import HarvestStore
from eyas.target.info import TargetInfo
from eyas.target.teacher import Teacher
from eyas.target.weights import load_embedding

GROUPS = ("seen", "held_out")
PROOF = "verify: "
"""begins the name of every proof of this stage"""
SPEED_MARGIN = 1.15
"""by which the drafter's speed may seem higher than its acceptance length allows"""


def verify(recipe: Recipe, target: TargetInfo, run: RunDir, progress: Progress) -> dict[str, Any]:
    """Serves the exported drafter and writes verify.json and its proofs; returns counts.

    With an engine that eyas cannot start with a drafter (`hf`, or servers given by URL) acceptance is only predicted,
    and verify.json says so (`mode: replay`, `lossless: null`). Raises ProofError after everything was written.
    """
    _forget_proofs(run)
    store = HarvestStore(run)
    layers = _checked_layers(store, target, run)
    rates = _rates(recipe, run, store)
    timed = {
        name: rates[name].ids if name in rates else [ref.id for ref in refs]
        for name, refs in to_time(store, recipe).items()
    }
    picked = chosen(store, recipe.verify.prompts, timed)
    groups = {name: harvested(store, refs, target) for name, refs in picked.items()}
    if not groups["seen"]:
        raise InputError("no harvested answer to verify with", fix="run `eyas harvest RECIPE` first")
    if recipe.engine.kind == "hf" or recipe.engine.urls:
        return _replay(recipe, target, run, _sparing(groups, recipe), progress)

    fresh_states = run.root / "verify-states"
    try:
        if not harvest_is_greedy(recipe):
            groups, rates = answer_greedily(recipe, target, run, layers, groups, timed, fresh_states, progress)
        groups = _sparing(groups, recipe)
        served = serve(recipe, target, run, groups, timed, progress)
        lossless = compare(
            [a for name in served for a in groups[name]],
            {i: ids for s in served.values() for i, ids in s.outputs.items()},
            {i: logprobs for s in served.values() for i, logprobs in s.logprobs.items()},
            _TeacherOnDemand(target).logits,
            recipe.engine.dtype,
        )
        predicted = _predicted(recipe, target, run, groups, progress)
    finally:
        shutil.rmtree(fresh_states, ignore_errors=True)

    report: dict[str, Any] = {
        "engine": recipe.engine.kind,
        "engine_version": installed_vllm(recipe.engine.python).version,
        "mode": "served",
        "num_speculative_tokens": recipe.verify.speculative_tokens,
        "lossless": lossless.lossless,
        "identical": lossless.identical,
        "comparison": lossless.record(),
        "reference": "the harvest" if harvest_is_greedy(recipe) else "a greedy pass without drafter",
        "baseline_source": _baseline_source(recipe, rates),
        "baseline_doubt": _doubt(rates, served),
    }
    if report["baseline_doubt"]:
        progress.say(
            f"verify: the rates with and without the drafter are not to be compared: {report['baseline_doubt']}"
        )
    for name in GROUPS:
        report[name] = _group(served.get(name), predicted.get(name), len(groups[name]), rates.get(name))
    proofs = _proofs(recipe, lossless, served, predicted)
    write_json(run.verify_json, report)
    run.write_proofs(proofs)
    if failed := [p for p in proofs if not p.ok]:
        raise ProofError(
            "\n".join(f"{p.name}: found {p.found}; expected {p.expected}" for p in failed),
            fix=f"the drafter must not be used; {run.verify_json} has the numbers, {run.logs} the engine's log",
        )
    return {
        "lossless": "yes" if lossless.identical else f"yes, {lossless.ties} ties",
        **{f"acceptance_{n}": f"{report[n]['acceptance_length']:.2f}" for n in GROUPS if report[n] is not None},
    }


def _sparing(groups: dict[str, list[Answer]], recipe: Recipe) -> dict[str, list[Answer]]:
    return {name: [a.sparing(recipe.verify.speculative_tokens) for a in answers] for name, answers in groups.items()}


class _TeacherOnDemand:
    """The target's head, loaded once a difference asks for it."""

    def __init__(self, target: TargetInfo) -> None:
        self._target = target
        self._teacher: Teacher | None = None

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        self._teacher = self._teacher or Teacher(self._target)
        return self._teacher.logits(states)


def _replay(
    recipe: Recipe, target: TargetInfo, run: RunDir, groups: dict[str, list[Answer]], progress: Progress
) -> dict[str, Any]:
    predicted = _predicted(recipe, target, run, groups, progress)
    why = "the hf engine serves no drafter" if recipe.engine.kind == "hf" else "the servers of engine.urls are not ours"
    report: dict[str, Any] = {
        "engine": recipe.engine.kind,
        "mode": "replay",
        "why": why,
        "num_speculative_tokens": recipe.verify.speculative_tokens,
        "lossless": None,
        "baseline_source": None,
        "baseline_doubt": None,
    }
    for name in GROUPS:
        report[name] = _group(None, predicted.get(name), len(groups[name]), None)
    write_json(run.verify_json, report)
    progress.say(f"verify: predicted only ({why}); nothing was served")
    return {
        "mode": "replay",
        **{
            f"predicted_acceptance_{n}": f"{report[n]['predicted_acceptance_length']:.2f}"
            for n in GROUPS
            if report[n] is not None
        },
    }


def _predicted(
    recipe: Recipe, target: TargetInfo, run: RunDir, groups: dict[str, list[Answer]], progress: Progress
) -> dict[str, Acceptance]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drafter = ReferenceDrafter(run.drafter / "vllm", load_embedding(target).to(device))
    found: dict[str, Acceptance] = {}
    total = sum(len(a) for a in groups.values())
    with progress.task("predicted acceptance", total=total, unit="answers") as task:
        for name, answers in groups.items():

            def sequences(of: list[Answer] = answers) -> Any:
                for answer in of:
                    yield answer.sequence()
                    task.advance(1)

            if answers:
                found[name] = predict_acceptance(drafter, sequences(), recipe.verify.speculative_tokens)
    return found


def _group(
    served: Served | None, predicted: Acceptance | None, prompts: int, without: Rate | None
) -> dict[str, Any] | None:
    """One group's entry in verify.json; None when there was nothing to measure."""
    if predicted is None:
        return None
    entry: dict[str, Any] = {
        "prompts": prompts,
        "acceptance_length": None,
        "acceptance_rate_per_position": None,
        "drafts": None,
        "tokens_per_s": None,
        "baseline_tokens_per_s": None,
        "predicted_acceptance_length": predicted.acceptance_length,
        "predicted_acceptance_rate_per_position": predicted.rate_per_position,
        "predicted_drafts": predicted.drafts,
    }
    if served is not None:
        c = served.counters
        entry |= {
            "acceptance_length": _length(c),
            "acceptance_rate_per_position": [a / c.drafts if c.drafts else 0.0 for a in c.accepted_per_position],
            "drafts": c.drafts,
            "draft_tokens": c.draft_tokens,
            "accepted_tokens": c.accepted_tokens,
            "output_tokens": served.tokens,
            "timed_prompts": len(served.rate.ids),
            "tokens_per_s": served.rate.tokens_per_s,
            "baseline_tokens_per_s": None if without is None else without.tokens_per_s,
        }
    return entry


def _length(c: SpecCounters) -> float:
    """Bonus token included: 1 + accepted / drafts."""
    return 1.0 + c.accepted_tokens / c.drafts if c.drafts else 1.0


def _proofs(
    recipe: Recipe, lossless: Losslessness, served: dict[str, Served], predicted: dict[str, Acceptance]
) -> list[Proof]:
    drafts = sum(s.counters.drafts for s in served.values())
    proofs = [
        Proof(
            PROOF + "output unchanged by the drafter",
            lossless.lossless,
            lossless.sentence(),
            "all equal, or parting first where the target's two tokens are closer than its own rounding",
        ),
        Proof(PROOF + "the drafter drafts", drafts > 0, f"{drafts} drafts", "more than 0"),
    ]
    for name, s in served.items():
        length = _length(s.counters)
        gap = abs(length - predicted[name].acceptance_length)
        proofs.append(
            Proof(
                f"{PROOF}served acceptance as predicted, {name.replace('_', ' ')}",
                gap <= recipe.verify.tolerance,
                f"served {length:.3f} in {s.counters.drafts} drafts, predicted "
                f"{predicted[name].acceptance_length:.3f} in {predicted[name].drafts}",
                f"at most {recipe.verify.tolerance} apart",
            )
        )
    return proofs


def _forget_proofs(run: RunDir) -> None:
    """What an earlier verification proved says nothing about this drafter."""
    if run.proofs_json.exists():
        kept = [asdict(p) for p in run.proofs() if not p.name.startswith(PROOF)]
        write_json(run.proofs_json, kept)


def _checked_layers(store: HarvestStore, target: TargetInfo, run: RunDir) -> list[int]:
    """The harvest's layers, which must be those that the exported drafter reads, and the last one."""
    config = run.drafter / "vllm" / "config.json"
    if not config.is_file():
        raise InputError(f"no exported drafter: {config} is missing", fix="run `eyas export RECIPE` first")
    wanted = [*read_json(config)["eagle_aux_hidden_state_layer_ids"], target.num_hidden_layers]
    if (found := store.layers()) != wanted:
        raise ProofError(
            f"the harvest holds the states of layers {found}, the drafter reads {wanted[:-1]} and {wanted[-1]} is last",
            fix="harvest again, or set draft.aux_layers back to what was harvested",
        )
    return found


def _rates(recipe: Recipe, run: RunDir, store: HarvestStore) -> dict[str, Rate]:
    """Without a drafter, as the harvest measured them; of prompts that are all still there."""
    if not harvest_is_greedy(recipe):
        return {}
    rates = read_baseline(recipe, run)
    found = chosen(store, 0, {name: rate.ids for name, rate in rates.items()})
    return {name: rate for name, rate in rates.items() if len(found[name]) == len(rate.ids)}


def _doubt(rates: dict[str, Rate], served: dict[str, Served]) -> str | None:
    """What speaks against comparing rates that were measured at different times.

    A step with the drafter takes no less time than one without, and gives as many tokens as were counted.
    """
    doubts = []
    for name, rate in rates.items():
        times, most = served[name].rate.tokens_per_s / rate.tokens_per_s, _length(served[name].timed)
        if times > most * SPEED_MARGIN:
            doubts.append(
                f"{name}: {times:.1f} times as fast as without, at {most:.2f} tokens a step, cannot be: the machine "
                "was busy with something else in one of the two"
            )
    return "; ".join(doubts) or None


def _baseline_source(recipe: Recipe, rates: dict[str, Rate]) -> str:
    if not rates:
        return "not measured: this harvest ended without it, with other engine settings or on another machine"
    where = "the harvest's server" if harvest_is_greedy(recipe) else "the server of the greedy pass"
    return f"the same timed prompts, asked at once from {where}: no drafter, no states kept"
