"""What a stage was made from, kept so that a message can name what changed."""

import json
from typing import Any

from eyas.files import fingerprint

LONGEST_TOLD, CHANGES_TOLD = 24, 3
"""characters of an input, and inputs, in a message"""


def by_key(value: Any, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """As one level of keys; what is too long to be told is "#" and its fingerprint.

    `names`: of `value`'s parts, where it is no dictionary.
    """
    if names:
        value = dict(zip(names, value if isinstance(value, list) else [value], strict=True))
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            flat |= {f"{key}.{name}": leaf for name, leaf in by_key(inner).items()}
        else:
            flat[key] = inner if len(json.dumps(inner)) <= LONGEST_TOLD else f"#{fingerprint(inner)}"
    return flat


def changes(was: dict[str, Any], now: dict[str, Any]) -> str:
    """In parentheses; nothing where the record does not say what the stage was made from."""
    if not was:
        return ""
    changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    told = [_change(key, was.get(key), now.get(key)) for key in changed[:CHANGES_TOLD]]
    more = [f"{len(changed) - len(told)} more"] if len(changed) > len(told) else []
    return f" ({'; '.join([*told, *more]) or 'an earlier stage was made again'})"


def _change(key: str, was: Any, now: Any) -> str:
    if any(isinstance(value, str) and value.startswith("#") for value in (was, now)):
        return f"{key} changed"
    return f"{key}: {json.dumps(was)}, now {json.dumps(now)}"
