"""Comparison of served tokens with the target's own."""

import pytest
import torch

from eyas.prove.answers import Answer
from eyas.prove.lossless import compare


def answer(name: str, output: list[int]) -> Answer:
    # two prompt tokens; the last layer's state at row r is [r, 0]
    states = torch.zeros(2 + len(output) - 1, 2, 2)
    states[:, -1, 0] = torch.arange(float(len(states)))
    return Answer(name, [8, 9], output, [-1.0] * len(output), True, lambda: states)


def calm(served: dict[str, list[int]], moved: float = 0.0) -> dict[str, list[float]]:
    """Log probabilities of the served tokens; the first one of each answer moved a little."""
    return {name: [-1.0 - moved, *[-1.0] * (len(ids) - 1)] for name, ids in served.items()}


def logits(states: torch.Tensor) -> torch.Tensor:
    """Row r: token 5 scores 1, token 6 scores 1 - r / 1000, others 0."""
    scores = torch.zeros(len(states), 10)
    scores[:, 5] = 1.0
    scores[:, 6] = 1.0 - states[:, 0] / 1000
    return scores


def never(states: torch.Tensor) -> torch.Tensor:
    raise AssertionError("asked without a difference")


def test_equal() -> None:
    served = {"a": [1, 2], "b": [3]}
    found = compare([answer("a", [1, 2]), answer("b", [3])], served, calm(served), never, "float32")
    assert found.lossless
    assert found.identical
    assert found.sentence() == "2 of 2 answers equal token for token"


@pytest.mark.parametrize(
    ("dtype", "noise", "tie"),
    [
        ("float32", 0.0, False),
        ("float32", 0.0014, False),
        ("float32", 0.0016, True),
        ("bfloat16", 0.0, True),
        ("auto", 0.0, True),
    ],
)
def test_first_difference_its_gap_and_the_engines_noise(dtype: str, noise: float, tie: bool) -> None:
    # the difference is answer token 2, chosen from row 2 + 2 - 1 = 3: gap 0.003
    served = {"a": [1, 2, 6, 4], "b": [3]}
    answers = [answer("a", [1, 2, 5, 7]), answer("b", [3])]
    found = compare(answers, served, calm(served, noise), logits, dtype)
    assert (found.equal, found.compared, found.identical) == (1, 2, False)
    first = found.differences[0]
    assert (first.id, first.position, first.expected, first.served) == ("a", 2, 5, 6)
    assert first.gap == pytest.approx(0.003, abs=1e-5)
    assert found.noise == pytest.approx(noise, abs=1e-9)
    assert found.lossless is tie
    assert found.record()["differences"][0]["position"] == 2


def test_noise_never_excuses_a_clear_difference() -> None:
    # row 13 gives a gap of 0.013, above the ceiling of float32, however much the log probabilities moved
    output = [1] * 12 + [5, 7]
    served = {"a": [1] * 12 + [6, 7]}
    found = compare([answer("a", output)], served, calm(served, 5.0), logits, "float32")
    assert found.tie_gap == 1e-2
    assert not found.lossless


@pytest.mark.parametrize("served", [[1, 2], [1, 2, 5, 7, 7]])
def test_another_length_is_never_a_tie(served: list[int]) -> None:
    found = compare([answer("a", [1, 2, 5, 7])], {"a": served}, calm({"a": served}), never, "bfloat16")
    assert not found.identical
    assert not found.lossless
    assert found.differences[0].position == min(len(served), 4)
