"""The answers that a drafter is measured on: harvested prompts, the target's greedy tokens, and their states."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, tensor

from eyas.engine.base import Request
from eyas.prove.acceptance import Sequence
from eyas.recipe import Recipe
from eyas.states.store import HarvestStore, SampleRef
from eyas.target.info import TargetInfo

SPLITS = {"seen": "train", "held_out": "holdout"}
"""group in verify.json -> split of the harvest"""


@dataclass(frozen=True)
class Answer:
    """One prompt and what the target says to it, without a drafter."""

    id: str
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    """of each output token, as the engine gave them"""
    stopped: bool
    """ended with a stop token, not by its length"""
    states: Callable[[], Tensor]
    """reads [rows, layers, hidden]; the last layer is the state before the final norm"""
    spare: int = 0
    """known tokens at the end that are not asked for again"""

    def sparing(self, tokens: int) -> "Answer":
        """For drafts of `tokens`: an answer cut by its length spares so many, which judge the last draft."""
        return self if self.stopped else replace(self, spare=min(tokens, len(self.output_ids) - 1))

    @property
    def expected(self) -> list[int]:
        """What the engine must answer when asked again."""
        return self.output_ids[: len(self.output_ids) - self.spare]

    def request(self, recipe: Recipe) -> Request:
        """The same request again: ended by length at a known token, or free to stop where it stopped."""
        room = recipe.data.max_length - len(self.prompt_ids)
        free = max(len(self.output_ids), min(recipe.engine.sampling.max_tokens, room))
        return Request(self.id, self.prompt_ids, free if self.stopped else len(self.expected))

    def request_of(self, max_tokens: int) -> Request:
        return Request(f"{self.id} (warm-up)", self.prompt_ids, max_tokens)

    def sequence(self) -> Sequence:
        states = self.states()
        ids = tensor([*self.prompt_ids, *self.output_ids])
        return Sequence(ids, len(self.prompt_ids), states[:, :-1].flatten(1).float(), len(self.expected))


def chosen(
    store: HarvestStore, count: int, first: Mapping[str, Collection[str]] | None = None
) -> dict[str, list[SampleRef]]:
    """At most `count` samples of each group, spread evenly over the harvest; the same ones in every run.

    Those with the ids in `first` are among them in any case, and come first.
    """
    found: dict[str, list[SampleRef]] = {}
    for group, split in SPLITS.items():
        refs = [r for r in store.samples(split) if r.supervised > 0]
        wanted = set() if first is None else set(first.get(group, ()))
        begin = [r for r in refs if r.id in wanted]
        found[group] = [*begin, *_spread([r for r in refs if r.id not in wanted], max(0, count - len(begin)))]
    return found


def harvested(store: HarvestStore, refs: list[SampleRef], target: TargetInfo) -> list[Answer]:
    """The harvest's own answers: the reference when it was greedy."""
    return [_harvested(store, ref, target) for ref in refs]


def harvest_is_greedy(recipe: Recipe) -> bool:
    """Whether the harvested answers are what the target says greedily."""
    return recipe.data.responses == "regenerate" and recipe.engine.sampling.temperature == 0.0


def _harvested(store: HarvestStore, ref: SampleRef, target: TargetInfo) -> Answer:
    tokens = store.tokens(ref)
    first = int(tokens.loss_mask.nonzero()[0])
    ids = tokens.token_ids.tolist()
    stopped = ids[-1] in target.eos_token_ids
    return Answer(ref.id, ids[:first], ids[first:], tokens.logprobs.tolist(), stopped, lambda: store.load(ref).states)


def _spread(refs: list[SampleRef], count: int) -> list[SampleRef]:
    if len(refs) <= count:
        return refs
    return [refs[i * len(refs) // count] for i in range(count)]
