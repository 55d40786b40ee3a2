"""Which tokens of a kept conversation the target would have produced, from renderings of whole prefixes.

Each assistant turn is a prompt as served and an answer (`turns.py`). Where every turn's ids begin the rendering of the
whole conversation, one sample holds them all. Where they do not (thinking stripped from history, empty think blocks
put in, tokens merged across the generation prompt), each assistant turn becomes a sample with its own prompt.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.data.render import TOOLS_IGNORED, Renderer
from eyas.data.shapes import Conversation, RowError
from eyas.data.turns import Turn, served_turn

WHOLE = "conversations in one sample"
SPLIT = "conversations in one sample per assistant turn (the template rewrites history)"
SPLIT_MERGED = "conversations in one sample per assistant turn (the tokenizer merges answers with what is before them)"
INEXACT = "turns whose generation prompt the template drops again (prompt as served, answer as written)"
MERGED = "turns whose first token the tokenizer would merge with the generation prompt (tokenized apart, as served)"
UNTHOUGHT = "turns whose thinking the template does not render (trained on without it)"
NO_STOP = "turns without a stop token in the template's rendering"
CUT = "conversations cut at a turn to fit data.max_length"
LONG_TURN = "turns left out because they are longer than data.max_length"
LEFT_OUT = "turns left out: "


@dataclass(frozen=True)
class Kept:
    """One sample: `turn` counts assistant turns from 0 (0 as well for a whole conversation)."""

    turn: int
    ids: list[int]
    mask: list[bool]


_Numbered = tuple[int, Turn, int | None]
"""the turn's number, the turn, and the stop token that the next message's header would be"""


def kept_samples(render: Renderer, conversation: Conversation, max_length: int, notes: Counter[str]) -> list[Kept]:
    """The samples of a kept conversation whose last message is the assistant's. Raises RowError; counts in `notes`."""
    messages, tools = conversation.messages, conversation.tools
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and users and i > users[0]]
    if not answers:
        raise RowError("no answer to keep", "the assistant speaks only before the first user turn")
    turns: list[_Numbered] = []
    refused: list[RowError] = []
    for number, i in enumerate(answers):
        try:
            turn = served_turn(render, messages[:i], messages[i], tools)
            turns.append((number, turn, render.closing_stop(messages[i])))
        except RowError as e:
            refused.append(e)
    if not turns:
        raise refused[0]
    counted: Counter[str] = Counter()
    whole = turns[-1][1].ids if len(answers) == 1 else render.whole(messages, tools)
    if all(whole[: len(t.prompt) + len(t.answer)] == t.ids for _, t, _ in turns):
        samples = _in_one(render, whole, turns, max_length, counted)
        counted[WHOLE] += 1
    else:
        samples = _one_each(turns, max_length, counted)
        counted[_why_split(turns)] += 1
    if not samples:
        raise RowError("longer than data.max_length", f"{len(whole)} tokens, at most {max_length}")
    if not any(a and b for s in samples for a, b in zip(s.mask, s.mask[1:], strict=False)):
        raise RowError("empty answer", "fewer than two supervised tokens")
    counted.update(LEFT_OUT + error.reason for error in refused)
    counted[TOOLS_IGNORED] += render.ignores(messages[: answers[0]], tools)
    notes.update(counted)
    return samples


def _in_one(
    render: Renderer, whole: list[int], turns: Sequence[_Numbered], max_length: int, notes: Counter[str]
) -> list[Kept]:
    mask = [False] * len(whole)
    ids = list(whole)
    length, last = 0, turns[0]
    for numbered in turns:
        _, turn, closing = numbered
        begin, end = len(turn.prompt), len(turn.prompt) + len(turn.answer)
        stopped = turn.stopped
        if not stopped:
            if end == len(ids) and closing is not None:
                ids.append(closing)
                mask.append(False)
            # the next turn's header may be this turn's stop token
            stopped = end < len(ids) and ids[end] in render.stop_ids
            end += stopped
        if end > max_length:
            break
        mask[begin:end] = [True] * (end - begin)
        _count(turn, stopped, notes)
        length, last = end, numbered
    notes[CUT] += length > 0 and last is not turns[-1]
    return [Kept(0, ids[:length], mask[:length])] if length else []


def _one_each(turns: Sequence[_Numbered], max_length: int, notes: Counter[str]) -> list[Kept]:
    samples = []
    for number, turn, closing in turns:
        ids, stopped = turn.ids, turn.stopped
        if not stopped and closing is not None:
            ids, stopped = [*ids, closing], True
        if len(ids) > max_length:
            notes[LONG_TURN] += 1
            continue
        _count(turn, stopped, notes)
        begin = len(turn.prompt)
        samples.append(Kept(number, ids, [False] * begin + [True] * (len(ids) - begin)))
    return samples


def _count(turn: Turn, stopped: bool, notes: Counter[str]) -> None:
    notes[INEXACT] += turn.how == "dropped"
    notes[MERGED] += turn.how == "apart"
    notes[UNTHOUGHT] += turn.unthought
    notes[NO_STOP] += not stopped


def _why_split(turns: Sequence[_Numbered]) -> str:
    if any(t.how == "apart" for _, t, _ in turns) and all(t.how in ("as served", "apart") for _, t, _ in turns):
        return SPLIT_MERGED
    return SPLIT
