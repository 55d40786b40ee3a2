"""The prompt of a later turn: the history with the target's own answers, as the template serves it."""

from collections.abc import Sequence
from typing import Any

from eyas.data.render import Renderer
from eyas.data.shapes import Message

_THINKING = (("<think>", "</think>"), ("◁think▷", "◁/think▷"))


def next_prompt(
    render: Renderer, messages: Sequence[Message], tools: list[Any] | None, answers: Sequence[Sequence[int]]
) -> list[int]:
    """Ids of the prompt for user turn number len(answers). Raises RowError when the template refuses it.

    messages: without assistant turns, as prepared; answers: the engine's ids for the user turns so far, in order.
    """
    history: list[Message] = []
    turn = 0
    for message in messages:
        history.append(message)
        if message["role"] != "user":
            continue
        if turn == len(answers):
            break
        history.append(answer_message(render, answers[turn]))
        turn += 1
    return render.prompt(history, tools)


def answer_message(render: Renderer, ids: Sequence[int]) -> Message:
    """The assistant message that a server would have returned for these output ids.

    Thinking goes to `reasoning_content` where the template knows about thinking; whether it stays in the history is the
    template's business.
    """
    tokenizer: Any = render.tokenizer
    ids = list(ids)
    while ids and ids[-1] in render.stop_ids:
        ids.pop()

    def text(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=True))

    for opening, closing in _THINKING:
        if closing not in str(tokenizer.chat_template):
            continue
        mark = tokenizer.convert_tokens_to_ids(closing)
        if isinstance(mark, int) and mark in ids:  # one token, possibly a special one that decoding would skip
            at = ids.index(mark)
            thought, content = text(ids[:at]), text(ids[at + 1 :])
        else:
            thought, found, content = text(ids).partition(closing)
            if not found:
                continue
        thought = thought.strip("\n").removeprefix(opening).strip("\n")
        return {"role": "assistant", "content": content.lstrip("\n"), "reasoning_content": thought}
    return {"role": "assistant", "content": text(ids)}
