"""vLLM's counters of speculative decoding, out of the text of /metrics."""

import re
from dataclasses import dataclass
from itertools import zip_longest

_LINE = re.compile(r"^vllm:spec_decode_(num_\w+?)(?:_total)?\{([^}]*)\} (\S+)$", re.M)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class SpecCounters:
    """Sums over drafts; the difference of two readings is what happened between them."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    """of position 0, 1, ...: drafts whose token at that position was accepted"""

    def __add__(self, other: "SpecCounters") -> "SpecCounters":
        return self._combined(other, 1)

    def __sub__(self, other: "SpecCounters") -> "SpecCounters":
        return self._combined(other, -1)

    def _combined(self, other: "SpecCounters", sign: int) -> "SpecCounters":
        pairs = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return SpecCounters(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted_tokens + sign * other.accepted_tokens,
            tuple(a + sign * b for a, b in pairs),
        )


def parse_counters(text: str) -> SpecCounters:
    """All zero where the server has no drafter; several engines of one server are summed."""
    sums = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    positions: dict[int, int] = {}
    for name, labels, value in _LINE.findall(text):
        if name in sums:
            sums[name] += int(float(value))
        elif name == "num_accepted_tokens_per_pos" and (found := _POSITION.search(labels)):
            at = int(found[1])
            positions[at] = positions.get(at, 0) + int(float(value))
    per_position = tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1))
    return SpecCounters(sums["num_drafts"], sums["num_draft_tokens"], sums["num_accepted_tokens"], per_position)
