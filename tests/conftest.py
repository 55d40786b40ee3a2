"""Fixtures shared by all tests."""

from pathlib import Path

import pytest

from eyas.target.smollm2 import make_smollm2

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's target, float32; made once in runs/ and reused."""
    return make_smollm2(REPO / "runs" / "smollm2")
