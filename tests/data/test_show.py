"""`eyas show` output: supervised runs in brackets, special tokens visible, lengths and share."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from eyas.data.harvest import harvest
from eyas.data.prepare import prepare
from eyas.errors import InputError
from eyas.progress import Progress
from eyas.report.show import show_samples
from eyas.rundir import RunDir
from eyas.target.resolve import resolve_target
from eyas.target.tokenizer import load_tokenizer

from .conftest import write_prompts
from .tiny import LAYERS, TinyEngine, recipe


def shown(run: RunDir, target: Path, **options: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120, color_system=None)
    show_samples(run, load_tokenizer(resolve_target(str(target))), console, **options)  # type: ignore[arg-type]
    return out.getvalue()


def test_show(tiny: Path, tmp_path: Path, quiet: Progress) -> None:
    run, target = RunDir(tmp_path / "run"), resolve_target(str(tiny))
    what = recipe(run.root, tiny, [write_prompts(tmp_path / "p.jsonl", 8, turns=2)], responses="keep")
    with pytest.raises(InputError, match="holds no samples"):
        shown(run, tiny)
    prepare(what, target, run, quiet)
    text = shown(run, tiny, limit=2)
    assert text.count("prepared, 4 messages") == 2
    assert "<|im_start|>assistant⏎\n⟦answer 0.0<|im_end|>⟧⏎\n<|im_start|>user" in text
    run.states.mkdir()
    harvest(what, target, run, LAYERS, quiet, lambda: TinyEngine(tiny, run.states))
    text = shown(run, tiny)
    assert text.count("finished: kept") == 5
    assert "⟦answer 0.1<|im_end|>⟧" in text
    id_ = next(line.split()[0] for line in text.splitlines() if "finished: kept" in line)
    one = shown(run, tiny, id=id_)
    assert one.count("finished: kept") == 1
    assert id_ in one
    assert " tokens, 24 supervised (" in one or " tokens, 22 supervised (" in one
    assert shown(run, tiny, id=id_.split("/")[0]).count(id_) == 1
    with pytest.raises(InputError, match="holds no sample nothing"):
        shown(run, tiny, id="nothing")
