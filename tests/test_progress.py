"""Progress: the libraries' own bars are off where eyas shows its own."""

import pytest
from transformers.utils import logging

from eyas.progress import own_bars_only


def test_own_bars_only(capfd: pytest.CaptureFixture[str]) -> None:
    def library_work() -> str:
        for _ in logging.tqdm(range(3), desc="library"):
            pass
        return capfd.readouterr().err

    assert "library" in library_work()
    with own_bars_only():
        assert library_work() == ""
    assert "library" in library_work()
    logging.disable_progress_bar()
    try:
        with own_bars_only():
            pass
        assert not logging.is_progress_bar_enabled()  # who had them off keeps them off
    finally:
        logging.enable_progress_bar()
