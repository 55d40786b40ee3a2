"""Values of a JSON config by type: a wrong one is named with its key, what was found and what is expected."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from eyas.errors import InputError


@dataclass(frozen=True)
class Values:
    """One object of a config file. What is absent or null reads as None (a list or an object: as empty)."""

    file: Path
    place: str
    """dotted key of the object in the file, empty at the top level"""
    items: dict[str, Any]

    def number(self, key: str, *, above: float = -math.inf, at_most: float = math.inf) -> float | None:
        """A finite number above `above` and at most `at_most`."""
        value = self.items.get(key)
        if value is None:
            return None
        if not is_number(value) or not above < value <= at_most:
            bounds = [f"above {above:g}"] * (above > -math.inf) + [f"at most {at_most:g}"] * (at_most < math.inf)
            raise self.wrong(key, " ".join(["a finite number", " and ".join(bounds)]).rstrip())
        return float(value)

    def whole(self, key: str, *, low: int = 1) -> int | None:
        """An integer of at least `low`."""
        value = self.items.get(key)
        if value is None:
            return None
        if not is_whole(value) or value < low:
            raise self.wrong(key, "a positive integer" if low == 1 else f"an integer of at least {low}")
        return value

    def flag(self, key: str) -> bool | None:
        value = self.items.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, known: tuple[str, ...] = ()) -> str | None:
        """A string; one of `known` where that is given."""
        value = self.items.get(key)
        if value is not None and (not isinstance(value, str) or (known and value not in known)):
            raise self.wrong(key, f"one of {', '.join(known)}" if known else "a string")
        return value

    def entries(self, key: str, good: Callable[[Any], bool], expected: str, *, length: int | None = None) -> list[Any]:
        """A list whose entries are all good, of `length` where that is given."""
        value = self.items.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(map(good, value)) or length not in (None, len(value)):
            raise self.wrong(key, expected)
        return value

    def table(self, key: str) -> "Values":
        """An object inside this one."""
        value = self.items.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Values(self.file, self._dotted(key), value or {})

    def tables(self) -> dict[str, "Values"]:
        """Those of this object's values that are objects themselves."""
        return {key: self.table(key) for key, value in self.items.items() if isinstance(value, dict)}

    def wrong(self, key: str, expected: str) -> InputError:
        shown = repr(self.items.get(key))
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return InputError(
            f"{self.file}: {self._dotted(key)} is {shown}, {expected} expected",
            fix="correct it from the model's own repository",
        )

    def _dotted(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """A finite one; an integer too large for a float is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= 1e300 and not math.isnan(value)


def nan_key(config: dict[str, Any]) -> str | None:
    """The dotted key of a NaN anywhere in a config; Infinity is a legitimate bound (Mamba's time_step_limit)."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, float) and math.isnan(value):
            return place
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        waiting += [(f"{place}.{key}" if place else str(key), one) for key, one in inner]
    return None
