"""Files that are whole or absent: written aside, fsynced, renamed; and fingerprints of what made them."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is fsynced and renamed to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield aside
        with open(aside, "rb") as f:
            os.fsync(f.fileno())
        os.replace(aside, path)
        sync_dir(path.parent)
    except OSError as e:
        if e.errno is not None and e.filename is None:  # a failed write does not say of which file
            e.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def sync_dir(path: Path) -> None:
    """Makes renames inside `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def fingerprint(value: Any) -> str:
    """16 hex digits of the SHA-256 of `value`'s canonical JSON. Raises TypeError on what JSON cannot hold."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def sampled_fingerprint(path: Path, pieces: int = 64) -> str:
    """16 hex digits of a large file's size and evenly spaced pieces of 64 KiB, its first and its last among them."""
    size, piece = path.stat().st_size, 1 << 16
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as f:
        for i in range(pieces):
            f.seek(max(0, size - piece) * i // (pieces - 1))
            digest.update(f.read(piece))
    return digest.hexdigest()[:16]


def file_fingerprint(path: Path) -> str:
    """16 hex digits of the SHA-256 of the file's bytes, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()[:16]
