"""What identifies the prompts of a run: the bytes of local files, the ids of hub datasets."""

from pathlib import Path

from eyas.files import file_fingerprint


def prompts_fingerprint(prompts: list[str]) -> list[list[str]]:
    """For each source, its files with their content's fingerprint; [source, "remote"] for what is not a local path."""
    found: list[list[str]] = []
    for source in prompts:
        path = Path(source)
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for f in files:
            found.append([f.name, file_fingerprint(f)] if f.is_file() else [source, "remote"])
    return found
