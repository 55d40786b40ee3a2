"""The commands, thin: read the recipe, run the stages, map errors to exit codes (0, 1, 2, 130)."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas import __version__
from eyas.errors import EyasError, InputError, ProofError, disk_error

if TYPE_CHECKING:
    from eyas.pipeline import Run
    from eyas.recipe import Recipe

app = typer.Typer(
    name="eyas",
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
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Run every stage that is missing or stale: prepare, harvest, vocab, train, export, verify."""
    with _reported(as_json):
        from eyas.pipeline import STAGE_NAMES

        _known_stage(through)
        _stages(_load(recipe, set_, limit), STAGE_NAMES[0], through, as_json, quiet)


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
        with _reported(as_json):
            _stages(_load(recipe, set_, limit), stage, stage, as_json, quiet)


_stage_command("prepare", "Conversations to token ids, in the target's own chat template.")
_stage_command("harvest", "The target answers every prompt; its ids and hidden states are kept and proven.")
_stage_command("vocab", "The draft vocabulary (d2t, t2d) from the supervised tokens.")
_stage_command("train", "The EAGLE-3 draft model, on the hidden states.")
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
    with _reported(as_json):
        import eyas.demo
        from eyas.pipeline import STAGE_NAMES
        from eyas.target.smollm2 import make_smollm2

        make_smollm2(target_dir)
        recipe = Path(eyas.demo.__file__).parent / "recipe.yaml"
        places = [
            f"run_dir={json.dumps(str(run_dir))}",
            f"target.path={json.dumps(str(target_dir.resolve()))}",
        ]
        _stages(_load(recipe, [*places, *(set_ or [])], limit), STAGE_NAMES[0], STAGE_NAMES[-1], as_json, quiet)


@app.command(epilog="Examples:  `eyas plan recipes/kimi-k2.5.yaml`  ·  `eyas plan my.yaml --json`")
def plan(recipe: RecipeArg, set_: SetOpt = None, limit: LimitOpt = None, as_json: JsonOpt = False) -> None:
    """What eyas understood of the target, what the run will cost, and every problem with its fix. Loads no weights."""
    with _reported(as_json):
        from rich.console import Console

        from eyas.report.plan import build_plan, print_plan

        made = build_plan(_load(recipe, set_, limit))
        if as_json:
            print(json.dumps(made.as_json(), indent=2))
        else:
            print_plan(made, Console())
        if not made.ok:
            raise typer.Exit(InputError.exit_code)


@app.command(epilog="Examples:  `eyas doctor`  ·  `eyas doctor my.yaml --engine`  ·  `eyas doctor --json`")
def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe: looks at its engine and run directory.")] = None,
    engine: Annotated[bool, typer.Option("--engine", help="Also start the recipe's engine and ask it.")] = False,
    set_: SetOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Is the installation sound? Versions, vLLM, GPU, memory, disk, and a self-test of the numerics."""
    with _reported(as_json):
        from rich.console import Console

        from eyas.progress import Progress
        from eyas.report.doctor import examine, print_checks

        made = None if recipe is None else _load(recipe, set_, None)
        checks = examine(made, engine=engine, progress=Progress())
        ok = all(c.ok for c in checks)
        if as_json:
            print(json.dumps({"ok": ok, "checks": [asdict(c) for c in checks]}, indent=2))
        else:
            print_checks(checks, Console())
        if not ok:
            raise typer.Exit(EyasError.exit_code)


show_app = typer.Typer(help="Look into a run directory.", no_args_is_help=True)
app.add_typer(show_app, name="show")


@show_app.command("samples", epilog="Example:  `eyas show samples runs/demo --limit 2`")
def show_samples_command(
    run_dir: Annotated[Path, typer.Argument(help="A run directory with harvested samples.", show_default=False)],
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

    extra = [] if limit is None else [f"data.limit={limit}"]
    return load_recipe(path, [*(overrides or []), *extra])


def _stages(recipe: "Recipe", first: str, last: str, as_json: bool, quiet: bool) -> None:
    from eyas.pipeline import Run, run_stages
    from eyas.progress import Progress
    from eyas.report.plan import build_plan
    from eyas.rundir import RunDir
    from eyas.target.resolve import resolve_target

    progress = Progress(quiet=quiet)
    target = resolve_target(recipe.target.path, remote_code=recipe.target.remote_code)
    made = build_plan(recipe, target)
    if not made.ok:
        raise made.error()
    this = Run(recipe, target, RunDir(Path(recipe.run_dir)), progress)
    try:
        records = run_stages(this, first, last)
    except ProofError:
        _say_proofs(this)
        raise
    _say_proofs(this)
    _summary(this, records, last, as_json)


def _say_proofs(this: "Run") -> None:
    for proof in this.dir.proofs():
        this.progress.say(f"proof {'ok    ' if proof.ok else 'FAILED'} {proof.name}: {proof.found} ({proof.expected})")


def _summary(this: "Run", records: dict[str, Any], last: str, as_json: bool) -> None:
    from eyas.files import read_json

    verified = read_json(this.dir.verify_json) if last == "verify" else None
    if as_json:
        stages = {name: asdict(r) for name, r in records.items()}
        proofs = [asdict(p) for p in this.dir.proofs()]
        print(json.dumps({"run_dir": str(this.dir.root), "stages": stages, "verify": verified, "proofs": proofs}))
    elif verified:
        most = verified["num_speculative_tokens"] + 1
        served = verified["mode"] == "served"
        key, what = ("acceptance_length", "") if served else ("predicted_acceptance_length", "predicted ")
        for group, name in (("seen", "seen"), ("held_out", "held-out")):
            if verified[group] is not None:
                print(f"{what}acceptance length, {name} prompts: {verified[group][key]:.2f} of {most}")
        print(f"drafter: {this.dir.drafter / 'vllm'}\nreport: {this.dir.report_html}")


@contextmanager
def _reported(as_json: bool) -> Iterator[None]:
    """Errors become one message on stderr (with --json also an object on stdout) and the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    except Exception as e:
        told = e if isinstance(e, EyasError) else disk_error(e)
        if told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        if as_json:
            print(json.dumps({"error": {"message": told.message, "fix": told.fix, "exit_code": told.exit_code}}))
        raise typer.Exit(told.exit_code) from None


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    app()
