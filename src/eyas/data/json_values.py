"""JSON text decoded piece by piece: the values of a file, a list's elements or an object's members, one at a time."""

import json
import re
from collections.abc import Iterator
from typing import IO, Any, NoReturn

_MARGIN = 16
"""characters before the end of what was read within which an error may come from the cut"""


_SPACES = re.compile(r"\s*")


class _OddError(ValueError):
    """JSON that can be delimited but does not mean anything certain."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _OddError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice in one object")
    return found


def _constant(name: str) -> NoReturn:
    raise _OddError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)
_PLAIN = json.JSONDecoder()


def decode(text: str) -> Any:
    """The one value in `text`. Raises ValueError (for `broken_json`), also for keys that stand twice, and NaN."""
    return _DECODER.decode(text)


def broken_json(e: Exception) -> str:
    """What is wrong with one line."""
    if isinstance(e, json.JSONDecodeError):
        return f"{e.msg.removesuffix(' at')} at column {e.colno}"
    return "nested too deeply" if isinstance(e, RecursionError) else str(e)


class JsonValues:
    """A cursor in a file of JSON text. All methods raise ValueError at what is not JSON (`explained` says where)."""

    def __init__(self, f: IO[str], block: int, longest: int) -> None:
        self._file, self._block, self._longest = f, block, longest
        self._text, self._at, self._ended = "", 0, False
        self._column = 0
        """characters of the line before `_at`"""
        self.line = 1
        """of the next character"""
        self.began = 1
        """the line on which the latest value began"""

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            spaces = _SPACES.match(self._text, self._at)
            assert spaces is not None
            self._skip_to(spaces.end())
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more()

    def fits(self, characters: int) -> bool:
        """Whether the next value ends within that many characters (or nothing is left to read)."""
        while not self._ended and len(self._text) - self._at < characters:
            self._more()
        if self._ended:
            return True
        try:
            return _PLAIN.raw_decode(self._text, self._at)[1] < len(self._text)
        except json.JSONDecodeError:
            return False

    def value(self) -> tuple[Any, str | None]:
        """The next value; with None and the reason for one that is delimited but odd (a key that stands twice)."""
        self.peek()
        self.began = self.line
        while True:
            value, odd = None, None
            try:
                try:
                    value, end = _DECODER.raw_decode(self._text, self._at)
                except _OddError as e:
                    odd = str(e)
                    end = _PLAIN.raw_decode(self._text, self._at)[1]
            except json.JSONDecodeError as e:
                sure = not e.msg.startswith("Unterminated string") and e.pos < len(self._text) - _MARGIN
                if sure or self._ended or len(self._text) - self._at > self._longest:
                    raise
            else:
                if end < len(self._text) or self._ended:  # a number at the very end might go on
                    self._skip_to(end)
                    return value, odd
            self._more()

    def elements(self) -> Iterator[tuple[Any, str | None]]:
        """The elements of the list that comes next."""
        self._one_of("[")
        if self.peek() == "]":
            self._skip_to(self._at + 1)
            return
        while True:
            yield self.value()
            if self._one_of(",]") == "]":
                return

    def members(self) -> Iterator[tuple[str, Iterator[tuple[Any, str | None]]]]:
        """The keys of the object that comes next, each with the elements of its list (none for another value)."""
        self._one_of("{")
        while True:
            key, _ = self.value()
            if not isinstance(key, str):
                raise ValueError(f"expected a key in quotes{self._place()}")
            self._one_of(":")
            if self.peek() == "[":
                elements = self.elements()
                yield key, elements
                for _ in elements:
                    pass
            else:
                self.value()
                yield key, iter(())
            if self._one_of(",}") == "}":
                return

    def explained(self, e: Exception) -> str:
        """What is wrong, and at which line and column of the file."""
        if isinstance(e, json.JSONDecodeError):
            self._skip_to(e.pos)
            return e.msg.removesuffix(" at") + self._place()
        return "nested too deeply" if isinstance(e, RecursionError) else str(e)

    def unexpected(self, what: str) -> ValueError:
        """The error for the next character, with its place."""
        found = self.peek()
        return ValueError(f"{what}, found {found or 'the end of the file'!r}{self._place()}")

    def _place(self) -> str:
        return f" at line {self.line} column {self._column + 1}"

    def _one_of(self, characters: str) -> str:
        found = self.peek()
        if not found or found not in characters:
            raise self.unexpected(f"expected {' or '.join(map(repr, characters))}")
        self._skip_to(self._at + 1)
        return found

    def _more(self) -> None:
        """Doubles what is held, so that decoding again from its start costs no more than twice."""
        held = self._text[self._at :]
        block = self._file.read(max(self._block, len(held)))
        self._text, self._at, self._ended = held + block, 0, not block

    def _skip_to(self, at: int) -> None:
        newlines = self._text.count("\n", self._at, at)
        self.line += newlines
        self._column = at - self._text.rfind("\n", 0, at) - 1 if newlines else self._column + at - self._at
        self._at = at
