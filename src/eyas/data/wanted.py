"""Which of the target's answers the recipe wants to train on."""

from dataclasses import dataclass

from eyas.data.schema import LENGTH
from eyas.recipe import DataPart

REPETITIVE = "repetitive"
CUT = "cut by length"


@dataclass(frozen=True)
class Wanted:
    """`answers` to each prompt; cut and repetitive ones or not."""

    answers: int = 1
    cut: bool = True
    repetitive: bool = True

    @classmethod
    def of(cls, data: DataPart) -> "Wanted":
        return cls(data.samples_per_prompt, data.cut_answers == "keep", data.repetitive_answers == "keep")

    def why_not(self, finish_reason: str, looped: int | None) -> str | None:
        """REPETITIVE or CUT for an answer to be dropped. One that was cut inside its loop is repetitive first."""
        if looped and not self.repetitive:
            return REPETITIVE
        if finish_reason == LENGTH and not self.cut:
            return CUT
        return None
