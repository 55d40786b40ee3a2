"""Messages to token ids through the target's own chat template, in batches where that is quicker."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eyas.data.shapes import Conversation, Message, RowError
from eyas.errors import InputError

_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, UnicodeError)
"""what templates and tokenizers raise on messages that they cannot take"""


class Renderer:
    """The target's template and tokenizer. Raises InputError when it cannot render the simplest conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids) | (
            {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
        )
        try:
            prompt = self._ids([{"role": "user", "content": "a"}], None, True)
        except _REFUSALS as e:
            raise InputError(
                f"the target's chat template cannot render one user message: {_first_line(e)}",
                fix="put a chat template into the checkpoint (chat_template.jinja)",
            ) from None
        if not prompt:
            raise InputError("the target's chat template renders nothing for a user message")
        self.closing_stop = self._closing_stop()

    def prompt(self, messages: list[Message], tools: list[Any] | None) -> list[int]:
        """Ids up to where the assistant's answer begins. Raises RowError."""
        return self._one(messages, tools, True)

    def whole(self, messages: list[Message], tools: list[Any] | None) -> list[int]:
        """Ids of finished messages. Raises RowError."""
        return self._one(messages, tools, False)

    def first_prompts(self, conversations: Sequence[Conversation]) -> list[list[int] | RowError]:
        """The prompt of each conversation's first user turn; what one of them refuses does not touch the others."""
        conversations = [replace(c, messages=first_turn(c.messages)) for c in conversations]
        result: list[list[int] | RowError | None] = [None] * len(conversations)
        plain = [i for i, c in enumerate(conversations) if c.tools is None]
        try:
            batch = self.tokenizer.apply_chat_template(
                [conversations[i].messages for i in plain],
                add_generation_prompt=True,
                return_dict=False,
                padding=False,
                truncation=False,
            )
            for i, ids in zip(plain, batch, strict=True):
                result[i] = list(ids)
        except _REFUSALS:
            pass  # one of them is refused: each goes alone below, and says so itself
        return [self._or_error(c) if done is None else done for c, done in zip(conversations, result, strict=True)]

    def _or_error(self, c: Conversation) -> list[int] | RowError:
        try:
            return self.prompt(c.messages, c.tools)
        except RowError as e:
            return e

    def _one(self, messages: list[Message], tools: list[Any] | None, generation: bool) -> list[int]:
        try:
            return self._ids(messages, tools, generation)
        except _REFUSALS as e:
            raise RowError("refused by the chat template", _first_line(e)) from None

    def _ids(self, messages: list[Message], tools: list[Any] | None, generation: bool) -> list[int]:
        ids: Any = self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation, return_dict=False
        )
        return [int(i) for i in ids]

    def _closing_stop(self) -> int | None:
        """The stop token of templates that end a turn with the next turn's header (GLM); None for all others."""
        turn: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            prompt, whole = self._ids(turn[:1], None, True), self._ids(turn, None, False)
            more = self._ids([*turn, turn[0]], None, False)
        except _REFUSALS:
            return None
        ends_itself = any(i in self.stop_ids for i in whole[len(prompt) :])
        next_one = more[len(whole)] if more[: len(whole)] == whole and len(more) > len(whole) else None
        return next_one if not ends_itself and next_one in self.stop_ids else None


def first_turn(messages: list[Message]) -> list[Message]:
    """Everything up to and including the first user message."""
    return messages[: next(i for i, m in enumerate(messages) if m["role"] == "user") + 1]


def _first_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return lines[0] if lines else type(e).__name__
