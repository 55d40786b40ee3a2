"""Special and thinking tokens, from the JSON files beside the weights."""

from pathlib import Path
from typing import Any

from eyas.target.config_json import TargetConfig, read_json_object
from eyas.target.values import Values, is_whole

_THINKING = (
    ("<think>", "</think>"),
    ("<|think|>", "<|/think|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("<|channel>", "<channel|>"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)


def eos_token_ids(path: Path, config: TargetConfig) -> tuple[int, ...]:
    """Every id that ends an answer: generation_config.json's and both config levels', ascending, without repeats."""
    file = path / "generation_config.json"
    found: set[int] = set()
    for level in (Values(file, "", read_json_object(file) or {}), *config.levels):
        value = level.items.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(map(is_whole, values)):
            raise level.wrong("eos_token_id", "a token id or a list of them")
        found.update(values)
    return tuple(sorted(found))


def special_tokens(path: Path, config: TargetConfig) -> dict[str, int]:
    """bos, eos, pad and the like to their ids, and every token that tokenizer files mark as special."""
    found: dict[str, int] = {}
    for level in (config.outer, config.text):
        for key, value in level.items():
            if key.endswith("_token_id") and is_whole(value):
                found[key.removesuffix("_token_id")] = value
    for content, token_id in _added_tokens(path).items():
        found.setdefault(content, token_id)
    return found


def thinking_tokens(path: Path) -> tuple[str, str] | None:
    """The pair that wraps thinking: one whose members are tokens of their own, or both are in the chat template."""
    added = _added_tokens(path)
    template = chat_template_text(path)
    for start, end in _THINKING:
        if start in added and end in added:
            return start, end
    for start, end in _THINKING:
        if start in template and end in template:
            return start, end
    if "<|channel|>" in added and "<|message|>" in added:  # harmony: gpt-oss
        return "<|channel|>analysis<|message|>", "<|end|>"
    return None


def chat_template_text(path: Path) -> str:
    """The checkpoint's chat template, empty when it has none."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = (read_json_object(path / name) or {}).get("chat_template")
        if isinstance(template, list):  # several named templates
            chosen = [t for t in template if isinstance(t, dict)]
            template = next((t.get("template") for t in chosen if t.get("name") == "default"), None)
        if isinstance(template, str):
            return template
    return ""


def _added_tokens(path: Path) -> dict[str, int]:
    tokens: dict[str, int] = {}
    entries: dict[str, Any] = (read_json_object(path / "tokenizer_config.json") or {}).get("added_tokens_decoder") or {}
    for token_id, entry in entries.items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            tokens[entry["content"]] = int(token_id)
    for entry in (read_json_object(path / "tokenizer.json") or {}).get("added_tokens") or []:
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            tokens[entry["content"]] = int(entry["id"])
    return tokens
