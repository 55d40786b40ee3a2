"""Whether an installed vLLM can give this architecture's hidden states to EAGLE-3, read from its source.

vLLM takes tens of seconds to import, and may live in another interpreter. Its registry is a table of literals, and
EAGLE-3 support is a base class (`SupportsEagle3`), so the syntax tree tells both.
"""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from eyas.target.info import EngineSupport

_MARK = "SupportsEagle3"


def vllm_support(architecture: str, package: Path | None = None, version: str | None = None) -> EngineSupport:
    """Support of `architecture` by the vLLM in `package` (the directory of its Python package; default: this one's)."""
    if package is None:
        spec = find_spec("vllm")
        package = None if spec is None or spec.origin is None else Path(spec.origin).parent
    if package is None or not (package / "model_executor" / "models" / "registry.py").is_file():
        return EngineSupport(version, None, None)
    place = _registry(package).get(architecture)
    if place is None:
        return EngineSupport(version, False, False)
    module, name = place
    if "." not in module:
        module = f"vllm.model_executor.models.{module}"
    return EngineSupport(version, True, _has_mark(package, module, name, frozenset()))


@cache
def _registry(package: Path) -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class), from every table of the registry."""
    tables: dict[str, tuple[str, str]] = {}
    for node in _body(package / "model_executor" / "models" / "registry.py"):
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if not isinstance(target, ast.Name) or not target.id.endswith("_MODELS"):
            continue
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, ast.Dict):
            for key, place in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(place, ast.Tuple) and len(place.elts) == 2:
                    parts = [e.value for e in place.elts if isinstance(e, ast.Constant)]
                    if len(parts) == 2:
                        tables.setdefault(str(key.value), (str(parts[0]), str(parts[1])))
    return tables


def _has_mark(package: Path, module: str, name: str, seen: frozenset[tuple[str, str]]) -> bool | None:
    """Whether the class or one of its bases is marked; None when a base cannot be followed and none that can is."""
    if name == _MARK:
        return True
    if (module, name) in seen:
        return False
    seen |= {(module, name)}
    file = _file(package, module)
    if file is None:
        return False  # outside vLLM: torch.nn, typing
    imports: dict[str, tuple[str, str]] = {}
    for node in ast.walk(ast.Module(body=list(_body(file)), type_ignores=[])):
        if isinstance(node, ast.ImportFrom):
            origin = _absolute(node, module, file)
            imports.update({a.asname or a.name: (origin, a.name) for a in node.names})
    for node in _classes(file):
        if node.name == name:
            bases = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
            places = [imports.get(b.id, (module, b.id)) for b in bases if isinstance(b, ast.Name)]
            return any(_has_mark(package, *place, seen) for place in places)
    if name in imports:
        return _has_mark(package, *imports[name], seen)
    return None


@cache
def _body(file: Path) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(file.read_text(encoding="utf-8")).body)


def _classes(file: Path) -> list[ast.ClassDef]:
    """Also those defined under a condition."""
    return [n for n in ast.walk(ast.Module(body=list(_body(file)), type_ignores=[])) if isinstance(n, ast.ClassDef)]


def _file(package: Path, module: str) -> Path | None:
    head, _, rest = module.partition(".")
    if head != "vllm":
        return None
    base = package.joinpath(*rest.split(".")) if rest else package
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return file
    return None


def _absolute(node: ast.ImportFrom, module: str, file: Path) -> str:
    if node.level == 0:
        return str(node.module)
    parts = module.split(".")
    drop = node.level - (1 if file.name == "__init__.py" else 0)
    parts = parts[: len(parts) - drop] if drop else parts
    return ".".join([*parts, *([node.module] if node.module else [])])
