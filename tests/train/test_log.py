"""train/log.jsonl: what is no entry is passed over; the checkpoints are what a training continues from."""

import json
from pathlib import Path

import pytest

from eyas.report.html import _log
from eyas.train.loop import Log

STEPS = [{"kind": "step", "step": k, "loss": 2.0 / k, "mean_length": 1.5} for k in (1, 2, 3)]
JUNK = [
    b"\xff\xfe\x00\x80",
    b'{"kind": "step", "st',
    b'{"step": 1}',
    b'{"kind": "step", "step": 1}',
    b'{"kind": "eval", "step": 1, "loss": 1.0}',
    b'{"kind": [], "step": 1}',
    b'{"kind": "step", "step": "1", "loss": 1.0, "mean_length": 1.0}',
    b"[1]",
    b"[" * 100_000,
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_a_line_that_is_no_entry_blocks_nothing(tmp_path: Path, junk: bytes) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(b"".join(json.dumps(e).encode() + b"\n" + junk + b"\n" for e in STEPS))
    log = Log(file, writes=True)
    assert log.last("step") == STEPS[-1]
    assert log.last("eval") is None
    assert [e for e in _log(file) if e in STEPS] == STEPS  # the report's reader
    log.start_at(2)
    assert [json.loads(line) for line in file.read_text().splitlines()] == STEPS[:2]
