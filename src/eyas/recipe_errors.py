"""What is wrong with a recipe, in plain words: where it stands, what was found and expected, and what to write."""

import difflib
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from eyas.errors import InputError
from eyas.recipe_yaml import Document, Loc

_KEY = re.compile(r"\b(?:[a-z_]+\.)+[a-z_]+\b")
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:.10g}",
    "finite_number": "a finite number",
    "too_short": "a list that is not empty",
    "string_too_short": "a text that is not empty",
    "invalid_key": "keys that are text",
}
"""pydantic's kinds of error"""


@dataclass(frozen=True)
class Override:
    """A key that was given on the command line."""

    option: str
    key: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """Where the values of a recipe come from."""

    name: str
    document: Document
    overrides: Sequence[Override]

    def place(self, loc: Loc) -> tuple[str, Override | None]:
        """The option or the line that gave what stands at `loc`."""
        for given in reversed(self.overrides):
            if loc[: len(given.key)] == given.key:
                return given.option, given
        line = self.document.line(loc)
        return self.name if line is None else f"{self.name}, line {line}", None


def explained(e: ValidationError, value: Any, model: type[BaseModel], source: Source) -> InputError:
    """All errors in one, each with its place and fix. `value` is what was validated."""
    errors: dict[Loc, list[Any]] = {}
    for err in e.errors():
        errors.setdefault(_keys_of(err, value), []).append(err)
    told = [_told(loc, some, model, source) for loc, some in errors.items()]
    if len(told) == 1:
        return InputError(told[0][0], fix=told[0][1])
    return InputError("\n".join(f"{message} - {fix}" for message, fix in told))


def found(value: Any) -> str:
    if value is None:
        return "nothing"
    if value == []:
        return "an empty list"
    if isinstance(value, dict | list):
        return "a section of keys" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _keys_of(err: Any, value: Any) -> Loc:
    """The error's place as keys and numbers alone: pydantic also names the members of unions."""
    loc: list[str | int] = []
    for i, name in enumerate(err["loc"]):
        if isinstance(value, list | dict) and (name in value if isinstance(value, dict) else isinstance(name, int)):
            loc.append(name)
            value = value[name]
        elif i == len(err["loc"]) - 1 and err["type"] in ("missing", "extra_forbidden"):
            loc.append(name)
    return tuple(loc)


def _told(loc: Loc, errors: list[Any], model: type[BaseModel], source: Source) -> tuple[str, str]:
    """Message and fix."""
    first, key = errors[0], ".".join(map(str, loc))
    place, given = source.place(loc)
    if first["type"] == "extra_forbidden":
        known = _keys_at(loc[:-1], model)
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        name = ".".join(map(str, [*loc[:-1], *near]))
        return f"{place}: unknown key {key}", (
            f'did you mean "{name}"?' if near else f"known keys here: {', '.join(known)}"
        )
    if first["type"] == "missing":
        return f"{place}: key {key} is missing", "add it"
    named = f"{place}: " if given is not None and given.key == loc else f"{place}: {key}: "
    if first["type"] == "value_error":
        message, _, fix = str(first["ctx"]["error"]).partition(" - ")
        if loc:
            message = f"{message}, found {found(first['input'])}"
        else:
            named = f"{_first_named(message, source)}: "
        return named + message, fix or f"correct {key or 'it'}"
    expected = " or ".join(dict.fromkeys(_expected(err) for err in errors))
    return f"{named}expected {expected}, found {found(first['input'])}", _example(loc, model, given, expected)


def _first_named(message: str, source: Source) -> str:
    """The place of the first key that a message names, best one that was given on the command line."""
    keys = [tuple(name.split(".")) for name in _KEY.findall(message)]
    places = [source.place(key) for key in keys]
    return next((place for place, given in places if given is not None), places[0][0] if places else source.name)


def _expected(err: Any) -> str:
    known = _EXPECTED.get(err["type"])
    return known.format(**err.get("ctx", {})) if known is not None else f"something else ({err['msg']})"


def _example(loc: Loc, model: type[BaseModel], given: Override | None, expected: str) -> str:
    """What to write, where it was given: in the recipe, or as an option of its own."""
    key, field = ".".join(map(str, loc)), _field_at(loc, model)
    option = None if given is None or given.key != loc else given.option.split()[0]
    if option == "--limit":
        return "e.g. --limit 10"
    if field is not None and field.default_factory is not None and expected == _EXPECTED["dict_type"]:
        return (
            f"{f'write its keys below {key}:' if option is None else f'give {option} {key}.KEY=VALUE'}, or leave it out"
        )
    if isinstance(loc[-1], int) or field is None or field.is_required() or field.default_factory is not None:
        return f"correct {key}" if option is None else f"give {expected}: {option} {key}=..."
    default = yaml.safe_dump(field.default, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    return f"e.g. {f'{key}: ' if option is None else f'{option} {key}='}{default}, which is the default"


def _field_at(loc: Loc, model: Any) -> FieldInfo | None:
    field = None
    for name in loc:
        if isinstance(name, str):
            field = next((f for n, f in model.model_fields.items() if name in (n, f.alias)), None)
            if field is None:
                return None
            model = _model_of(field.annotation)
            if not (isinstance(model, type) and issubclass(model, BaseModel)) and name != loc[-1]:
                return None
    return field


def _keys_at(loc: Loc, model: Any) -> list[str]:
    field = _field_at(loc, model)
    at = model if field is None else _model_of(field.annotation)
    return [f.alias or n for n, f in at.model_fields.items()]


def _model_of(annotation: Any) -> Any:
    """The model inside an annotation: of a list's entries, of a union's members."""
    origin = get_origin(annotation)
    if origin in (Annotated, list):
        return _model_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        members = [_model_of(a) for a in get_args(annotation)]
        return next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), members[0])
    return annotation
