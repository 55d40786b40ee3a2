"""What a row means: the shapes in which conversations come, recognised row by row, as OpenAI-style messages."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_ANSWERS = ("response", "completion", "answer", "output")


class RowError(Exception):
    """A row that cannot be used: `reason` is one of few (counted), `detail` is about this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Conversation:
    """Messages in order (role, content, and where given reasoning_content, tool_calls, tool_call_id, name)."""

    shape: str
    messages: list[Message]
    tools: list[Any] | None

    @property
    def id(self) -> str:
        """20 hex digits that depend on the content alone."""
        text = json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def read_row(row: Any) -> Conversation:
    """The conversation in a row of any known shape. Raises RowError."""
    if not isinstance(row, Mapping):
        raise RowError("not an object", f"found {_kind(row)}")
    shape, raw = _raw_messages(row)
    if not raw:
        raise RowError("no messages")
    messages = [_message(m, i) for i, m in enumerate(raw)]
    tools = _tools(row.get("tools"))
    if not any(m["role"] == "user" for m in messages):
        raise RowError("no user turn")
    conversation = Conversation(shape, messages, tools)
    try:
        _ = conversation.id
    except UnicodeEncodeError:
        raise RowError("text is not valid Unicode", "it holds half of a surrogate pair") from None
    except (TypeError, ValueError, RecursionError) as e:
        raise RowError("tools or tool calls that JSON cannot hold", str(e)) from None
    return conversation


def asked(conversation: Conversation) -> tuple[Conversation, int, str | None]:
    """What a regenerated conversation keeps of the file's: everything but the answers.

    Consecutive user messages become one, but not those of `turns`: these are questions one after the other. Tool
    results belong to the file's own calls, so the conversation ends with the user turn before the first of them.
    Returns the conversation, its user turns, and a note if it was cut.
    """
    kept: list[Message] = []
    note, previous = None, ""
    for message in conversation.messages:
        role = message["role"]
        if role == "tool":
            note = "cut before tool results"
            break
        if role == "user" and previous == "user" and conversation.shape != "turns":
            kept[-1] = {**kept[-1], "content": f"{kept[-1]['content']}\n\n{message['content']}"}
        elif role != "assistant":
            kept.append(message)
        previous = role
    while kept and kept[-1]["role"] != "user":
        kept.pop()
    turns = sum(m["role"] == "user" for m in kept)
    if turns == 0:
        raise RowError("no user turn")
    return Conversation(conversation.shape, kept, conversation.tools), turns, note


def answered(conversation: Conversation) -> Conversation:
    """What a kept conversation trains on: everything up to its last assistant turn."""
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise RowError("no answer to keep")
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and not (message["content"] or message.get("tool_calls")):
            raise RowError("empty answer", f"message {i}")
    return Conversation(conversation.shape, messages, conversation.tools)


def _raw_messages(row: Mapping[str, Any]) -> tuple[str, list[Any]]:
    for key, shape in (("messages", "messages"), ("conversations", "conversations"), ("conversation", "conversations")):
        if row.get(key) is not None:
            return shape, _listed(row[key], key)
    system = [{"role": "system", "content": row["system"]}] if _text(row, "system") else []
    if row.get("turns") is not None:
        turns = _listed(row["turns"], "turns")
        return "turns", [*system, *({"role": "user", "content": t} if isinstance(t, str) else t for t in turns)]
    if _text(row, "instruction"):
        question = row["instruction"] + (f"\n\n{row['input']}" if _text(row, "input") else "")
        return "instruction", [*system, {"role": "user", "content": question}, *_answer(row)]
    for key in ("prompt", "question", "query"):
        if isinstance(row.get(key), list):
            return key, [*system, *row[key], *_answer(row)]
        if row.get(key) is not None:
            return key, [*system, {"role": "user", "content": row[key]}, *_answer(row)]
    if row.get("text") is not None:
        return "text", [{"role": "user", "content": row["text"]}]
    keys = ", ".join(sorted(map(str, row))[:8]) or "none"
    raise RowError("no known shape", f"its keys: {keys}")


def _answer(row: Mapping[str, Any]) -> list[Message]:
    for key in _ANSWERS:
        if _text(row, key):
            return [{"role": "assistant", "content": row[key]}]
        if isinstance(row.get(key), list) and row[key] and isinstance(row[key][0], Mapping):
            return list(row[key])
    return []


def _text(row: Mapping[str, Any], key: str) -> bool:
    return isinstance(row.get(key), str) and bool(row[key].strip())


def _listed(value: Any, key: str) -> list[Any]:
    if isinstance(value, str):  # a JSON list inside a string, as in CSV files
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise RowError("messages are not a list", f"{key} is text") from None
    if not isinstance(value, list):
        raise RowError("messages are not a list", f"{key} is {_kind(value)}")
    return value


def _message(raw: Any, i: int) -> Message:
    if not isinstance(raw, Mapping):
        raise RowError("message is not an object", f"message {i} is {_kind(raw)}")
    role = raw.get("role", raw.get("from"))
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise RowError("unknown role", f"message {i}: {role!r}")
    message: Message = {"role": ROLES[role.lower()]}
    calls = raw.get("tool_calls") or None
    content = _content(raw["content"] if raw.get("content") is not None else raw.get("value"), i)
    if message["role"] == "user" and not content.strip():
        raise RowError("empty user turn", f"message {i}")
    message["content"] = content
    if message["role"] == "assistant":
        reasoning = raw.get("reasoning_content", raw.get("reasoning"))
        if reasoning:
            if not isinstance(reasoning, str):
                raise RowError("content is not text", f"message {i}: reasoning is {_kind(reasoning)}")
            message["reasoning_content"] = reasoning
        if calls is not None:
            message["tool_calls"] = _calls(calls, i)
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    return message


def _content(content: Any, i: int) -> str:
    """Text parts joined by line ends, as vLLM does for templates that want text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("content is not text", f"message {i}: {_kind(content)}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif (
            isinstance(part, Mapping)
            and isinstance(part.get("text"), str)
            and part.get("type", "text") in ("text", "input_text")
        ):
            texts.append(part["text"])
        else:
            found = part.get("type", "?") if isinstance(part, Mapping) else _kind(part)
            raise RowError("content part is not text", f"message {i}: {found}")
    return "\n".join(texts)


def _calls(calls: Any, i: int) -> list[Any]:
    """Tool calls with their arguments as objects where they are JSON text, as vLLM hands them to a template."""
    if not isinstance(calls, list):
        raise RowError("tool calls are not a list", f"message {i}: {_kind(calls)}")
    result = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if (
            not isinstance(call, Mapping)
            or not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
        ):
            raise RowError("tool call without a function", f"message {i}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except json.JSONDecodeError:
                raise RowError("tool call arguments are not JSON", f"message {i}") from None
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise RowError("tools are not a list", "text that is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
        raise RowError("tools are not a list", f"found {_kind(tools)}")
    return [dict(t) for t in tools]


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
