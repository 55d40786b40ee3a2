"""Special and thinking tokens, from the JSON files beside the weights."""

from pathlib import Path

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
    found: set[int] = set()
    for level in (_values(path / "generation_config.json"), *config.levels):
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


def tokenizer_size(path: Path) -> int | None:
    """How many tokens tokenizer.json holds with the added ones; None without that file."""
    model = _values(path / "tokenizer.json").table("model")
    vocabulary = model.items.get("vocab")
    if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
        vocabulary = [pair[0] for pair in vocabulary if isinstance(pair, list) and pair]
    if not vocabulary:
        return None
    return len({*vocabulary, *_added_tokens(path)})


def _added_tokens(path: Path) -> dict[str, int]:
    tokens: dict[str, int] = {}
    for token_id, entry in _values(path / "tokenizer_config.json").table("added_tokens_decoder").tables().items():
        content = entry.text("content")
        if content is not None and token_id.isdecimal():
            tokens[content] = int(token_id)
    added = _values(path / "tokenizer.json").entries("added_tokens", lambda e: isinstance(e, dict), "a list of objects")
    for entry in added:
        if isinstance(entry.get("content"), str) and is_whole(entry.get("id")):
            tokens[entry["content"]] = entry["id"]
    return tokens


def _values(file: Path) -> Values:
    return Values(file, "", read_json_object(file) or {})
