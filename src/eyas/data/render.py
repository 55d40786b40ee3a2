"""Messages to token ids through the target's own chat template, in batches where that is quicker."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.data.shapes import Conversation, Message, RowError
from eyas.errors import InputError, first_line

THINKING = (("<think>", "</think>"), ("◁think▷", "◁/think▷"))
"""the marks around thinking that templates know"""
TOOLS_IGNORED = "conversations whose tools the chat template does not render"

_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, UnicodeError, RecursionError)
"""what templates and tokenizers raise on messages that they cannot take"""


class Renderer:
    """The target's template and tokenizer. Raises InputError when it cannot render the simplest conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids) | (
            {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
        )
        try:
            prompt = self._ids([_USER], None, True)
        except _REFUSALS as e:
            raise InputError(
                f"the target's chat template cannot render one user message: {first_line(e)}",
                fix="put a chat template into the checkpoint (chat_template.jinja)",
            ) from None
        if not prompt:
            raise InputError("the target's chat template renders nothing for a user message")
        self._stop_texts = {str(tokenizer.decode([i])) for i in self.stop_ids} - {""}
        self._closing = {kind: self._closing_stop(answer, after) for kind, answer, after in _ENDINGS}
        self.opened_thinking = self._opened_thinking()

    def prompt(self, messages: list[Message], tools: list[Any] | None) -> list[int]:
        """Ids up to where the assistant's answer begins. Raises RowError."""
        return self.encode(self.prompt_text(messages, tools))

    def whole(self, messages: list[Message], tools: list[Any] | None) -> list[int]:
        """Ids of finished messages. Raises RowError."""
        return self.encode(self.whole_text(messages, tools))

    def prompt_text(self, messages: list[Message], tools: list[Any] | None) -> str:
        """What an engine is given to answer, as text. Raises RowError."""
        return self._one(messages, tools, True)

    def whole_text(self, messages: list[Message], tools: list[Any] | None) -> str:
        """Finished messages as text. Raises RowError."""
        return self._one(messages, tools, False)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that the template made. Raises RowError."""
        try:
            return self._encode(text)
        except _REFUSALS as e:
            raise RowError("refused by the tokenizer", first_line(e)) from None

    def encode_after(self, prompt: list[int], text: str) -> list[int]:
        """Ids of the text alone, where an engine has the prompt's ids already.

        Raises RowError if they do not say the text there (tokenizers that put a space before whatever they are given).
        """
        ids = self.encode(text)
        before, both = self.text(prompt), self.text([*prompt, *ids])
        if not both.startswith(before) or both[len(before) :][:1] != text[:1]:
            raise RowError("the tokenizer cannot encode the answer apart from its prompt")
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """The ids as text, special tokens included."""
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def plain_text(self, ids: Sequence[int], keep: Sequence[str]) -> str:
        """The ids as text without special tokens, but for those to keep."""
        special = {i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special and t.content not in keep}
        return self.text([i for i in ids if i not in special])

    def says_stop(self, text: str) -> bool:
        """Whether the text holds what the tokenizer makes a stop token of."""
        return any(s in text for s in self._stop_texts) and not self.stop_ids.isdisjoint(self.encode(text))

    def closing_stop(self, message: Message) -> int | None:
        """The stop token of templates that end a turn with the next turn's header (GLM); None for all others.

        It is another one after a tool call, whose result follows, than after an answer.
        """
        return self._closing["tool" if message.get("tool_calls") else "user"]

    def ignores(self, messages: list[Message], tools: list[Any] | None) -> bool:
        """Whether there are tools of which the prompt says nothing. Raises RowError."""
        return tools is not None and self.prompt_text(messages, tools) == self.prompt_text(messages, None)

    def first_prompts(self, conversations: Sequence[Conversation], notes: Counter[str]) -> list[list[int] | RowError]:
        """The prompt of each conversation's first user turn; what one of them refuses does not touch the others."""
        conversations = [replace(c, messages=first_turn(c.messages)) for c in conversations]
        result: list[list[int] | RowError | None] = [None] * len(conversations)
        plain = [i for i, c in enumerate(conversations) if c.tools is None]
        try:
            batch = self.tokenizer.apply_chat_template(
                [_spelled(conversations[i].messages) for i in plain],
                add_generation_prompt=True,
                return_dict=False,
                padding=False,
                truncation=False,
            )
            for i, ids in zip(plain, batch, strict=True):
                result[i] = list(ids)
        except _REFUSALS:
            pass  # one of them is refused: each goes alone below, and says so itself
        return [
            self._or_error(c, notes) if done is None else done for c, done in zip(conversations, result, strict=True)
        ]

    def _or_error(self, c: Conversation, notes: Counter[str]) -> list[int] | RowError:
        try:
            ids = self.prompt(c.messages, c.tools)
            notes[TOOLS_IGNORED] += self.ignores(c.messages, c.tools)
            return ids
        except RowError as e:
            return e

    def _one(self, messages: list[Message], tools: list[Any] | None, generation: bool) -> str:
        try:
            return self._text(messages, tools, generation)
        except _REFUSALS as e:
            raise RowError("refused by the chat template", first_line(e)) from None

    def _text(self, messages: list[Message], tools: list[Any] | None, generation: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                _spelled(messages), tools=tools, add_generation_prompt=generation, tokenize=False
            )
        )

    def _encode(self, text: str) -> list[int]:
        ids: Any = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(i) for i in ids]

    def _ids(self, messages: list[Message], tools: list[Any] | None, generation: bool) -> list[int]:
        return self._encode(self._text(messages, tools, generation))

    def _closing_stop(self, answer: Message, after: Message) -> int | None:
        turn = [_USER, answer]
        try:
            prompt, whole = self._ids(turn[:1], None, True), self._ids(turn, None, False)
            more = self._ids([*turn, after], None, False)
        except _REFUSALS:
            return None
        ends_itself = any(i in self.stop_ids for i in whole[len(prompt) :])
        next_one = more[len(whole)] if more[: len(whole)] == whole and len(more) > len(whole) else None
        return next_one if not ends_itself and next_one in self.stop_ids else None

    def _opened_thinking(self) -> tuple[str, str] | None:
        """The marks of the thinking that the generation prompt opens and leaves open (DeepSeek R1)."""
        try:
            text = self._text([_USER], None, True)
        except _REFUSALS:
            return None
        return next((marks for marks in THINKING if text.rfind(marks[0]) > text.rfind(marks[1])), None)


_USER: Message = {"role": "user", "content": "a"}
_CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}
_ENDINGS: tuple[tuple[str, Message, Message], ...] = (
    ("user", {"role": "assistant", "content": "b"}, _USER),
    (
        "tool",
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "c", "tool_call_id": "call_0", "name": "f"},
    ),
)
"""what follows an answer, the answer, and the message that follows: for the stop tokens that are headers"""


def _spelled(messages: list[Message]) -> list[Message]:
    """The messages with their thinking under every name that templates read it by.

    `reasoning_content` and `reasoning` as vLLM does (renderers/chat_utils.py), `thinking` for gpt-oss.
    """
    return [
        {**m, "reasoning": m["reasoning_content"], "thinking": m["reasoning_content"]}
        if "reasoning_content" in m
        else m
        for m in messages
    ]


def first_turn(messages: list[Message]) -> list[Message]:
    """Everything up to and including the first user message."""
    return messages[: next(i for i, m in enumerate(messages) if m["role"] == "user") + 1]
