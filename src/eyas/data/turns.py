"""One assistant turn as it was served: the prompt's own ids, and what the target would have said after them.

The prompt is the rendering of what came before, with the generation prompt. The answer is what the rendering with the
turn adds to it, up to and including the first stop token, where an engine stops. Nothing before the end of the prompt
is ever an answer, so that no template, however it rewrites its history, gets a user's words supervised.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from eyas.data.render import THINKING, Renderer
from eyas.data.shapes import Message, RowError

How = Literal["as served", "apart", "rewritten", "dropped"]
"""apart: the tokenizer would merge the answer with the prompt; rewritten: the template renders the prompt otherwise
once it is answered; dropped: it also drops (a part of) the generation prompt"""


@dataclass(frozen=True)
class Turn:
    """Ids of the prompt and of the answer up to and including its stop token, if `stopped`."""

    prompt: list[int]
    answer: list[int]
    stopped: bool
    how: How
    unthought: bool
    """the message's thinking is not in the rendering"""

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.answer]


def served_turn(render: Renderer, before: list[Message], message: Message, tools: list[Any] | None) -> Turn:
    """The turn of the assistant's `message`. Raises RowError where the target cannot have said this, or not so."""
    if any(render.says_stop(t) for t in _texts(message)):
        raise RowError("answer contains the stop token")
    prompt_text, after_text = render.prompt_text(before, tools), render.whole_text([*before, message], tools)
    prompt, after = render.encode(prompt_text), render.encode(after_text)
    how: How
    if after_text.startswith(prompt_text):
        text = after_text[len(prompt_text) :]
        if after[: len(prompt)] == prompt:
            how, answer = "as served", after[len(prompt) :]
        else:
            how, answer = "apart", render.encode_after(prompt, text)
    else:
        at, how = _found(render, before, message, tools, prompt_text, after_text)
        text = after_text[at:]
        answer = render.encode_after(prompt, text)
    thought = _unrendered_thought(render, before, message, tools, text, after_text)
    if thought and (opened := _opened(render, prompt_text)):
        said = _thought_aloud(opened, prompt_text, message)
        answer, thought = [*render.encode_after(prompt, said), *(i for i in answer if i in render.stop_ids)], ""
    elif filled := _filled(text, thought):
        answer, thought = render.encode_after(prompt, filled), ""
    end = next((k + 1 for k, i in enumerate(answer) if i in render.stop_ids), None)
    return Turn(prompt, answer[:end], end is not None, how, bool(thought))


def _texts(message: Message) -> Iterator[str]:
    yield message["content"]
    yield message.get("reasoning_content", "")
    for call in message.get("tool_calls", []):
        yield json.dumps(call["function"], ensure_ascii=False)


def _found(
    render: Renderer,
    before: list[Message],
    message: Message,
    tools: list[Any] | None,
    prompt_text: str,
    after_text: str,
) -> tuple[int, How]:
    """Where the answer begins in a rendering that does not begin with the prompt. Raises RowError where none can say.

    Not searched for but found by changes: what follows the last place that depends on the messages before, and comes
    before the first that depends on the answer, holds the turn's header and nothing else.
    """
    words = "".join((*_texts(message), *_texts(before[-1])))
    mark = next(c for c in map(chr, range(0x4E00, 0x9FFF)) if c not in words)
    asked = {**before[-1], "content": before[-1]["content"] + mark}
    with_asked = render.whole_text([*before[:-1], asked, message], tools)
    earliest = len(after_text) - _shared(after_text[::-1], with_asked[::-1])
    latest = _shared(after_text, render.whole_text([*before, _altered(message, mark)], tools))
    header = prompt_text[_shared(prompt_text, render.whole_text(before, tools)) :]
    if with_asked != after_text and earliest <= latest < len(after_text):
        at = after_text.rfind(header, earliest, latest) if header else -1
        if at >= 0:
            return at + len(header), "rewritten"
        if message["content"] and not message.get("tool_calls"):
            return latest, "dropped"  # the answer's own text, without a header that is not as served
    raise RowError("the chat template does not show where the answer begins")


def _altered(message: Message, mark: str) -> Message:
    """The message with the same keys and other words."""
    altered = dict(message)
    for key in ("content", "reasoning_content"):
        if altered.get(key):
            altered[key] = mark
    if calls := message.get("tool_calls"):
        altered["tool_calls"] = [{**c, "function": {**c["function"], "name": mark}} for c in calls]
    return altered


def _shared(a: str, b: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _unrendered_thought(
    render: Renderer, before: list[Message], message: Message, tools: list[Any] | None, text: str, after_text: str
) -> str:
    """The message's thinking if the rendering leaves it out. Raises RowError if it leaves out the answer itself."""
    found = _squeezed(text)

    def has_no_effect(changed: Message) -> bool:
        return render.whole_text([*before, changed], tools) == after_text

    if "tool_calls" in message and has_no_effect({k: v for k, v in message.items() if k != "tool_calls"}):
        raise RowError("the chat template does not render tool calls")
    thought, content = _parted(message["content"])
    if _squeezed(content) not in found and has_no_effect({**message, "content": thought}):
        raise RowError("the chat template does not render the answer")
    thought = str(message.get("reasoning_content", thought))
    return "" if _squeezed(thought) in found else thought


def _parted(content: str) -> tuple[str, str]:
    """Thinking that stands in the content, and the rest."""
    for opening, closing in THINKING:
        thought, found, rest = content.partition(closing)
        if found:
            return thought.strip().removeprefix(opening), rest
    return "", content


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _opened(render: Renderer, prompt_text: str) -> tuple[str, str] | None:
    """The marks of the thinking that the end of this prompt opens."""
    marks = render.opened_thinking
    return marks if marks and prompt_text.rstrip().endswith(marks[0]) else None


def _thought_aloud(opened: tuple[str, str], prompt_text: str, message: Message) -> str:
    """What the target says after a prompt that opens its thinking. Raises RowError if that cannot be known.

    It is the content where the thinking stands in it. Thinking on its own could be joined to it in several ways.
    """
    opening, closing = opened
    content = str(message["content"])
    if closing not in content or "reasoning_content" in message or message.get("tool_calls"):
        raise RowError("the chat template opens thinking that it does not render")
    tail = prompt_text[prompt_text.rfind(opening) :]
    return content.removeprefix(tail) if content.startswith(tail) else content.removeprefix(opening)


def _filled(text: str, thought: str) -> str:
    """The answer with its thinking in the empty block that the template puts first (Kimi K2); "" if there is none."""
    for opening, closing in THINKING:
        before, block, rest = text.partition(opening + closing)
        if block and not before.strip():
            if rest.lstrip().startswith(opening):  # the thinking stands in the content, in a block of its own
                return before + rest.lstrip()
            if thought:
                return f"{before}{opening}{thought}{closing}{rest}"
    return ""
