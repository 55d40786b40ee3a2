"""Fixtures shared by all tests."""

import signal
from pathlib import Path

import pytest

from eyas.target.smollm2 import make_smollm2

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _heeds_ctrl_c() -> None:
    """A shell that starts the tests in the background lets them, and whatever they start, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's target, float32; made once in runs/ and reused."""
    return make_smollm2(REPO / "runs" / "smollm2")
