"""A static buffer without vLLM."""

import torch

from eyas.engine.capture_plugin import Tap
from eyas.engine.capture_sizes import RING

L, H = 3, 8


def some_rows(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, L, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


class FakeTap(Tap):
    """rows: the buffer [N, layers, hidden], on any device."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.layers = tuple(range(1, rows.shape[1] + 1))
        self.rows = rows
        self.numbers = torch.full((2, len(rows)), -1, dtype=torch.int64, device=rows.device)
        self.staging = [torch.empty_like(rows) for _ in range(RING)] if rows.is_cuda else []
