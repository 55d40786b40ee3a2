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
_SYSTEMS = ("system", "system_prompt")
_MEANT_NULLS = frozenset({"default", "const"})
"""keys of JSON Schema under which null means something; it does in lists too (enum)"""
NO_SHAPE = "no known shape"


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
    unread_answer: str = ""
    """why the row's own answer is not among the messages, although it has one"""

    @property
    def id(self) -> str:
        """20 hex digits that depend on the content alone."""
        text = json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def read_row(row: Any) -> Conversation:
    """The conversation in a row of any known shape. Raises RowError."""
    try:
        return _read(row)
    except RecursionError:
        raise RowError("nested too deeply") from None


def _read(row: Any) -> Conversation:
    if not isinstance(row, Mapping):
        raise RowError("not an object", f"found {_kind(row)}")
    shape, raw = _raw_messages(row)
    if not raw:
        raise RowError("no messages")
    messages = _with_system(row, [_message(m, i) for i, m in enumerate(raw)])
    tools = _tools(row.get("tools"))
    if not any(m["role"] == "user" for m in messages):
        raise RowError("no user turn")
    conversation = Conversation(shape, messages, tools, _unread_answer(row, shape))
    try:
        _ = conversation.id
    except UnicodeEncodeError:
        raise RowError("text is not valid Unicode", "it holds half of a surrogate pair") from None
    except (TypeError, ValueError) as e:
        raise RowError("tools or tool calls that JSON cannot hold", str(e)) from None
    return conversation


def is_messages(value: Any) -> bool:
    """Whether these are messages: a list of objects with roles."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and _role(m) for m in value)


def without_nulls(value: Any, meant: frozenset[str] = frozenset()) -> Any:
    """Without the keys that hold null, at any depth, but for those `meant`. Members of lists stay.

    Parquet and Arrow give every object the keys of all others in its column: null there means absent.
    """
    if isinstance(value, Mapping):
        return {k: without_nulls(v, meant) for k, v in value.items() if v is not None or k in meant}
    if isinstance(value, list):
        return [without_nulls(v, meant) for v in value]
    return value


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
    if conversation.unread_answer:
        raise RowError("answer is not text", conversation.unread_answer)
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
            if row.get("history"):
                raise RowError("history beside messages", f"history and {key}")
            return shape, _listed(row[key], key)
    if row.get("turns") is not None:
        turns = _listed(row["turns"], "turns")
        return "turns", [{"role": "user", "content": t} if isinstance(t, str) else t for t in turns]
    before = _history(row.get("history"))
    if row.get("instruction") not in (None, ""):
        question = row["instruction"]
        if (more := _input(row.get("input"))) and isinstance(question, str):
            question += f"\n\n{more}"
        return "instruction", [*before, {"role": "user", "content": question}, *_answer(row)]
    for key in ("prompt", "question", "query"):
        if isinstance(row.get(key), list):
            return key, [*before, *row[key], *_answer(row)]
        if row.get(key) is not None:
            return key, [*before, {"role": "user", "content": row[key]}, *_answer(row)]
    if row.get("text") is not None:
        return "text", [*before, {"role": "user", "content": row["text"]}]
    keys = ", ".join(sorted(map(str, row))[:8]) or "none"
    raise RowError(NO_SHAPE, f"its keys: {keys}")


def _with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The messages after the system prompt that stands beside them."""
    found = {}
    for key in _SYSTEMS:
        value = row.get(key)
        if value and not isinstance(value, str):
            raise RowError("system is not text", f"{key} is {_kind(value)}")
        if value and value.strip():
            found[key] = value
    given = {m["content"] for m in messages if m["role"] in ("system", "developer")}
    if len({*found.values(), *given}) > 1 and found:
        raise RowError("more than one system prompt", f"in {' and '.join([*found, *(['messages'] if given else [])])}")
    if not found or given:
        return messages
    return [{"role": "system", "content": next(iter(found.values()))}, *messages]


def _history(history: Any) -> list[Message]:
    """Alpaca's earlier turns: [question, answer] pairs, or messages."""
    if not history:
        return []
    history = _listed(history, "history")
    if is_messages(history):
        return list(history)
    found: list[Message] = []
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowError("history is not [question, answer] pairs", f"item {i}")
        found += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return found


def _input(value: Any) -> str:
    """Alpaca's input, "" for none; numbers as text."""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if value is not None and value not in ([], {}):
        raise RowError("input is not text", f"input is {_kind(value)}")
    return ""


def _answer(row: Mapping[str, Any]) -> list[Message]:
    for key in _ANSWERS:
        if _text(row, key):
            return [{"role": "assistant", "content": row[key]}]
        if isinstance(row.get(key), list) and row[key] and isinstance(row[key][0], Mapping):
            return list(row[key])
    return []


def _unread_answer(row: Mapping[str, Any], shape: str) -> str:
    if shape in ("messages", "conversations", "turns") or _answer(row):
        return ""
    return "; ".join(
        f"{key} is {_kind(row[key])}, expected text"
        for key in _ANSWERS
        if row.get(key) is not None and not isinstance(row[key], str)
    )


def _text(row: Mapping[str, Any], key: str) -> bool:
    return isinstance(row.get(key), str) and bool(row[key].strip())


def _listed(value: Any, key: str) -> list[Any]:
    if isinstance(value, str):  # a JSON list inside a string, as in CSV files
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError("messages are not a list", f"{key} is text") from None
    if not isinstance(value, list):
        raise RowError("messages are not a list", f"{key} is {_kind(value)}")
    return value


def _message(raw: Any, i: int) -> Message:
    if not isinstance(raw, Mapping):
        raise RowError("message is not an object", f"message {i} is {_kind(raw)}")
    role = _role(raw)
    if role is None or role.lower() not in ROLES:
        found = role if role is not None else raw.get("role", raw.get("from"))
        raise RowError("unknown role", f"message {i}: {found!r}")
    message: Message = {"role": ROLES[role.lower()]}
    calls = raw.get("tool_calls") or None
    if calls is None and raw.get("function_call"):  # the older form of one call
        calls = [{"type": "function", "function": raw["function_call"]}]
    content = _content(raw["content"] if raw.get("content") is not None else raw.get("value"), i)
    if message["role"] == "user" and not content.strip():
        raise RowError("empty user turn", f"message {i}")
    message["content"] = content
    if message["role"] == "assistant":
        reasoning = raw.get("reasoning_content") or raw.get("reasoning") or raw.get("thinking")
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


def _role(message: Mapping[str, Any]) -> str | None:
    role = message.get("role") if message.get("role") is not None else message.get("from")
    return role if isinstance(role, str) else None


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
            except (ValueError, RecursionError):
                raise RowError("tool call arguments are not JSON", f"message {i}") from None
        else:  # in text a null is the model's own; in an object it is mostly a table's filling
            arguments = without_nulls(arguments)
        result.append({**without_nulls(call), "function": {**without_nulls(function), "arguments": arguments}})
    return result


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise RowError("tools are not a list", "text that is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
        raise RowError("tools are not a list", f"found {_kind(tools)}")
    return [without_nulls(t, _MEANT_NULLS) for t in tools]


def _kind(value: Any) -> str:
    kinds = {int: "a number", float: "a number", bool: "true or false", dict: "an object", str: "text"}
    return "nothing" if value is None else kinds.get(type(value), f"a {type(value).__name__}")
