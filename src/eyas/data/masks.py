"""Which tokens of a kept conversation the target would have produced, from renderings of whole prefixes.

An assistant turn i is what `render(messages[: i + 1])` adds to `render(messages[:i], generation prompt)`, up to and
including its stop token. No text is searched and no offset is used, so any template and tokenizer will do. Where the
rendering of a prefix is not a prefix of the whole rendering (thinking stripped from history, empty think blocks put
in), one sample cannot hold every turn as it was served: each assistant turn becomes a sample with its own prefix.
"""

from collections import Counter
from dataclasses import dataclass

from eyas.data.render import Renderer
from eyas.data.shapes import Conversation, RowError

WHOLE = "conversations in one sample"
SPLIT = "conversations in one sample per assistant turn (the template rewrites history)"
INEXACT = "turns whose generation prompt the template drops again (their first tokens are not as served)"
NO_STOP = "turns without a stop token in the template's rendering"
CUT = "conversations cut at a turn to fit data.max_length"
LONG_TURN = "turns left out because they are longer than data.max_length"


@dataclass(frozen=True)
class Kept:
    """One sample: `turn` counts assistant turns from 0 (0 as well for a whole conversation)."""

    turn: int
    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True)
class _Turn:
    """Prefix ids, ids after the turn, and where the supervised tokens begin and end in the latter."""

    ids: list[int]
    begin: int
    end: int
    exact: bool
    stopped: bool


def kept_samples(render: Renderer, conversation: Conversation, max_length: int, notes: Counter[str]) -> list[Kept]:
    """The samples of a kept conversation whose last message is the assistant's. Raises RowError; counts in `notes`."""
    messages, tools = conversation.messages, conversation.tools
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and users and i > users[0]]
    if not answers:
        raise RowError("no answer to keep", "the assistant speaks only before the first user turn")
    whole = render.whole(messages, tools)
    turns = []
    for i in answers:
        after = whole if i == len(messages) - 1 else render.whole(messages[: i + 1], tools)
        turns.append(_turn(render, render.prompt(messages[:i], tools), after))
    if all(t.exact and whole[: len(t.ids)] == t.ids for t in turns):
        samples = _in_one(render, whole, turns, max_length, notes)
    else:
        samples = _one_each(render, turns, max_length, notes)
    if not samples:
        raise RowError("longer than data.max_length", f"{len(whole)} tokens, at most {max_length}")
    if not any(a and b for s in samples for a, b in zip(s.mask, s.mask[1:], strict=False)):
        raise RowError("empty answer", "fewer than two supervised tokens")
    return samples


def _turn(render: Renderer, before: list[int], after: list[int]) -> _Turn:
    begin = next(
        (k for k, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    end = max((k + 1 for k in range(begin, len(after)) if after[k] in render.stop_ids), default=None)
    return _Turn(after, begin, len(after) if end is None else end, begin == len(before), end is not None)


def _in_one(render: Renderer, whole: list[int], turns: list[_Turn], max_length: int, notes: Counter[str]) -> list[Kept]:
    mask = [False] * len(whole)
    length, last = 0, turns[0]
    ids = list(whole)
    for turn in turns:
        end = turn.end
        if not turn.stopped and render.closing_stop is not None:
            if end == len(ids):
                ids.append(render.closing_stop)
                mask.append(False)
            if ids[end] == render.closing_stop:  # the next turn's header is this turn's stop token
                end += 1
        if end > max_length:
            break
        mask[turn.begin : end] = [True] * (end - turn.begin)
        notes[NO_STOP] += not turn.stopped and end == turn.end
        length, last = end, turn
    if length == 0:
        return []
    notes[WHOLE] += 1
    notes[CUT] += last is not turns[-1]
    return [Kept(0, ids[:length], mask[:length])]


def _one_each(render: Renderer, turns: list[_Turn], max_length: int, notes: Counter[str]) -> list[Kept]:
    samples = []
    for number, turn in enumerate(turns):
        ids = turn.ids[: turn.end]
        closed = turn.stopped
        if not closed and render.closing_stop is not None:
            ids, closed = [*ids, render.closing_stop], True
        if len(ids) > max_length:
            notes[LONG_TURN] += 1
            continue
        notes[INEXACT] += not turn.exact
        notes[NO_STOP] += not closed
        samples.append(Kept(number, ids, [False] * turn.begin + [True] * (len(ids) - turn.begin)))
    notes[SPLIT] += bool(samples)
    return samples
