"""Whether the drafter changed an output token, and if so, whether the target itself was undecided there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eyas.prove.answers import Answer

TIE_FLOOR = {"float32": 1e-3}
TIE_CEILING = {"float32": 1e-2}
TIE_REDUCED = 0.25
"""Largest gap of two log probabilities that counts as a tie. With a drafter the target computes K + 1 positions of a
request at once, in other batches: the same sums in another order. How far that moves a log probability is measured in
the same run (`noise`), on the tokens that both passes have in common; a gap of twice that can close. Float32: between
TIE_FLOOR and TIE_CEILING (on SmolLM2 two correct float32 implementations were seen 2.3e-3 apart). Other precisions:
0.25, since in bfloat16 logits between 16 and 32 lie 0.125 apart."""
SHOWN = 20
"""differences listed in verify.json"""


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
    noise: float
    """largest movement of a common token's log probability between the two passes"""

    @property
    def identical(self) -> bool:
        return self.equal == self.compared

    @property
    def ties(self) -> int:
        return sum(self._is_tie(d) for d in self.differences)

    @property
    def lossless(self) -> bool:
        """Equal token for token, but for answers that part where the target's two tokens are as good as equal."""
        return self.ties == len(self.differences)

    def _is_tie(self, difference: Difference) -> bool:
        return difference.gap is not None and abs(difference.gap) <= self.tie_gap

    def record(self) -> dict[str, Any]:
        return {
            "compared": self.compared,
            "equal": self.equal,
            "ties": self.ties,
            "tie_gap": self.tie_gap,
            "noise": self.noise,
            "differences": [vars(d) for d in self.differences[:SHOWN]],
        }

    def sentence(self) -> str:
        text = f"{self.equal} of {self.compared} answers equal token for token"
        if self.differences:
            worst = next((d for d in self.differences if not self._is_tie(d)), self.differences[0])
            text += (
                f"; {self.ties} of {len(self.differences)} differences begin at ties of the target (gap <= "
                f"{self.tie_gap:.2g}, from the engine's own noise); {worst.id}, token {worst.position}: "
                f"{worst.served} instead of {worst.expected}, gap {worst.gap}"
            )
        return text


def compare(
    answers: list[Answer],
    served: dict[str, list[int]],
    served_logprobs: dict[str, list[float]],
    logits: Callable[[Tensor], Tensor],
    dtype: str,
) -> Losslessness:
    """Compares served tokens with the answers. `logits`: last states [m, hidden] -> [m, vocab], for differences only.

    dtype: the engine's ("auto" counts as reduced precision).
    """
    differences: list[Difference] = []
    noise = 0.0
    for answer in answers:
        got = served[answer.id]
        same = _common(answer.expected, got)
        moved = zip(answer.logprobs[:same], served_logprobs[answer.id][:same], strict=True)
        noise = max([noise, *(abs(a - b) for a, b in moved)])
        if got != answer.expected:
            differences.append(_difference(answer, got, same, logits))
    floor, ceiling = TIE_FLOOR.get(dtype, TIE_REDUCED), TIE_CEILING.get(dtype, TIE_REDUCED)
    tie = min(max(floor, 2 * noise), ceiling)
    return Losslessness(len(answers), len(answers) - len(differences), differences, tie, noise)


def _common(want: list[int], got: list[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))


def _difference(answer: Answer, got: list[int], at: int, logits: Callable[[Tensor], Tensor]) -> Difference:
    want = answer.expected
    expected = want[at] if at < len(want) else None
    other = got[at] if at < len(got) else None
    gap = None
    if expected is not None and other is not None:
        row = len(answer.prompt_ids) + at - 1  # the state from which this token was chosen
        scores = logits(answer.states()[row : row + 1, -1])[0].log_softmax(-1)
        gap = float(scores[expected] - scores[other])
    return Difference(answer.id, at, expected, other, gap)
