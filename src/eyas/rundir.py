"""A run directory: where each artifact lies, what each stage recorded, and the lock that keeps two runs apart."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from eyas.errors import InputError
from eyas.files import read_json, write_json

Status = Literal["running", "done", "failed"]


@dataclass(frozen=True)
class Proof:
    """One numeric check: what was found, what was expected, and whether that is good enough."""

    name: str
    ok: bool
    found: str
    expected: str


@dataclass
class StageRecord:
    """What run.json says of one stage."""

    fingerprint: str
    status: Status
    seconds: float = 0.0
    finished: str | None = None
    counts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class RunDir:
    """Paths and records of one run. All paths lie inside `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipe = root / "recipe.yaml"
        self.run_json = root / "run.json"
        self.samples = root / "samples"
        self.prepared = self.samples / "prepared.parquet"
        self.states = root / "states"
        self.vocab = root / "vocab"
        self.train = root / "train"
        self.drafter = root / "drafter"
        self.logs = root / "logs"
        self.proofs_json = root / "proofs.json"
        self.verify_json = root / "verify.json"
        self.report_html = root / "report.html"

    def record(self, stage: str) -> StageRecord | None:
        found = self._run().get("stages", {}).get(stage)
        return None if found is None else StageRecord(**found)

    def records(self) -> dict[str, StageRecord]:
        return {name: StageRecord(**r) for name, r in self._run().get("stages", {}).items()}

    def write_record(self, stage: str, record: StageRecord) -> None:
        run = self._run()
        run.setdefault("stages", {})[stage] = asdict(record)
        write_json(self.run_json, run)

    def proofs(self) -> list[Proof]:
        return [Proof(**p) for p in read_json(self.proofs_json)] if self.proofs_json.exists() else []

    def write_proofs(self, new: list[Proof]) -> None:
        """Adds proofs; one of the same name is replaced."""
        names = {p.name for p in new}
        kept = [p for p in self.proofs() if p.name not in names]
        write_json(self.proofs_json, [asdict(p) for p in [*kept, *new]])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run directory; a second process is refused. The lock ends with the process, also on kill -9."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / ".lock", "a+") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another eyas process works in {self.root}", fix="wait for it, or choose another run_dir"
                ) from None
            yield

    def _run(self) -> dict[str, Any]:
        if not self.run_json.exists():
            return {}
        try:
            return dict(read_json(self.run_json))
        except (json.JSONDecodeError, ValueError):
            raise InputError(
                f"{self.run_json} is not valid JSON",
                fix="choose another run_dir, or delete the file to start over",
            ) from None
