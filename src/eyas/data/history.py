"""The prompt of a later turn: the history with the target's own answers, as the template serves it."""

from collections.abc import Sequence
from typing import Any

from eyas.data.render import THINKING, Renderer
from eyas.data.shapes import Message

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


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
    """The assistant message that vLLM's reasoning parsers would have made of these output ids.

    As `extract_reasoning` in vllm/reasoning/basic_parsers.py (deepseek_r1) and vllm/parser/engine/parser_engine.py
    (qwen3, kimi_k2, glm45): the text is parted at the closing mark, what follows it is the content as it stands, line
    ends included; thinking that is not closed is all there is. The one rule for all of them drops blanks at the
    thinking's end, as kimi_k2 and glm45 do (deepseek_r1 and qwen3, whose templates do so themselves, do not). It takes
    an answer without any mark for content unless the prompt opens thinking, since targets answer without thinking as
    well: the parsers of targets that always think would call it thinking. gpt-oss answers in channels
    (vllm/parser/harmony.py). Whether thinking stays in the history is the template's business.
    """
    ids = list(ids)
    while ids and ids[-1] in render.stop_ids:
        ids.pop()
    template = str(render.tokenizer.chat_template)
    if "<|channel|>" in template:
        return _harmony(render.plain_text(ids, keep=_HARMONY))
    for opening, closing in THINKING:
        if closing not in template:
            continue
        text = render.plain_text(ids, keep=(opening, closing))
        thought, closed, content = text.partition(closing)
        if closed or render.opened_thinking == (opening, closing) or text.lstrip().startswith(opening):
            before, opened, after = thought.partition(opening)
            return _message(content, after if opened else before)
    return _message(render.plain_text(ids, keep=()))


def _harmony(text: str) -> Message:
    """The channels of a gpt-oss answer, whose first header the prompt begins: analysis is thinking, final is content,
    and so is commentary without a recipient."""
    said = {"thinking": "", "content": ""}
    for part in text.split("<|start|>"):
        header, _, body = part.partition("<|message|>")
        recipient, _, channel = header.partition("<|channel|>")
        if "to=" in recipient or "to=" in channel:
            continue
        said["thinking" if channel.startswith("analysis") else "content"] += body.removesuffix("<|end|>")
    return _message(said["content"], said["thinking"])


def _message(content: str, thought: str = "") -> Message:
    message: Message = {"role": "assistant", "content": content}
    return {**message, "reasoning_content": thought.rstrip()} if thought.strip() else message
