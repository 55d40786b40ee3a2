"""A run directory: where each artifact lies, what each stage recorded, and the lock that keeps two runs apart."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from eyas.errors import InputError
from eyas.files import read_json, write_json

Status = Literal["running", "done", "failed"]
T = TypeVar("T")
_LOCK = ".lock"


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
    """of all attempts with these inputs until it was done; of one that was killed, up to its last note"""
    finished: str | None = None
    counts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    proofs: list[Proof] = field(default_factory=list)
    made_from: dict[str, Any] = field(default_factory=dict)
    """what the fingerprint is of, by key, so that a change can be named; "#..." stands for what is too long"""


@dataclass(frozen=True)
class Owner:
    """What target.json says: the target that a directory belongs to."""

    path: str
    fingerprint: str


class RunDir:
    """Paths and records of one run. All paths lie inside `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipe = root / "recipe.yaml"
        self.run_json = root / "run.json"
        self.target_json = root / "target.json"
        self.samples = root / "samples"
        self.prepared = self.samples / "prepared.parquet"
        self.states = root / "states"
        self.vocab = root / "vocab"
        self.train = root / "train"
        self.drafter = root / "drafter"
        self.previous = root / "previous"
        self.logs = root / "logs"
        self.proofs_json = root / "proofs.json"
        self.baseline_json = root / "baseline.json"
        self.verify_json = root / "verify.json"
        self.report_html = root / "report.html"

    def check_place(self) -> None:
        """Raises InputError where no run may be: in somebody's directory of other files, or where there can be none."""
        try:
            why = self._unfit()
        except OSError as e:
            why = e.strerror or str(e)
        if why is not None:
            raise self._unusable(why)

    def _unfit(self) -> str | None:
        place = self.root.resolve()
        for above in (place, *place.parents):
            if above.exists() and not above.is_dir():
                return "it is a file" if above == place else f"{above} is a file"
        if place in (Path(place.anchor), Path.home().resolve()):
            return "it is the home directory" if place == Path.home().resolve() else "it is the root of all directories"
        ours = self.run_json.exists() or self.target_json.exists()
        if ours or not place.is_dir():
            return None
        expected = {_LOCK, self.states.name, self.logs.name}  # a server that the user runs may have written already
        others = sorted(p.name for p in place.iterdir() if p.name not in expected)
        if not others:
            return None
        return f"it holds other files ({others[0]}{', ...' if len(others) > 1 else ''}) and is no run of eyas"

    def _unusable(self, why: str) -> InputError:
        return InputError(f"run_dir {self.root} cannot be used: {why}", fix="give a new or empty directory in run_dir")

    def record(self, stage: str) -> StageRecord | None:
        return self.records().get(stage)

    def records(self) -> dict[str, StageRecord]:
        """Raises InputError when run.json is no record of stages."""
        found = _read(self.run_json, _RUN, "delete it: every stage runs again, the harvest keeps the samples it has")
        return {} if found is None else found.get("stages", {})

    def write_record(self, stage: str, record: StageRecord) -> None:
        stages = self.records() | {stage: record}
        self._write_records(stages)

    def forget_record(self, stage: str) -> None:
        self._write_records({name: r for name, r in self.records().items() if name != stage})

    def _write_records(self, stages: dict[str, StageRecord]) -> None:
        write_json(self.run_json, {"stages": {name: asdict(r) for name, r in stages.items()}})

    def owner(self) -> Owner | None:
        """Raises InputError when target.json does not say it."""
        return _read(
            self.target_json, _OWNER, "delete it: eyas writes it again, and never mixes samples of two targets"
        )

    def proofs(self) -> list[Proof]:
        """Raises InputError when proofs.json is no list of proofs."""
        fix = f"run `eyas run RECIPE` again: it is written anew from {self.run_json.name}"
        return _read(self.proofs_json, _PROOFS, fix) or []

    def write_proofs(self, new: list[Proof]) -> None:
        """Adds proofs; one of the same name is replaced."""
        names = {p.name for p in new}
        kept = [p for p in self.proofs() if p.name not in names]
        self._write_proofs([*kept, *new])

    def new_proofs(self, stage: str) -> list[Proof]:
        """Those that no other stage's record has."""
        others = [p for name, r in self.records().items() if name != stage for p in r.proofs]
        return [p for p in self.proofs() if p not in others]

    def mend_proofs(self) -> bool:
        """Makes proofs.json what the records say; returns whether it was damaged, or gone."""
        records = self.records()
        recorded = list({p.name: p for r in records.values() for p in r.proofs}.values())
        try:
            found = self.proofs()
            damaged = bool(recorded) and not self.proofs_json.exists()
        except InputError:
            found, damaged = [], True
        if damaged or (found != recorded and (recorded or not records)):  # else: made before records had proofs
            self._write_proofs(recorded)
        return damaged

    def _write_proofs(self, proofs: list[Proof]) -> None:
        write_json(self.proofs_json, [asdict(p) for p in proofs])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run directory; a second process is refused. The lock ends with the process, also on kill -9.

        Raises InputError when there can be no such directory, or it is no run's.
        """
        self.check_place()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = open(self.root / _LOCK, "a+")  # noqa: SIM115
        except OSError as e:
            raise self._unusable(e.strerror or str(e)) from None
        with lock as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another eyas process works in {self.root}", fix="wait for it, or choose another run_dir"
                ) from None
            yield


_RUN = TypeAdapter(dict[Literal["stages"], dict[str, StageRecord]])
_OWNER = TypeAdapter(Owner)
_PROOFS = TypeAdapter(list[Proof])


def _read(path: Path, kind: TypeAdapter[T], fix: str) -> T | None:
    """What a JSON file of the directory says; None if it is not there. Raises InputError when it is damaged."""
    if not path.exists():
        return None
    try:
        return kind.validate_python(read_json(path))
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise InputError(f"{path} is damaged: {where}: {first['msg']}", fix=fix) from None
    except ValueError:
        raise InputError(f"{path} is not valid JSON", fix=fix) from None
