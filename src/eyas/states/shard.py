"""The file format of hidden states: one safetensors file holds many samples, end to end.

tensors   states      [rows, layers, hidden]   the residual stream after k layers; layer order as in `layers`
          offsets     [samples + 1] int64      sample i has rows offsets[i] .. offsets[i + 1]
          tokens      [rows] int32             the token that each row's position consumed
          last_token  [samples] int32          the token after the last row: sampled, never consumed
metadata  layers      JSON list of k, ascending; k = num_hidden_layers is the state before the final norm
          requests    JSON list of {"request", "prompt", "missing_rows", "bad_rows"}, one for each sample: rows that are
                      not the sample's own, and (if the engine's writer made it) rows that are no states at all

The writer inside vLLM (eyas.engine.capture_connector) writes the same format without importing this module.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eyas.errors import EyasError
from eyas.files import written_aside

_AGAIN = "it asks the missing samples again"


@dataclass(frozen=True)
class ShardSample:
    """One sample of a shard. states [rows, layers, hidden]; tokens [rows + 1], the last one without a row."""

    states: torch.Tensor
    tokens: torch.Tensor
    prompt_length: int
    missing_rows: int


class Shard:
    """Reads samples of one shard through a memory map; nothing but the asked rows is read."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = safe_open(path, "pt")
            meta: dict[str, str] = self._file.metadata() or {}
            self.layers: list[int] = json.loads(meta["layers"])
            self.requests: list[dict[str, Any]] = json.loads(meta["requests"])
            self._offsets: list[int] = self._file.get_tensor("offsets").tolist()
            self._last: torch.Tensor = self._file.get_tensor("last_token")
        except FileNotFoundError:
            raise EyasError(
                f"{path} is not there, the samples of it are", fix=f"run `eyas harvest RECIPE` again: {_AGAIN}"
            ) from None
        except (SafetensorError, KeyError, OSError, json.JSONDecodeError) as e:
            raise EyasError(
                f"{path} is not a whole file of hidden states: {e}",
                fix=f"delete it and run `eyas harvest RECIPE` again: {_AGAIN}",
            ) from None
        self.path = path

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, index: int) -> int:
        return self._offsets[index + 1] - self._offsets[index]

    def sample(self, index: int) -> ShardSample:
        a, b = self._offsets[index], self._offsets[index + 1]
        tokens = torch.cat([self._file.get_slice("tokens")[a:b], self._last[index : index + 1]]).long()
        info = self.requests[index]
        return ShardSample(self._file.get_slice("states")[a:b], tokens, info["prompt"], info["missing_rows"])


def write_shard(path: Path, layers: list[int], samples: list[ShardSample], requests: list[str]) -> None:
    """Writes samples under `path`, whole or not at all."""
    ends = torch.tensor([0] + [s.states.shape[0] for s in samples]).cumsum(0)
    info = [
        {"request": r, "prompt": s.prompt_length, "missing_rows": s.missing_rows}
        for r, s in zip(requests, samples, strict=True)
    ]
    with written_aside(path) as aside:
        save_file(
            {
                "states": torch.cat([s.states for s in samples]),
                "offsets": ends,
                "tokens": torch.cat([s.tokens[:-1] for s in samples]).to(torch.int32),
                "last_token": torch.cat([s.tokens[-1:] for s in samples]).to(torch.int32),
            },
            aside,
            {"layers": json.dumps(layers), "requests": json.dumps(info)},
        )
