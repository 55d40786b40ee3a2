"""The commands, thin: read the recipe, run the stages, map errors to exit codes (0, 1, 2, 130)."""

import json
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from eyas import __version__
from eyas.errors import EyasError, InputError, ProofError, disk_error

if TYPE_CHECKING:
    from eyas.pipeline import Run
    from eyas.recipe import Recipe
    from eyas.rundir import Proof, RunDir

INTERRUPTED = 130
A_FAULT = "this is a fault of eyas; please report it with the traceback above"
AGAIN = "the same command continues where it stopped"
_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
"""what a command line that cannot be understood raises: a class of click's, of which typer may carry its own copy"""
_AS_JSON = "eyas.json"


class _Commands(TyperGroup):
    """With --json among the arguments, a usage error is an object on stdout too."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        as_json = "--json" in args
        with _usage_reported(as_json):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[_AS_JSON] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        with _usage_reported(ctx.meta[_AS_JSON]):
            return super().invoke(ctx)


@contextmanager
def _usage_reported(as_json: bool) -> Iterator[None]:
    """typer writes the message to stderr, and exits."""
    try:
        yield
    except _USAGE_ERROR as e:
        if as_json:
            command = "eyas" if e.ctx is None else e.ctx.command_path
            _print_failure(InputError(e.format_message(), fix=f"`{command} --help` lists what there is"), {})
        raise


app = typer.Typer(
    name="eyas",
    cls=_Commands,
    help="Train EAGLE-3 draft models: from a target model and a file of prompts to a drafter proven in the engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

RecipeArg = Annotated[Path, typer.Argument(help="YAML recipe; `recipes/` has ready ones.", show_default=False)]
SetOpt = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key, e.g. `--set train.epochs=3`. Repeatable."),
]
LimitOpt = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", help="Use only N conversations (10: a smoke run of every stage)."),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; progress stays on stderr.")]
NprocOpt = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", min=1, help="Ranks that train together; default: one for each GPU."),
]
QuietOpt = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"eyas {__version__}")
        raise typer.Exit


@app.command(
    epilog="Examples:  `eyas run recipes/qwen3-8b.yaml`  ·  `eyas run my.yaml --limit 10`  ·  "
    "`eyas run my.yaml --through harvest --set engine.tensor_parallel=4`"
)
def run(
    recipe: RecipeArg,
    set_: SetOpt = None,
    limit: LimitOpt = None,
    through: Annotated[str, typer.Option(metavar="STAGE", help="Stop after this stage.")] = "verify",
    nproc: NprocOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Run every stage that is missing or stale: prepare, harvest, vocab, train, export, verify."""
    with _reported(as_json) as told:
        from eyas.pipeline import STAGE_NAMES

        _known_stage(through)
        _stages(_load(recipe, set_, limit), STAGE_NAMES[0], through, told, as_json, quiet, nproc)


def _known_stage(name: str) -> None:
    from eyas.pipeline import STAGE_NAMES

    if name not in STAGE_NAMES:
        raise InputError(f"--through {name}: no such stage", fix=f"one of {', '.join(STAGE_NAMES)}")


def _stage_command(stage: str, what: str) -> None:
    @app.command(name=stage, help=what, epilog=f"Example:  `eyas {stage} my.yaml`")
    def command(
        recipe: RecipeArg,
        set_: SetOpt = None,
        limit: LimitOpt = None,
        as_json: JsonOpt = False,
        quiet: QuietOpt = False,
    ) -> None:
        with _reported(as_json) as told:
            _stages(_load(recipe, set_, limit), stage, stage, told, as_json, quiet)


_stage_command("prepare", "Conversations to token ids, in the target's own chat template.")
_stage_command("harvest", "The target answers every prompt; its ids and hidden states are kept and proven.")
_stage_command("vocab", "The draft vocabulary (d2t, t2d) from the supervised tokens.")


@app.command(epilog="Examples:  `eyas train my.yaml`  ·  `eyas train my.yaml --nproc 4`")
def train(
    recipe: RecipeArg,
    set_: SetOpt = None,
    limit: LimitOpt = None,
    nproc: NprocOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """The EAGLE-3 draft model, on the hidden states; by torchrun where there are several GPUs."""
    with _reported(as_json) as told:
        _stages(_load(recipe, set_, limit), "train", "train", told, as_json, quiet, nproc)


_stage_command("export", "The checkpoint that the serving engine loads.")
_stage_command("verify", "Load target and drafter in the engine: output unchanged, acceptance as predicted.")


@app.command(epilog="Example:  `eyas demo`  ·  `eyas demo --limit 10 --run-dir runs/smoke`")
def demo(
    run_dir: Annotated[Path, typer.Option(help="Where the demo's run goes.")] = Path("runs/demo"),
    target_dir: Annotated[Path, typer.Option(help="Where the demo's target is written (520 MB).")] = Path(
        "runs/smollm2"
    ),
    set_: SetOpt = None,
    limit: LimitOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """The whole path on a small real target (SmolLM2-135M-Instruct): about ten minutes on two CPU cores."""
    with _reported(as_json) as told:
        import eyas.demo
        from eyas.pipeline import STAGE_NAMES
        from eyas.progress import Progress
        from eyas.rundir import RunDir
        from eyas.target.smollm2 import make_smollm2

        RunDir(run_dir).check_place()  # before half a gigabyte is written
        make_smollm2(target_dir, Progress(quiet=quiet).say)
        recipe = Path(eyas.demo.__file__).parent / "recipe.yaml"
        places = [
            f"run_dir={json.dumps(str(run_dir))}",
            f"target.path={json.dumps(str(target_dir.resolve()))}",
        ]
        made = _load(recipe, [*places, *(set_ or [])], limit)
        _stages(made, STAGE_NAMES[0], STAGE_NAMES[-1], told, as_json, quiet)


@app.command(epilog="Examples:  `eyas plan recipes/kimi-k2.5.yaml`  ·  `eyas plan my.yaml --json`")
def plan(recipe: RecipeArg, set_: SetOpt = None, limit: LimitOpt = None, as_json: JsonOpt = False) -> None:
    """What eyas understood of the target, what the run will cost, and every problem with its fix. Loads no weights."""
    with _reported(as_json) as told:
        from rich.console import Console

        from eyas.report.plan import build_plan, print_plan

        made = build_plan(_load(recipe, set_, limit))
        told |= made.as_json()
        if not as_json:
            print_plan(made, Console())  # with its problems
        if not made.ok:
            raise made.error() if as_json else typer.Exit(InputError.exit_code)


@app.command(epilog="Examples:  `eyas doctor`  ·  `eyas doctor my.yaml --engine`  ·  `eyas doctor --json`")
def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe: looks at its engine and run directory.")] = None,
    engine: Annotated[bool, typer.Option("--engine", help="Also start the recipe's engine and ask it.")] = False,
    set_: SetOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Is the installation sound? Versions, vLLM, GPU, memory, disk, and a self-test of the numerics."""
    with _reported(as_json) as told:
        from rich.console import Console

        from eyas.progress import Progress
        from eyas.report.doctor import examine, print_checks

        made = None if recipe is None else _load(recipe, set_, None)
        checks = examine(made, engine=engine, progress=Progress())
        failed = [c.name for c in checks if not c.ok]
        told["checks"] = [asdict(c) for c in checks]
        if not as_json:
            print_checks(checks, Console())
        if failed and as_json:
            raise EyasError(f"not sound: {', '.join(failed)}", fix="each of the checks says its own")
        if failed:
            raise typer.Exit(EyasError.exit_code)


class Shown(StrEnum):
    """What `eyas show` can show."""

    samples = "samples"


@app.command(epilog="Examples:  `eyas show runs/demo samples`  ·  `eyas show runs/demo samples --id 3f0c…/0`")
def show(
    run_dir: Annotated[Path, typer.Argument(help="A run directory with harvested samples.", show_default=False)],
    what: Annotated[Shown, typer.Argument(help="What of it.", show_default=False)],
    id_: Annotated[str | None, typer.Option("--id", help="One sample's id.")] = None,
    limit: Annotated[int, typer.Option(help="At most this many samples.")] = 3,
) -> None:
    """Samples as tokens: the supervised ones marked, special tokens visible."""
    with _reported(False):
        from rich.console import Console

        from eyas.report.show import show_samples
        from eyas.rundir import RunDir
        from eyas.target.resolve import resolve_target
        from eyas.target.tokenizer import load_tokenizer

        directory = RunDir(run_dir)
        recipe = _recorded_recipe(directory)
        target = resolve_target(recipe.target.path, remote_code=recipe.target.remote_code)
        tokenizer = load_tokenizer(target, remote_code=recipe.target.remote_code)
        show_samples(directory, tokenizer, Console(), id=id_, limit=limit)


@app.command(epilog="Example:  `eyas report runs/demo`")
def report(run_dir: Annotated[Path, typer.Argument(help="A run directory.", show_default=False)]) -> None:
    """Write RUN_DIR/report.html again from what is there."""
    with _reported(False):
        from eyas.report.html import write_report
        from eyas.rundir import RunDir

        directory = RunDir(run_dir)
        print(write_report(directory, _recorded_recipe(directory)))


def _recorded_recipe(directory: Any) -> "Recipe":
    from eyas.recipe import load_recipe

    if not directory.recipe.is_file():
        raise InputError(f"{directory.root} is not a run directory (no recipe.yaml)", fix="give the run_dir of a run")
    return load_recipe(directory.recipe)


def _load(path: Path, overrides: list[str] | None, limit: int | None) -> "Recipe":
    from eyas.recipe import load_recipe

    return load_recipe(path, overrides or (), limit)


def _stages(
    recipe: "Recipe",
    first: str,
    last: str,
    told: dict[str, Any],
    as_json: bool,
    quiet: bool,
    nproc: int | None = None,
) -> None:
    """Runs stages; `told` gets what is known of the run, also of one that fails."""
    from eyas.pipeline import Run, run_stages
    from eyas.progress import Progress
    from eyas.report.plan import build_plan
    from eyas.rundir import RunDir
    from eyas.target.resolve import resolve_target

    progress = Progress(quiet=quiet)
    target = resolve_target(recipe.target.path, remote_code=recipe.target.remote_code)
    made = build_plan(recipe, target)
    if not made.ok:
        told["problems"] = [asdict(p) for p in made.problems]
        raise made.error()
    this = Run(recipe, target, RunDir(Path(recipe.run_dir)), progress, nproc)
    try:
        run_stages(this, first, last)
    except ProofError:
        _say_proofs(this, last, failed=False)  # the error says what failed
        raise
    finally:
        with suppress(EyasError, OSError, ValueError):  # a damaged file is not to hide the error
            told |= _facts(this.dir, last)
    _say_proofs(this, last, failed=True)
    if not as_json:
        _summary(this.dir, told["verify"])


def _say_proofs(this: "Run", last: str, *, failed: bool) -> None:
    for proof in _proofs_through(this.dir, last):
        if proof.ok or failed:
            word = "ok    " if proof.ok else "FAILED"
            this.progress.say(f"proof {word} {proof.name}: {proof.found} (expected: {proof.expected})")


def _proofs_through(run: "RunDir", last: str) -> list["Proof"]:
    """Not those of later stages: what they prove may be of other inputs."""
    from eyas.pipeline import STAGE_NAMES

    records, later = run.records(), STAGE_NAMES[STAGE_NAMES.index(last) + 1 :]
    theirs = [proof for name in later if name in records for proof in records[name].proofs]
    return [proof for proof in run.proofs() if proof not in theirs]


def _facts(run: "RunDir", last: str) -> dict[str, Any]:
    from eyas.files import read_json
    from eyas.pipeline import STAGE_NAMES

    wanted = STAGE_NAMES[: STAGE_NAMES.index(last) + 1]
    return {
        "run_dir": str(run.root),
        "stages": {name: asdict(r) for name, r in run.records().items() if name in wanted},
        "verify": read_json(run.verify_json) if last == "verify" and run.verify_json.exists() else None,
        "proofs": [asdict(p) for p in _proofs_through(run, last)],
    }


def _summary(run: "RunDir", verified: dict[str, Any] | None) -> None:
    if verified:
        most = verified["num_speculative_tokens"] + 1
        served = verified["mode"] == "served"
        key, what = ("acceptance_length", "") if served else ("predicted_acceptance_length", "predicted ")
        for group, name in (("seen", "seen"), ("held_out", "held-out")):
            if verified[group] is not None:
                print(f"{what}acceptance length, {name} prompts: {verified[group][key]:.2f} of {most}")
        print(f"drafter: {run.drafter / 'vllm'}\nreport: {run.report_html}")


@contextmanager
def _reported(as_json: bool) -> Iterator[dict[str, Any]]:
    """Yields a dict for what a command has to tell. Errors become one message on stderr and the exit code.

    With --json one object is printed on stdout at the end: `ok`, an `error` if there was one, and what was told.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    told: dict[str, Any] = {}
    try:
        yield told
        if as_json:
            print(json.dumps({"ok": True, **told}))
    except KeyboardInterrupt:
        print(f"interrupted; {AGAIN}", file=sys.stderr)
        if as_json:
            _print_failure(EyasError("interrupted", fix=AGAIN), told, INTERRUPTED)
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort, _USAGE_ERROR, BrokenPipeError):
        raise
    except Exception as e:  # noqa: BLE001 - told, with its traceback
        error = e if isinstance(e, EyasError) else disk_error(e)
        if error is None:
            traceback.print_exc()
            error = EyasError(f"unexpected {type(e).__name__}: {e}", fix=A_FAULT)
        print(f"error: {error}", file=sys.stderr)
        if as_json:
            _print_failure(error, told)
        raise typer.Exit(error.exit_code) from None


def _print_failure(e: EyasError, told: dict[str, Any], exit_code: int | None = None) -> None:
    error = {"message": e.message, "fix": e.fix, "exit_code": e.exit_code if exit_code is None else exit_code}
    print(json.dumps({"ok": False, "error": error, **told}))


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    app()


if __name__ == "__main__":
    main()
