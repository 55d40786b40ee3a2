"""What a stage made, as it was when the stage was done: by it, a file that changed since is noticed."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from eyas.files import file_fingerprint, read_json, write_json

LARGE = 1 << 26
"""bytes; a larger file whose size and time are as recorded is not read again"""

Stamp = tuple[int, int, str | None]
"""size, time (ns) and content of a file; no content of hidden states, of which there may be terabytes"""
_STAMPS = TypeAdapter(dict[str, Stamp])


class Products:
    """The recorded files of one stage, in RUN_DIR/.products/<stage>.json."""

    def __init__(self, root: Path, stage: str) -> None:
        self._root, self._json = root, root / ".products" / f"{stage}.json"
        self._stamps = _read(self._json)

    def changed(self, expected: Iterable[Path]) -> list[Path]:
        """Of the recorded and the expected files, those that are missing, damaged or not as they were."""
        recorded = {self._root / name: stamp for name, stamp in self._stamps.items()}
        unknown = [p for p in expected if p not in recorded]
        return [
            *(p for p, stamp in recorded.items() if not _unchanged(p, stamp)),
            *(p for p in unknown if not _readable(p)),
        ]

    @property
    def recorded(self) -> bool:
        return bool(self._stamps)

    def record(self, files: Iterable[Path]) -> None:
        stamps = {str(p.relative_to(self._root)): _stamp(p) for p in files if p.is_file()}
        write_json(self._json, stamps)

    def forget(self) -> None:
        self._json.unlink(missing_ok=True)
        self._stamps = {}


def _read(path: Path) -> dict[str, Stamp]:
    """Nothing where it is not there or damaged: then the files are only looked at."""
    try:
        return _STAMPS.validate_python(read_json(path))
    except (OSError, ValueError, ValidationError):
        return {}


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, None if _is_states(path) else file_fingerprint(path)


def _unchanged(path: Path, stamp: Stamp) -> bool:
    try:
        found = path.stat()
        size, time, content = stamp
        if found.st_size != size or content is None:
            return found.st_size == size
        return (size > LARGE and found.st_mtime_ns == time) or file_fingerprint(path) == content
    except OSError:
        return False


def _is_states(path: Path) -> bool:
    return path.parent.name == "states"


def _readable(path: Path) -> bool:
    """Is the file there? A table's footer and JSON must also be readable; tensors are checked by their readers."""
    try:
        if path.suffix == ".parquet":
            pq.read_metadata(path)
        elif path.suffix == ".json":
            read_json(path)
        return path.is_file()
    except (pa.ArrowException, OSError, ValueError):
        return False
