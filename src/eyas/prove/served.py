"""Answers asked again from a real engine: with the drafter (counted and timed), or without it (as the reference)."""

import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from eyas.engine.base import Captured, Completion
from eyas.engine.spec_counters import SpecCounters
from eyas.engine.vllm import VllmEngine
from eyas.errors import EngineError
from eyas.progress import Progress
from eyas.prove.answers import Answer
from eyas.prove.rates import Rate, ask, ask_timed, greedy
from eyas.recipe import Recipe, SamplingPart
from eyas.rundir import RunDir
from eyas.states.shard import Shard
from eyas.target.info import TargetInfo

WARM_UP_TOKENS = 8
QUIET_SECONDS = 0.5
"""the counters are read again after this pause until they stand still: replies overtake them"""
QUIET_TRIES = 60


@dataclass(frozen=True)
class Served:
    """One group's replay with the drafter."""

    outputs: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    counters: SpecCounters
    tokens: int
    rate: Rate
    """of the timed answers, which are asked first and alone"""
    timed: SpecCounters
    """of the timed answers"""


def serve(
    recipe: Recipe,
    target: TargetInfo,
    run: RunDir,
    groups: dict[str, list[Answer]],
    timed: Mapping[str, Collection[str]],
    progress: Progress,
) -> dict[str, Served]:
    """Starts vLLM with target and drafter and asks for every answer again, greedily, one group after the other.

    timed: the ids of each group's answers whose rate is measured.
    """
    tokens = recipe.verify.speculative_tokens
    served: dict[str, Served] = {}
    with VllmEngine(
        recipe.server,
        target,
        None,
        None,
        log_file=run.logs / "verify-vllm.log",
        max_model_len=min(target.max_position_embeddings, recipe.data.max_length + tokens + 1),
        drafter=run.drafter / "vllm",
        speculative_tokens=tokens,
        draft_attention_backend=recipe.verify.draft_attention_backend,
        progress_say=progress.say,
    ) as engine:
        _warm_up(engine, groups, greedy(recipe.engine.sampling))
        for group, answers in groups.items():
            if not answers:
                continue
            before = _standing_counters(engine)
            what = f"verify, {group.replace('_', ' ')}"
            found, rate = ask_timed(
                engine, recipe, [a for a in answers if a.id in timed[group]], progress, f"{what}, timed"
            )
            counted = _standing_counters(engine)
            if rest := [a for a in answers if a.id not in timed[group]]:
                found += ask(engine, recipe, rest, progress, what)
            outputs = {c.id: c.output_ids for c in found}
            total = sum(len(ids) for ids in outputs.values())
            logprobs = {c.id: c.output_logprobs for c in found}
            served[group] = Served(
                outputs, logprobs, _standing_counters(engine) - before, total, rate, counted - before
            )
    return served


def answer_greedily(
    recipe: Recipe,
    target: TargetInfo,
    run: RunDir,
    layers: list[int],
    groups: dict[str, list[Answer]],
    timed: Mapping[str, Collection[str]],
    states_dir: Path,
    progress: Progress,
) -> tuple[dict[str, list[Answer]], dict[str, Rate]]:
    """The target's greedy answers to the same prompts, with their states: the reference where the harvest is none.

    Returns them and the rates of the timed ones, asked once more. `states_dir` is emptied first and belongs to the
    caller afterwards.
    """
    shutil.rmtree(states_dir, ignore_errors=True)
    states_dir.mkdir(parents=True)
    fresh: dict[str, list[Answer]] = {}
    rates: dict[str, Rate] = {}
    with VllmEngine(
        recipe.server,
        target,
        layers,
        states_dir,
        log_file=run.logs / "verify-baseline-vllm.log",
        max_model_len=min(target.max_position_embeddings, recipe.data.max_length + 1),
        progress_say=progress.say,
    ) as engine:
        for group, answers in groups.items():
            name = group.replace("_", " ")
            found = ask(engine, recipe, [_open_ended(a) for a in answers], progress, f"greedy answers, {name}")
            by_id = {c.id: c for c in found}
            fresh[group] = [_answer(by_id[a.id]) for a in answers]
            again = [a.sparing(recipe.verify.speculative_tokens) for a in fresh[group] if a.id in timed[group]]
            if again:
                _, rates[group] = ask_timed(engine, recipe, again, progress, f"rate without a drafter, {name}")
    return fresh, rates


def _open_ended(answer: Answer) -> Answer:
    """The prompt alone: free to stop, up to the recipe's max_tokens."""
    return Answer(answer.id, answer.prompt_ids, [0], [0.0], True, answer.states)


def _answer(completion: Completion) -> Answer:
    captured = completion.captured
    if captured is None:
        raise EngineError(f"request {completion.id}: the engine kept no hidden states")

    def states(where: Captured = captured) -> Tensor:
        return Shard(where.shard).sample(where.index).states

    return Answer(
        completion.id,
        completion.prompt_ids,
        completion.output_ids,
        completion.output_logprobs,
        completion.finish_reason == "stop",
        states,
    )


def _warm_up(engine: VllmEngine, groups: dict[str, list[Answer]], sampling: SamplingPart) -> None:
    first = next(a for answers in groups.values() for a in answers)
    request = first.request_of(WARM_UP_TOKENS)
    for _ in engine.generate([request], sampling):
        pass


def _standing_counters(engine: VllmEngine) -> SpecCounters:
    counters = engine.spec_counters()
    for _ in range(QUIET_TRIES):
        time.sleep(QUIET_SECONDS)
        again = engine.spec_counters()
        if again == counters:
            return again
        counters = again
    raise EngineError("vLLM's counters of speculative decoding keep moving although nothing was asked")
