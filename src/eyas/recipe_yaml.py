"""YAML as a recipe needs it: a key written twice is refused, and every key's line is known."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from eyas.errors import InputError

Loc = tuple[str | int, ...]
"""keys and places in lists, from the top"""


@dataclass(frozen=True)
class Document:
    """A document's value, and where its parts stand."""

    value: Any
    _root: yaml.Node | None

    def line(self, loc: Loc) -> int | None:
        """The line of what stands at `loc`, or of the nearest section around it that is there; None for the top."""
        node, line = self._root, None
        for name in loc:
            entry = _entry(node, name)
            if entry is None:
                break
            line, node = entry
        return line


def read_yaml(text: str, where: str) -> Document:
    """Raises InputError, which begins with `where`, on what is not YAML or has a key twice in one mapping."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            _refuse_twice(root, where)
        # the nodes of merged mappings are changed by this
        return Document(None if root is None else loader.construct_document(root), root)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise _refused(e, where) from None
    finally:
        loader.dispose()


def strings(value: Any, loc: Loc = (), seen: frozenset[int] = frozenset()) -> Iterator[tuple[Loc, str]]:
    """Every string inside a value, keys included, with its place."""
    if isinstance(value, str):
        yield loc, value
    elif isinstance(value, dict | list) and id(value) not in seen:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str):
                yield (*loc, key), key
            yield from strings(inner, (*loc, key), seen | {id(value)})


def _entry(node: yaml.Node | None, name: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        found = [(key.start_mark.line + 1, inner) for key, inner in node.value if key.value == str(name)]
        return found[-1] if found else None  # the last: merged ones stand before a mapping's own
    if isinstance(node, yaml.SequenceNode) and isinstance(name, int) and name < len(node.value):
        inner = node.value[name]
        return inner.start_mark.line + 1, inner
    return None


def _refuse_twice(root: yaml.Node, where: str) -> None:
    """Before anything is merged: a key of a merged mapping may be written again."""
    todo, seen = [(root, "")], set()
    while todo:
        node, path = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            todo += [(inner, path) for inner in node.value]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, inner in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode):
                    name = f"{path}.{key.value}" if path else key.value
                    if key.value in lines:
                        raise InputError(
                            f"{where}, line {line}: key {name} is written twice, first in line {lines[key.value]}",
                            fix="keep one of the two",
                        )
                    lines[key.value] = line
                    todo.append((inner, name))


def _refused(e: Exception, where: str) -> InputError:
    if isinstance(e, yaml.MarkedYAMLError) and e.problem_mark is not None:
        what = " ".join(filter(None, (e.context, e.problem)))
        return InputError(f"{where}, line {e.problem_mark.line + 1}: not valid YAML: {what}", fix="correct that line")
    what = "nested too deeply" if isinstance(e, RecursionError) else " ".join(str(e).split())
    return InputError(f"{where} is not valid YAML: {what}", fix="correct it")
