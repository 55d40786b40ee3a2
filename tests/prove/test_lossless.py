"""Comparison of served tokens with the target's own."""

import pytest
import torch

from eyas.prove.answers import Answer
from eyas.prove.lossless import compare


def answer(name: str, output: list[int]) -> Answer:
    # two prompt tokens; the last layer's state at row r is [r, 0]
    states = torch.zeros(2 + len(output) - 1, 2, 2)
    states[:, -1, 0] = torch.arange(float(len(states)))
    return Answer(name, [8, 9], output, True, lambda: states)


def logits(states: torch.Tensor) -> torch.Tensor:
    """Row r: token 5 scores 1, token 6 scores 1 - r / 1000, others 0."""
    scores = torch.zeros(len(states), 10)
    scores[:, 5] = 1.0
    scores[:, 6] = 1.0 - states[:, 0] / 1000
    return scores


def never(states: torch.Tensor) -> torch.Tensor:
    raise AssertionError("asked without a difference")


def test_equal() -> None:
    found = compare([answer("a", [1, 2]), answer("b", [3])], {"a": [1, 2], "b": [3]}, never, "float32")
    assert found.lossless
    assert found.lossless_up_to_ties
    assert found.sentence() == "2 of 2 answers equal token for token"


@pytest.mark.parametrize(("dtype", "tie"), [("float32", False), ("bfloat16", True), ("auto", True)])
def test_first_difference_and_its_gap(dtype: str, tie: bool) -> None:
    # the difference is answer token 2, chosen from row 2 + 2 - 1 = 3: gap 0.003
    found = compare([answer("a", [1, 2, 5, 7]), answer("b", [3])], {"a": [1, 2, 6, 4], "b": [3]}, logits, dtype)
    assert (found.equal, found.compared, found.lossless) == (1, 2, False)
    first = found.differences[0]
    assert (first.id, first.position, first.expected, first.served) == ("a", 2, 5, 6)
    assert first.gap == pytest.approx(0.003, abs=1e-5)
    assert found.lossless_up_to_ties is tie
    assert found.record()["first_difference"]["position"] == 2


@pytest.mark.parametrize("served", [[1, 2], [1, 2, 5, 7, 7]])
def test_another_length_is_never_a_tie(served: list[int]) -> None:
    found = compare([answer("a", [1, 2, 5, 7])], {"a": served}, never, "bfloat16")
    assert not found.lossless
    assert not found.lossless_up_to_ties
    assert found.differences[0].position == min(len(served), 4)
