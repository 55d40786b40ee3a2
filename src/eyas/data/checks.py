"""The numeric checks of one sample's states: whole, of the right request, and what the engine really computed with.

The proof: log_softmax(head(norm(h_last))) from the stored last state equals the log probabilities that the engine
returned with its answer. It fails for states of another request, another layer, before or after another norm.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.states.shard import ShardSample

_CHUNK = 1 << 25
"""logits held at once"""
_BUDGET = 2e10
"""multiplications spent on one sample's proof at most, but never fewer than LEAST positions"""
LEAST = 32


class TeacherLike(Protocol):
    """eyas.target.teacher.Teacher, or what a test puts in its place."""

    def logits(self, last_state: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Tolerance:
    """The largest difference of one token, and of the mean over many."""

    worst: float
    mean: float

    def mean_of(self, n: int) -> float:
        """The bound for a mean over n tokens: a mean over few may lie further off."""
        return self.mean + (self.worst - self.mean) / max(n, 1) ** 0.5 / 2


EXACT = Tolerance(1e-3, 2e-4)
"""float32 throughout; 2e-5 is usual"""
HALF = Tolerance(0.1, 0.02)
"""float16: logits up to 32 are rounded to 1/64"""
ROUNDED = Tolerance(0.2, 0.02)
"""float32 states stored as bfloat16: every channel is rounded to 1 part in 256. Measured on SmolLM2: 0.045, 0.0036."""
COARSE = Tolerance(0.5, 0.06)
"""an engine that computes in bfloat16 also rounds logits between 16 and 32 to 1/8. Measured on SmolLM2: 0.21, 0.019;
there the layer before the last is off by 2.4 in the mean, the final norm applied twice by 7.8, a shift by 8.4."""


def tolerance(engine: torch.dtype, stored: torch.dtype) -> Tolerance:
    """What rounding allows when states captured as `engine` are stored as `stored`."""
    if engine == torch.bfloat16:
        return COARSE
    if stored == torch.bfloat16:
        return ROUNDED
    return HALF if torch.float16 in (engine, stored) else EXACT


@dataclass(frozen=True)
class Difference:
    """|recomputed - returned| log probability over n tokens."""

    worst: float = 0.0
    total: float = 0.0
    n: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(self.n, 1)

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(max(self.worst, other.worst), self.total + other.total, self.n + other.n)


def find_fault(stored: ShardSample, token_ids: list[int], prompt_length: int, layers: int, hidden: int) -> str | None:
    """Why these states cannot be those of `token_ids` (all but the last one consumed); None if nothing is wrong."""
    need = len(token_ids) - 1
    rows = stored.states.shape[0]
    if stored.missing_rows:
        return f"{stored.missing_rows} rows were never captured"
    if tuple(stored.states.shape[1:]) != (layers, hidden):
        return f"states of shape {list(stored.states.shape)}, expected [rows, {layers}, {hidden}]"
    if rows < need or len(stored.tokens) < need + 1:
        return f"{rows} rows of states, expected {need}"
    if stored.tokens[: need + 1].tolist() != token_ids:
        return "states of other tokens: the shard holds another request"
    if stored.prompt_length != prompt_length:
        return f"states of a prompt of {stored.prompt_length} tokens, expected {prompt_length}"
    states = stored.states[:need]
    if not bool(torch.isfinite(states).all()):
        return "states that are not finite (NaN or infinity)"
    zero = (states.abs().amax(-1) == 0).any(0)
    if bool(zero.any()):
        return f"a row of zeros in layer number {int(zero.nonzero()[0])} of {layers}"
    if need > 1 and len(set(token_ids[:need])) > 1:
        constant = (states[1:] == states[:1]).all(0).all(-1)
        if bool(constant.any()):
            return f"states that are the same in every row, in layer number {int(constant.nonzero()[0])} of {layers}"
    return None


def compare(
    teacher: TeacherLike, states: torch.Tensor, token_ids: list[int], positions: list[int], logprobs: list[float]
) -> Difference:
    """Log probabilities of `token_ids` at `positions` from the stored states against the engine's `logprobs`.

    states [rows, layers, hidden], last layer = before the final norm; position p is predicted by row p - 1.
    """
    picked = range(len(positions))
    hidden = states.shape[-1]
    vocab = 0
    found = Difference()
    at = 0
    order: list[int] = list(picked)
    while at < len(order):
        some = order[at : at + (max(1, _CHUNK // vocab) if vocab else 1)]
        rows = torch.tensor([positions[i] - 1 for i in some])
        logits = teacher.logits(states[rows, -1].float())
        if not vocab:  # after the first row: how many more are affordable
            vocab = logits.shape[-1]
            affordable = max(LEAST, int(_BUDGET / (hidden * vocab)))
            order = _spread(len(positions), affordable)
        tokens = torch.tensor([token_ids[positions[i]] for i in some])
        ours = torch.log_softmax(logits, -1).gather(-1, tokens.to(logits.device)[:, None])[:, 0].cpu().double()
        theirs = torch.tensor([logprobs[i] for i in some], dtype=torch.float64)
        # equal infinities agree; anything that is not a number does not
        differences = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).nan_to_num(nan=float("inf"))
        found += Difference(float(differences.max()), float(differences.sum()), len(some))
        at += len(some)
    return found


def _spread(n: int, most: int) -> list[int]:
    """At most `most` of 0 .. n - 1, evenly spread, first and last included."""
    if n <= most:
        return list(range(n))
    return sorted({round(i * (n - 1) / (most - 1)) for i in range(most)})


def disagreement(found: Difference, allowed: Tolerance) -> str | None:
    """Why the log probabilities do not agree; None if they do."""
    if found.worst <= allowed.worst and found.mean <= allowed.mean_of(found.n):
        return None
    return (
        f"log probabilities from the stored states differ from the engine's by up to {found.worst:.3g}, "
        f"{found.mean:.3g} in the mean, over {found.n} tokens (at most {allowed.worst:g} and {allowed.mean:g})"
    )
