"""The harvest stage: the target answers (or reads) every prepared conversation; its states are proven and committed.

A sample counts from the moment its part file (samples/<shard>.parquet) is renamed into place, after its shard was
checked. Whatever a killed run leaves besides that is rubbish, and removed by the next one.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from eyas.data.checks import EXACT, Difference, TeacherLike
from eyas.data.committed import Committed
from eyas.data.committer import Committer, Settled
from eyas.data.lengths import SHARES, length_summary, share_bin, share_summary
from eyas.data.plan import Asked, Plan
from eyas.data.render import Renderer
from eyas.data.schema import DROPPED, LENGTH, UNUSED
from eyas.data.shard_place import check_place
from eyas.data.wanted import Wanted
from eyas.engine.base import Completion, Engine
from eyas.errors import EngineError, EyasError, ProofError
from eyas.files import fingerprint, write_text
from eyas.progress import Progress, Task
from eyas.recipe import Recipe
from eyas.rundir import Proof, RunDir
from eyas.states.shard import Shard
from eyas.target.info import TargetInfo

REPRODUCED = "stored states reproduce the engine's log probabilities"
COMPLETE = "every sample's states are whole and its own"
BAD_SHARE = 0.03
"""more samples than this that fail twice: the harvest cannot be trusted"""
HOPELESS = 8
"""that many bad samples, more than half of all so far: stop at once"""
ATTEMPTS = 2
STRAGGLER = 30.0
"""seconds after which a shard no longer waits for samples whose replies do not come"""
SHARD_WAIT = 300.0
"""seconds to wait for a shard after the last reply"""
_QUEUE = 4
"""shards waiting to be settled, at most"""


def harvest(
    recipe: Recipe,
    target: TargetInfo,
    run: RunDir,
    layers: list[int],
    progress: Progress,
    open_engine: Callable[[], AbstractContextManager[Engine]],
    *,
    at_end: Callable[[Engine], None] = lambda engine: None,
    tokenizer: Any = None,
    teacher: TeacherLike | None = None,
) -> dict[str, Any]:
    """Asks the engine for what is missing, proves and commits it; returns counts. `layers` ascending, the last one
    the state before the final norm. The engine is opened only if something is missing; once all is proven and
    committed, it is shown to `at_end`, and closed.

    Raises ProofError when states and log probabilities disagree, EngineError when the engine does not deliver.
    """
    committed = Committed(run, harvest_settings(recipe, target, layers), layers)
    for note in committed.recover():
        progress.say(note)
    plan = Plan(recipe, target, run, committed, None)
    if committed.parts:
        found = committed.reconcile(plan.splits(), Wanted.of(recipe.data))
        if found.unused:
            progress.say(f"harvest: {found.unused:,} samples that the recipe does not ask for now are kept, unused")
        if found.removed:
            progress.say(f"harvest: {found.removed:,} answers are asked for again: they or those before were dropped")
    work = _Work(recipe, target, plan, committed, progress, tokenizer, teacher)
    with ExitStack() as stack:
        work.run(lambda: stack.enter_context(open_engine()))
        counts = work.finish()
        if work.engine is not None:
            at_end(work.engine)
    return counts


def harvest_settings(recipe: Recipe, target: TargetInfo, layers: list[int]) -> str:
    """Fingerprint of everything that a sample depends on besides its own prompt."""
    return fingerprint(
        {
            "target": target.fingerprint,
            "layers": layers,
            "responses": recipe.data.responses,
            "max_length": recipe.data.max_length,
            "engine": [recipe.engine.kind, recipe.engine.dtype],
            "sampling": recipe.engine.sampling.model_dump(mode="json"),
            "states": recipe.states.dtype,
        }
    )


class _Work:
    """One call of `harvest`."""

    def __init__(
        self,
        recipe: Recipe,
        target: TargetInfo,
        plan: Plan,
        committed: Committed,
        progress: Progress,
        tokenizer: Any,
        teacher: TeacherLike | None,
    ) -> None:
        self.recipe, self.target, self.plan, self.committed, self.progress = recipe, target, plan, committed, progress
        self.tokenizer, self.teacher = tokenizer, teacher
        self.engine: Engine | None = None
        self.committer: Committer | None = None
        self.bad: dict[str, str] = {}
        """samples that failed and have not been good since, with why"""
        self.ended: Counter[str] = Counter()
        self.again = self.good = 0
        self.tokens, self.seconds = 0, 0.0
        self.checked = Difference()
        self.allowed = EXACT

    def run(self, open_engine: Callable[[], Engine]) -> None:
        task: Task | None = None
        with ExitStack() as stack:
            for turn in range(self.plan.rounds):
                if turn > 0 and self.plan.render is None:
                    self.plan.render = self._renderer()
                for attempt in range(ATTEMPTS):
                    ended: Counter[str] = Counter()
                    requests = self.plan.requests(turn, ended)
                    first = next(requests, None)
                    if first is not None:
                        if self.engine is None:
                            self.committer = self._committer()
                            self.engine = open_engine()
                        if task is None:  # only now: its rates are not to count the engine's start
                            done = len(self.committed)
                            bar = self.progress.task("harvest", total=self.plan.total, unit="samples", done=done)
                            task = stack.enter_context(bar)
                        asked = self._ask(_again(first, requests), task, first_time=attempt == 0)
                        self.again += asked if attempt else 0
                    if first is None or attempt == ATTEMPTS - 1:
                        self.ended += ended
                        break

    def _ask(self, requests: Iterator[Any], task: Task, *, first_time: bool) -> int:
        """Asks and commits until every request is answered; returns how many were asked."""
        assert self.engine is not None
        assert self.committer is not None
        begin = time.monotonic()
        groups = _Shards(self.plan.run)
        settling: list[Future[Settled]] = []
        asked = 0
        completions = self.engine.generate(requests, self.recipe.engine.sampling)
        with ThreadPoolExecutor(1, thread_name_prefix="eyas-commit") as pool:
            try:
                for completion in completions:
                    known = self.plan.out.get(completion.id)
                    if known is None or not groups.add(completion, known):
                        continue
                    asked += 1
                    tokens = len(completion.output_ids) if known.loss_mask is None else len(completion.prompt_ids)
                    self.tokens += tokens
                    task.advance(int(first_time), tokens=tokens)
                    for path, items in groups.ready():
                        settling.append(pool.submit(self.committer.settle, path, items))
                    self._collect(settling, at_most=_QUEUE)
                for path, items in groups.rest():
                    settling.append(pool.submit(self.committer.settle, path, items))
                    self._collect(settling, at_most=_QUEUE)
                self._collect(settling, at_most=0)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                if isinstance(completions, Generator):
                    completions.close()  # ends what is in flight before the engine is closed
                raise
        for id_ in self.plan.out:  # whose replies never came
            self.bad.setdefault(id_, "the engine gave no answer")
        self.plan.out.clear()
        self.seconds += time.monotonic() - begin
        return asked

    def _collect(self, settling: list[Future[Settled]], at_most: int) -> None:
        while settling and (len(settling) > at_most or settling[0].done()):
            settled = settling.pop(0).result()
            if settled.part is not None:
                self.committed.add(settled.part, settled.ids, settled.proof, settled.allowed)
            self.good += len(settled.ids)
            self.checked += settled.checked
            self.allowed = max(self.allowed, settled.allowed, key=lambda t: t.worst)
            for id_ in settled.ids:
                self.bad.pop(id_, None)
            self.bad |= settled.bad
            for id_ in [*settled.ids, *settled.bad]:
                self.plan.out.pop(id_, None)
            if len(self.bad) >= HOPELESS and len(self.bad) > self.good:
                self._fail()

    def _renderer(self) -> Renderer:
        if self.tokenizer is None:
            from eyas.target.tokenizer import load_tokenizer

            self.tokenizer = load_tokenizer(self.target, self.recipe.target.remote_code)
        return Renderer(self.tokenizer, self.target.eos_token_ids)

    def _committer(self) -> Committer:
        if self.teacher is None:
            from eyas.target.teacher import Teacher

            self.teacher = Teacher(self.target)
        stored, wanted = self.recipe.states.dtype, Wanted.of(self.recipe.data)
        stop_ids = frozenset(self.target.eos_token_ids)
        computed = self.recipe.engine.dtype
        return Committer(self.committed, self.teacher, self.target.hidden_size, stored, wanted, stop_ids, computed)

    def finish(self) -> dict[str, Any]:
        """Writes the proofs and what was left out; returns the counts. Raises ProofError when too many are bad."""
        run, n = self.plan.run, len(self.committed)
        lines = [f"{id_}\t{why}\n" for id_, why in sorted(self.bad.items())]
        if lines:
            write_text(run.samples / "bad.tsv", "".join(lines))
            self.progress.say(f"harvest: {len(lines):,} samples left out, e.g. {lines[0].strip()}")
        else:
            (run.samples / "bad.tsv").unlink(missing_ok=True)
        if n == 0 or len(self.bad) > BAD_SHARE * (n + len(self.bad)):
            self._fail()
        run.write_proofs(self._proofs(ok=True))
        counts = self._counts()
        answers = counts["answers"]
        if counts["samples"] == 0:
            raise EyasError(
                f"harvest: all {n:,} answers were dropped: {answers['cut']:,} cut by length, "
                f"{answers['repetitive']:,} repetitive",
                fix="raise engine.sampling.max_tokens, or set data.cut_answers or data.repetitive_answers to keep",
            )
        self.progress.say(
            f"harvest: {counts['samples']:,} samples, {counts['supervised_tokens']:,} supervised tokens; "
            + ", ".join(f"{k} {v:,}" for k, v in counts["finish_reasons"].items())
        )
        if self.recipe.data.responses == "regenerate":
            self.progress.say(
                f"harvest: {answers['cut']:,} answers cut by length ({self.recipe.data.cut_answers}), "
                f"{answers['repetitive']:,} repetitive ({self.recipe.data.repetitive_answers}), "
                f"{answers['cut_and_repetitive']:,} both; {answers['dropped']:,} dropped"
            )
        for why, times in self.ended.items():
            self.progress.say(f"harvest: {times:,} x {why}")
        return counts

    def _fail(self) -> None:
        self.plan.run.write_proofs(self._proofs(ok=False))
        n = len(self.committed) + len(self.bad)
        reasons = Counter(_kind_of(why) for why in self.bad.values())
        examples = {_kind_of(why): f"{id_}: {why}" for id_, why in self.bad.items()}
        raise ProofError(
            f"harvest: {len(self.bad):,} of {n:,} samples failed their check"
            + "".join(f"\n  {times:,} x {examples[kind]}" for kind, times in reasons.most_common(5))
            + f"\n  expected: every sample's states whole, and log_softmax(head(norm(last state))) within "
            f"{self._allowed()} of the engine's log probabilities"
            + f"\n  found: differences up to {self.checked.worst:.3g} over {self.checked.n:,} tokens",
            fix="the states are not the engine's own: check that target.path is the checkpoint that the engine serves, "
            "that the engine is one that eyas supports, and its log; the good samples are kept",
        )

    def _allowed(self) -> str:
        allowed = max(self.allowed, self.committed.allowed, key=lambda t: t.worst)
        return f"{allowed.worst:g} each and {allowed.mean:g} in the mean"

    def _proofs(self, *, ok: bool) -> list[Proof]:
        found = self.committed.proof if ok else self.committed.proof + self.checked
        n = len(self.committed)
        return [
            Proof(
                REPRODUCED,
                ok,
                f"worst difference {found.worst:.2g}, mean {found.mean:.2g} over {found.n:,} tokens of {n:,} samples",
                f"at most {self._allowed()}",
            ),
            Proof(
                COMPLETE,
                ok,
                f"{n:,} samples good, {len(self.bad):,} left out",
                f"at most {BAD_SHARE:.0%} left out",
            ),
        ]

    def _counts(self) -> dict[str, Any]:
        prompts, answers, reasons = [], [], Counter[str]()
        shares = np.zeros(SHARES, np.int64)
        cut = repetitive = both = dropped = 0
        for table in self.committed.columns(
            ["prompt_length", "supervised", "rows", "finish_reason", "looped", "split"]
        ):
            table = table.filter(pc.not_equal(table["split"], UNUSED))
            reason, loops = table["finish_reason"].to_numpy(), table["looped"].fill_null(0).to_numpy() > 0
            used = table["split"].to_numpy() != DROPPED
            cut, repetitive = cut + int((reason == LENGTH).sum()), repetitive + int(loops.sum())
            both, dropped = both + int(((reason == LENGTH) & loops).sum()), dropped + int((~used).sum())
            supervised = table["supervised"].to_numpy()[used]
            prompts.append(table["prompt_length"].to_numpy()[used])
            answers.append(supervised)
            shares += np.bincount(share_bin(supervised, table["rows"].to_numpy()[used] + 1), minlength=SHARES)
            reasons.update(reason[used].tolist())
        prompt, answer = np.concatenate(prompts), np.concatenate(answers)
        return {
            "samples": len(answer),
            "left_out": len(self.bad),
            "asked_again": self.again,
            "supervised_tokens": int(answer.sum(dtype=np.int64)),
            "finish_reasons": dict(reasons),
            "answers": {"cut": cut, "repetitive": repetitive, "cut_and_repetitive": both, "dropped": dropped},
            "ended": {k: n for k, n in self.ended.items() if n},
            "prompt_lengths": length_summary(prompt),
            "answer_lengths": length_summary(answer),
            "supervised_shares": share_summary(shares),
            "new_samples": self.good,
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.tokens else None,
            "worst_logprob_difference": self.committed.proof.worst,
        }


class _Shards:
    """Completions grouped by the shard that holds their states, until it is there and nothing of it is awaited."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._places: set[Path] = set()
        """where the shards of this run may lie, as far as they were seen"""
        self._groups: dict[Path, list[tuple[Completion, Asked]]] = {}
        self._ids: set[str] = set()
        self._taken: set[Path] = set()
        self._seen: dict[Path, tuple[float, int]] = {}
        """when a shard was first seen on disk, and how many samples it holds"""

    def add(self, completion: Completion, asked: Asked) -> bool:
        """False for a second reply to the same request, and for one that came after its shard was settled."""
        if completion.captured is None:
            raise EngineError(
                f"the engine returned no hidden states with its answer to {completion.id}",
                fix="it runs without eyas's capture: let eyas start it, or start it as the README's section "
                '"A server of your own" says',
            )
        place = completion.captured.shard.parent
        if place not in self._places:
            check_place(place, self._run)
            self._places.add(place)
        if completion.id in self._ids or completion.captured.shard in self._taken:
            return False
        self._ids.add(completion.id)
        self._groups.setdefault(completion.captured.shard, []).append((completion, asked))
        return True

    def ready(self) -> Iterator[tuple[Path, list[tuple[Completion, Asked]]]]:
        """Shards of which every sample's reply came, or that waited long enough for the others."""
        now = time.monotonic()
        for path in list(self._groups):
            if path not in self._seen:
                if not path.exists():
                    continue
                self._seen[path] = (now, _samples_in(path))
            since, samples = self._seen[path]
            if len(self._groups[path]) >= samples or now - since > STRAGGLER:
                yield self._take(path)

    def rest(self) -> Iterator[tuple[Path, list[tuple[Completion, Asked]]]]:
        """All that is left once no reply is awaited any more. Raises EngineError for a shard that does not come."""
        deadline = time.monotonic() + SHARD_WAIT
        for path in list(self._groups):
            while not path.exists():
                error = path.with_name(path.name + ".error")
                if error.exists():
                    raise EngineError(f"the engine could not write {path.name}: {error.read_text()[:500]}")
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the engine's states {path} did not appear within {SHARD_WAIT:.0f} s of its last answer",
                        fix="see the engine's log; the run directory must be on storage that both can reach",
                    )
                time.sleep(0.05)
            yield self._take(path)

    def _take(self, path: Path) -> tuple[Path, list[tuple[Completion, Asked]]]:
        items = self._groups.pop(path)
        self._taken.add(path)
        self._seen.pop(path, None)
        self._ids.difference_update(c.id for c, _ in items)
        return path, items


def _samples_in(path: Path) -> int:
    try:
        return len(Shard(path))
    except EyasError:
        return 0  # settled at once, which says what is wrong with it


def _again(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _kind_of(why: str) -> str:
    """A reason without its numbers, to count alike ones together."""
    return "".join(c for c in why if not c.isdigit())[:80]
