"""Whether the drafter changed an output token, and if so, whether the target itself was undecided there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eyas.prove.answers import Answer

TIE = {"float32": 1e-3}
TIE_REDUCED = 0.25
"""largest gap of two log probabilities that counts as a tie. In bfloat16 logits between 16 and 32 lie 0.125 apart, and
the target computes K + 1 positions at once with a drafter and one without: different kernels, different rounding."""


@dataclass(frozen=True)
class Difference:
    """The first token in which a served answer differs."""

    id: str
    position: int
    """of the answer, from 0"""
    expected: int | None
    """None: the answer goes on beyond its end"""
    served: int | None
    gap: float | None
    """log p(expected) - log p(served) under the target; None where one of them does not exist"""


@dataclass(frozen=True)
class Losslessness:
    compared: int
    equal: int
    differences: list[Difference]
    tie_gap: float

    @property
    def lossless(self) -> bool:
        return self.equal == self.compared

    @property
    def ties(self) -> int:
        return sum(d.gap is not None and abs(d.gap) <= self.tie_gap for d in self.differences)

    @property
    def lossless_up_to_ties(self) -> bool:
        """Every difference begins where the target's two best tokens are as good as equal."""
        return self.ties == len(self.differences)

    def record(self) -> dict[str, Any]:
        first = self.differences[0] if self.differences else None
        return {
            "compared": self.compared,
            "equal": self.equal,
            "ties": self.ties,
            "tie_gap": self.tie_gap,
            "first_difference": None if first is None else vars(first),
        }

    def sentence(self) -> str:
        text = f"{self.equal} of {self.compared} answers equal token for token"
        if self.differences:
            d = self.differences[0]
            text += (
                f"; first difference: {d.id}, token {d.position}: {d.served} instead of {d.expected}"
                f"; {self.ties} of {len(self.differences)} differences are ties of the target (gap <= {self.tie_gap})"
            )
        return text


def compare(
    answers: list[Answer], served: dict[str, list[int]], logits: Callable[[Tensor], Tensor], dtype: str
) -> Losslessness:
    """Compares served tokens with the answers. `logits`: last states [m, hidden] -> [m, vocab], for differences only.

    dtype: the engine's ("auto" counts as reduced precision).
    """
    differences = []
    for answer in answers:
        got = served[answer.id]
        if got != answer.expected:
            differences.append(_difference(answer, got, logits))
    return Losslessness(len(answers), len(answers) - len(differences), differences, TIE.get(dtype, TIE_REDUCED))


def _difference(answer: Answer, got: list[int], logits: Callable[[Tensor], Tensor]) -> Difference:
    want = answer.expected
    at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
    expected = want[at] if at < len(want) else None
    other = got[at] if at < len(got) else None
    gap = None
    if expected is not None and other is not None:
        row = len(answer.prompt_ids) + at - 1  # the state from which this token was chosen
        scores = logits(answer.states()[row : row + 1, -1])[0].log_softmax(-1)
        gap = float(scores[expected] - scores[other])
    return Difference(answer.id, at, expected, other, gap)
