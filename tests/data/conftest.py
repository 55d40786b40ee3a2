"""Fixtures of the data tests: a tiny target on disk, prepared prompts."""

import json
from pathlib import Path

import pytest
import torch

from eyas.progress import Progress

from .tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def quiet() -> Progress:
    return Progress(quiet=True)


def write_prompts(path: Path, n: int, turns: int = 1) -> Path:
    lines = []
    for i in range(n):
        messages = []
        for t in range(turns):
            messages.append({"role": "user", "content": f"question {i}.{t}"})
            messages.append({"role": "assistant", "content": f"answer {i}.{t}"})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
