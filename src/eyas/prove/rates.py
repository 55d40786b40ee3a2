"""Asks an engine for known answers, and how fast it gives them; without a drafter where a server of ours has none.

The two rates of verify.json are of the same prompts, all asked at once, greedily, with no states kept and no prompt out
of the prefix cache. The one without a drafter is measured on the server that already runs without one (the harvest's,
when its answers are the reference; else that of the greedy pass), since another load costs a large target many minutes.
That server still copies the captured layers in each step, for nobody.
"""

import time
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from eyas.engine.base import Completion
from eyas.engine.vllm import VllmEngine
from eyas.errors import EngineError
from eyas.files import fingerprint, write_json
from eyas.progress import Progress
from eyas.prove.answers import Answer, chosen, harvested
from eyas.recipe import Recipe, SamplingPart
from eyas.report.machine import this_machine
from eyas.rundir import RunDir
from eyas.states.store import HarvestStore, SampleRef
from eyas.target.info import TargetInfo


@dataclass(frozen=True)
class Rate:
    """Prompts asked at once, and what came of them."""

    ids: list[str]
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Baseline:
    """What baseline.json says: the rate of each group, and under which settings, on which machine."""

    setting: str
    rates: dict[str, Rate]


def greedy(sampling: SamplingPart) -> SamplingPart:
    return sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": None})


def to_time(store: HarvestStore, recipe: Recipe) -> dict[str, list[SampleRef]]:
    return chosen(store, min(recipe.verify.timed_prompts, recipe.verify.prompts))


def ask(
    engine: VllmEngine, recipe: Recipe, answers: list[Answer], progress: Progress, what: str, *, timed: bool = False
) -> list[Completion]:
    """Every answer again, greedily. Raises EngineError when one is missing."""
    found: list[Completion] = []
    requests = (a.request(recipe) for a in answers)
    with progress.task(what, total=len(answers), unit="answers") as task:
        for completion in engine.generate(requests, greedy(recipe.engine.sampling), timed=timed):
            found.append(completion)
            task.advance(1, tokens=len(completion.output_ids))
    if {c.id for c in found} != {a.id for a in answers}:
        raise EngineError(f"{what}: {len(answers)} prompts were sent, {len(found)} answers came back")
    return found


def ask_timed(
    engine: VllmEngine, recipe: Recipe, answers: list[Answer], progress: Progress, what: str
) -> tuple[list[Completion], Rate]:
    begin = time.monotonic()
    found = ask(engine, recipe, answers, progress, what, timed=True)
    seconds = time.monotonic() - begin
    return found, Rate([a.id for a in answers], sum(len(c.output_ids) for c in found), seconds)


def measure_baseline(
    recipe: Recipe, target: TargetInfo, run: RunDir, engine: VllmEngine, progress: Progress
) -> dict[str, Rate]:
    """On the harvest's server, once all is harvested; written to baseline.json. A failure costs only this number."""
    store = HarvestStore(run)
    rates: dict[str, Rate] = {}
    try:
        for group, refs in to_time(store, recipe).items():
            answers = [a.sparing(recipe.verify.speculative_tokens) for a in harvested(store, refs, target)]
            if answers:
                what = f"rate without a drafter, {group.replace('_', ' ')}"
                _, rates[group] = ask_timed(engine, recipe, answers, progress, what)
    except EngineError as e:
        progress.say(f"harvest: the rate without a drafter was not measured: {e.message}")
        return {}
    write_json(run.baseline_json, asdict(Baseline(_setting(recipe, run), rates)))
    return rates


def read_baseline(recipe: Recipe, run: RunDir) -> dict[str, Rate]:
    """What the harvest measured; empty where it did not, or with other settings or on another machine."""
    try:
        found = TypeAdapter(Baseline).validate_json(run.baseline_json.read_bytes())
    except (OSError, ValidationError):
        return {}
    return found.rates if found.setting == _setting(recipe, run) else {}


def _setting(recipe: Recipe, run: RunDir) -> str:
    return fingerprint([recipe.engine.model_dump(mode="json"), recipe.data.max_length, this_machine(run.root).name])
