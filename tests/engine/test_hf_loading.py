"""The hf engine never runs a target whose weights transformers would fill with random numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eyas.engine.hf import HfEngine
from eyas.errors import InputError
from eyas.recipe import EnginePart
from eyas.target.resolve import resolve_target
from target import fixtures
from target.fixtures import Weights

Q = "model.layers.1.self_attn.q_proj.weight"


def start(path: Path) -> None:
    with HfEngine(EnginePart(kind="hf", dtype="float32"), resolve_target(str(path)), None, None):  # type: ignore[call-arg]
        pass


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop(Q), rf"{Q} \(missing\)"),
        (lambda w: w.update({Q: torch.ones(1, 1)}), rf"{Q} \(\[1, 1\], \[64, 64\] expected\)"),
        (
            lambda w: [w.pop(name) for name in list(w) if "mlp" in name],
            r"9 tensor\(s\) .*mlp\.down_proj\.weight \(missing\).*and 4 more",
        ),
    ],
)
def test_tensors_that_would_be_random_are_named(tmp_path: Path, change: Callable[[Weights], None], said: str) -> None:
    path, weights = fixtures.llama(tmp_path), fixtures.dense_weights().weights
    target = resolve_target(str(path))  # before the change: the headers tell most of it already
    change(weights)
    fixtures.write_weights(path, weights)
    engine = HfEngine(EnginePart(kind="hf", dtype="float32"), target, None, None)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=said) as e, engine:
        pass
    assert str(path) in e.value.message
    assert e.value.fix


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_not_missing(tmp_path: Path, tied: bool) -> None:
    start(fixtures.llama(tmp_path, tied=tied))
