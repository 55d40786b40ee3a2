"""What is installed against what eyas is tested with; the table is pyproject.toml's, as installed with the package."""

import importlib.metadata as metadata
import platform
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Installed:
    """One package (or Python itself) that eyas needs."""

    name: str
    version: str | None
    """None: not installed"""
    tested: str
    """the tested range, e.g. >=0.9,<0.10"""

    @property
    def ok(self) -> bool:
        return self.version is not None and SpecifierSet(self.tested).contains(self.version, prereleases=True)


def installed_versions() -> list[Installed]:
    """Python and every dependency of eyas, extras apart (vLLM may live with another interpreter)."""
    about = metadata.metadata("eyas")
    found = [Installed("python", platform.python_version(), _range(SpecifierSet(about["Requires-Python"] or "")))]
    for line in metadata.requires("eyas") or []:
        needed = Requirement(line)
        if needed.marker is not None and "extra" in str(needed.marker):
            continue
        found.append(Installed(needed.name, _version(needed.name), _range(needed.specifier)))
    return found


def _range(specifiers: SpecifierSet) -> str:
    return ",".join(sorted(map(str, specifiers), reverse=True))  # the lower bound first


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
