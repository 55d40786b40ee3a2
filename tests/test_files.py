"""Files are whole or absent; a run directory records, refuses and locks."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.errors import InputError
from eyas.files import file_fingerprint, fingerprint, read_json, write_json, written_aside
from eyas.rundir import Proof, RunDir, StageRecord


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(RuntimeError), written_aside(path) as aside:  # noqa: PT012
        aside.write_text("half")
        raise RuntimeError
    assert read_json(path) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_fingerprints(tmp_path: Path) -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1}) != fingerprint({"a": 1, "b": [3]})
    (tmp_path / "f").write_bytes(b"abc" * 1_000_000)
    assert file_fingerprint(tmp_path / "f") == hashlib.sha256(b"abc" * 1_000_000).hexdigest()[:16]


def test_records_and_proofs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.record("train") is None
    run.write_record("train", StageRecord("f", "done", counts={"steps": 3}))
    run.write_record("export", StageRecord("g", "running"))
    assert run.record("train") == StageRecord("f", "done", counts={"steps": 3})
    run.write_proofs([Proof("a", True, "1", "1"), Proof("b", True, "1", "1")])
    run.write_proofs([Proof("a", False, "2", "1")])
    assert run.proofs() == [Proof("b", True, "1", "1"), Proof("a", False, "2", "1")]


def test_broken_run_json(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.run_json.write_text("{")
    with pytest.raises(InputError, match=r"run.json is not valid JSON"):
        run.record("train")


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    script = (
        "import sys; from pathlib import Path; from eyas.rundir import RunDir\n"
        "with RunDir(Path(sys.argv[1])).locked(): pass"
    )
    with run.locked():
        second = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert "another eyas process works in" in second.stderr
    with run.locked():
        pass
