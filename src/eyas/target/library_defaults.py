"""Defaults of a model family's config class, read from transformers' source without importing or running it.

A checkpoint's config.json may leave out what its class has as default (Gemma 3 leaves out its vocabulary and its head
counts). Importing transformers takes seconds, its source is plain assignments, so the syntax tree is read instead.
"""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def library_defaults(model_type: str) -> dict[str, Any]:
    """Literal defaults of the config class with this `model_type`, its bases' included; empty for an unknown one."""
    for file in _files(model_type):
        classes = _classes(file)
        for name, node in classes.items():
            if _assignments(node).get("model_type") == model_type:
                return _with_bases(file, name)
    return {}


@cache
def causal_lm_class(model_type: str) -> str | None:
    """The class that transformers has for text generation with this model type, e.g. Gemma3ForCausalLM."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    for node in _tree(Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        name = node.targets[0]
        if isinstance(name, ast.Name) and name.id == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
            found = dict(ast.literal_eval(node.value.args[0])).get(model_type)
            return found if isinstance(found, str) else None
    return None


def _files(model_type: str) -> list[Path]:
    """Config files that may define the model type, the likely one first."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not model_type:
        return []
    models = Path(spec.origin).parent / "models"
    likely = models / model_type / f"configuration_{model_type}.py"
    if likely.is_file() and _mentions(likely, model_type):
        return [likely]
    return [file for file in sorted(models.glob("*/configuration_*.py")) if _mentions(file, model_type)]


def _mentions(file: Path, model_type: str) -> bool:
    return f'model_type = "{model_type}"' in file.read_text(encoding="utf-8")


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(file).body if isinstance(node, ast.ClassDef)}


def _with_bases(file: Path, name: str) -> dict[str, Any]:
    classes = _classes(file)
    if name in classes:
        found: dict[str, Any] = {}
        for base in classes[name].bases:
            if isinstance(base, ast.Name) and base.id != "PreTrainedConfig":
                found.update(_with_bases(file, base.id))
        return {**found, **_assignments(classes[name])}
    for node in _tree(file).body:  # imported: `from ..llama.configuration_llama import LlamaConfig`
        if isinstance(node, ast.ImportFrom) and node.level == 2 and any(a.name == name for a in node.names):
            other = file.parents[1].joinpath(*str(node.module).split(".")).with_suffix(".py")
            return _with_bases(other, name) if other.is_file() else {}
    return {}


def _assignments(node: ast.ClassDef) -> dict[str, Any]:
    """`name: type = literal` and `name = literal` of a class body; what is no literal is left out."""
    found: dict[str, Any] = {}
    for statement in node.body:
        target: ast.expr
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        else:
            continue
        if isinstance(target, ast.Name):
            try:
                found[target.id] = ast.literal_eval(value)
            except ValueError:
                continue
    return found
