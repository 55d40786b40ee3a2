"""The GPU's way out of the static buffer: ring, side stream, pinned memory, CUDA graphs. Skipped without a GPU."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.engine.capture_copy import DeviceCopy
from eyas.engine.capture_process import FilingProcess
from eyas.engine.capture_ring import Layout, Ring, bad_extremes
from eyas.engine.capture_sizes import RING
from eyas.engine.capture_steps import Books, Finished, Scheduled
from eyas.states.shard import Shard

from .fake_tap import FakeTap

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def some_tap(tokens: int, layers: int, hidden: int) -> FakeTap:
    return FakeTap(torch.zeros(tokens, layers, hidden, dtype=torch.bfloat16, device="cuda"))


def ring_of(tap: FakeTap) -> Ring:
    rows, layers, hidden = tap.rows.shape
    return Ring(Layout(rows, layers, hidden, "BF16"))


def states_in(ring: Ring, slot: int, count: int) -> torch.Tensor:
    return torch.from_numpy(ring.states(slot, count)).view(torch.bfloat16)


def test_no_row_is_lost_or_overwritten_while_the_host_lags_behind() -> None:
    tap = some_tap(512, 4, 576)
    ring = ring_of(tap)
    device_copy = DeviceCopy(tap, ring)
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 513, (60,), generator=generator).tolist()
    waiting: list[tuple[int, torch.cuda.Event]] = []

    def check(step: int, event: torch.cuda.Event) -> None:
        event.synchronize()
        count, slot = counts[step], step % RING
        states = states_in(ring, slot, count)
        assert (states[:, :, 1:] == 0.5 + step).all(), step
        assert (states[:, 0, 0].float() == torch.arange(count).bfloat16().float()).all()
        positions, tokens, slots = ring.numbers(slot, count)
        assert positions.tolist() == list(range(step, step + count))
        assert (tokens == 1000 + step).all()
        assert slots.tolist() == [3 * i + step for i in range(count)]

    for step, count in enumerate(counts):
        if len(waiting) == RING:  # the host looks as late as it may
            check(*waiting.pop(0))
        tap.rows[:count].fill_(0.5 + step)  # what the next step's forward pass does to the buffer
        tap.rows[:count, :, 0] = torch.arange(count, device="cuda", dtype=torch.bfloat16)[:, None]
        tap.numbers[0, :count] = torch.arange(count, device="cuda") + step
        tap.numbers[1, :count] = 1000 + step
        kv_slots = torch.arange(count, device="cuda", dtype=torch.int64) * 3 + step
        waiting.append((step, device_copy.copy(step % RING, count, kv_slots)))
    for entry in waiting:
        check(*entry)


def test_bad_rows_are_told_on_the_device() -> None:
    tap = some_tap(64, 3, 576)
    tap.rows.normal_()
    tap.rows[1, 2, 7] = torch.nan
    tap.rows[2, 0, 3] = -torch.inf
    tap.rows[3, 1] = 0
    tap.rows[4, 1] = -2.5
    ring = ring_of(tap)
    DeviceCopy(tap, ring).copy(1, 8, None).synchronize()
    smallest, largest = ring.extremes(1, 8)
    assert bad_extremes(smallest, largest, "BF16").tolist() == [False, True, True, True, True, False, False, False]


def test_a_cuda_graph_refreshes_the_buffer_at_every_replay() -> None:
    tap = some_tap(64, 2, 128)
    ring = ring_of(tap)
    device_copy = DeviceCopy(tap, ring)
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    positions, ids = torch.arange(32, device="cuda"), torch.arange(32, device="cuda", dtype=torch.int32)
    tap.keep([x, x + 1], positions, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tap.keep([x * 2, x * 2 + 1], positions, ids)
    for i in range(20):
        x.normal_()
        positions.add_(1)
        ids.add_(2)
        want = torch.stack([x * 2, x * 2 + 1], dim=1).cpu()
        graph.replay()
        event = device_copy.copy(i % RING, 32, None)
        graph.replay()
        x.zero_()
        event.synchronize()
        assert torch.equal(states_in(ring, i % RING, 32), want)
        assert ring.numbers(i % RING, 32)[0].tolist() == list(range(i + 1, i + 33))
        assert ring.numbers(i % RING, 32)[1].tolist() == list(range(2 * i + 2, 2 * i + 34))


@pytest.mark.parametrize(("hidden", "milliseconds"), [(576, 4.0), (7168, 12.0)])
def test_steps_of_256_rows_reach_shards_without_slowing_the_device(
    hidden: int, milliseconds: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pretended decode of 256 requests whose steps take `milliseconds`; every row of every sample is looked at."""
    requests, steps, layers = 256, 64, 4
    tap = some_tap(512, layers, hidden)
    filing = FilingProcess(tap, block_size=64, arena_bytes=8 << 30)
    cycles = int(milliseconds * 1.7e6)
    base = torch.randn(requests, layers, hidden, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(requests, device="cuda") * 64

    def run(capture: bool) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(steps):
            torch.cuda._sleep(cycles)
            tap.rows[:requests].copy_(base + i)
            tap.numbers[0, :requests] = i
            tap.numbers[1, :requests] = i + 7
            if capture:
                scheduled = Scheduled()
                for j in range(requests):
                    scheduled.add(f"r{j}", i, 1, 0, [j])
                filing.hand_over()
                filing.step(scheduled, None, slots + i, requests)
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - start

    plain = min(run(False), run(False))
    with_states = run(True)
    tokens = np.arange(7, 7 + steps + 1, dtype=np.int32)
    paths = [str(tmp_path / f"{k}.safetensors") for k in range(4)]
    begin = time.perf_counter()
    filing.books(Books(finished=[Finished(f"r{j}", tokens, 1, paths[j % 4]) for j in range(requests)], closed=paths))
    filing.stop()
    written = time.perf_counter() - begin
    size = sum(Path(p).stat().st_size for p in paths) / 1e6
    with capsys.disabled():
        print(
            f"\nhidden {hidden}: {1e3 * plain / steps:.2f} ms a step, {1e3 * with_states / steps:.2f} with states "
            f"({with_states / plain:.3f}), {requests * steps / with_states:,.0f} rows/s filed "
            f"({size / with_states:,.0f} MB/s); {size:,.0f} MB written in {written:.2f} s ({size / written:,.0f} MB/s)"
        )
    for k, path in enumerate(paths):
        shard = Shard(Path(path))
        assert [(r["missing_rows"], r["bad_rows"]) for r in shard.requests] == [(0, 0)] * 64
        for at in range(0, 64, 9):
            want = torch.stack([(base[4 * at + k] + i) for i in range(steps)]).cpu()
            assert torch.equal(shard.sample(at).states, want)
