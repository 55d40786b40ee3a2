"""What identifies the prompts of a run: the bytes of local files, the ids of hub datasets."""

from pathlib import Path

from eyas.data.sources import data_files, shown
from eyas.files import file_fingerprint
from eyas.recipe import PromptSource


def prompts_fingerprint(sources: list[PromptSource]) -> list[list[str]]:
    """For each source, its files with their content's fingerprint; [source, "remote"] for what is not a local path.

    A weight other than 1 comes before its source's files.
    """
    found: list[list[str]] = []
    for source in sources:
        if source.weight != 1:
            found.append(["weight", str(source.weight)])
        path = Path(source.path)
        files = data_files(path) if path.is_dir() else [path]
        for f in files:
            found.append([shown(f.name), file_fingerprint(f)] if f.is_file() else [source.path, "remote"])
    return found
