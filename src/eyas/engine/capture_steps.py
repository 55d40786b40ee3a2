"""What the engine's process tells the filing process of each step. Standard library and numpy alone."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass
class Scheduled:
    """The capturing requests' parts in one step, as parallel lists: hundreds of requests are in every step."""

    requests: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """the scheduler's idea of each one's first row; with a drafter and asynchronous scheduling it may be too high"""
    rows: list[int] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)
    """index, within the request, of its first block below"""
    block_counts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """KV blocks that rows can lie in, request after request"""

    def add(self, request: str, position: int, rows: int, first_block: int, blocks: list[int]) -> None:
        self.requests.append(request)
        self.positions.append(position)
        self.rows.append(rows)
        self.first_blocks.append(first_block)
        self.block_counts.append(len(blocks))
        self.blocks += blocks


@dataclass(frozen=True)
class Step:
    """One step, its rows in a slot of the ring (eyas.engine.capture_ring)."""

    scheduled: Scheduled
    starts: list[int] | None
    """first row of each scheduled request; None where the runner names none, then the slot has the KV slots"""
    slot: int
    count: int
    """rows of the step, other requests' included"""
    judged: bool
    """the slot has each row's smallest and largest magnitude"""


@dataclass(frozen=True)
class Finished:
    """A request whose sample goes into `shard`. tokens [rows + 1]: the last one was sampled and never consumed."""

    request: str
    tokens: npt.NDArray[np.int32]
    prompt: int
    shard: str

    @property
    def rows(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Books:
    """What happened between two steps: applied before the rows of the step that it travels with."""

    finished: list[Finished] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    """shards that get no further sample and are to be written"""

    def __bool__(self) -> bool:
        return bool(self.finished or self.dropped or self.closed)
