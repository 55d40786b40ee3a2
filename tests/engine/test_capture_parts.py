"""The capture modules' pure parts: arena, row attribution, shard writing, bad rows."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.engine import capture_writer, vllm_versions
from eyas.engine.capture_arena import PAGE, Arena, ArenaFull
from eyas.engine.capture_copy import HostCopy, name_of
from eyas.engine.capture_filer import Filer, Settings, rows_by_name, rows_by_slot
from eyas.engine.capture_ring import FLOATS, Bits, Layout, Ring, bad_rows
from eyas.engine.capture_steps import Books, Finished, Scheduled, Step
from eyas.states.shard import Shard

from .fake_tap import FakeTap, some_rows

L, H = 3, 8


def bits(rows: torch.Tensor) -> Bits:
    """As the filing process sees them."""
    return rows.view(torch.uint32 if rows.dtype == torch.float32 else torch.uint16).numpy()


def joined(pieces: list[Bits], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.from_numpy(piece).view(dtype) for piece in pieces]).view(-1, L, H)


def three(*numbers: int) -> list[np.ndarray]:
    """Owner, position and token of one row."""
    return [np.array([x]) for x in numbers]


def scheduled(*parts: tuple[str, int, int, int, list[int]]) -> Scheduled:
    found = Scheduled()
    for part in parts:
        found.add(*part)
    return found


def no_bad(n: int) -> np.ndarray:
    return np.zeros(n, dtype=bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bad_rows_are_those_with_a_zero_layer_or_a_value_that_is_not_finite(dtype: torch.dtype) -> None:
    rows = some_rows(6, dtype=dtype)
    rows[1, 2] = 0
    rows[2, 0, 3] = torch.nan
    rows[3, 1, 0] = -torch.inf
    rows[4, 0] = 0
    rows[4, 0, 0] = -1e-6  # tiny is not zero
    rows[5, 1] = torch.tensor([2.5, -2.5]).repeat(H // 2)
    assert bad_rows(bits(rows), name_of(dtype)).tolist() == [False, True, True, True, False, True]


def test_arena_gives_back_rows_by_position_whatever_the_order_of_steps() -> None:
    arena = Arena(L, H, "F32", limit_bytes=1 << 22)
    lengths = {f"r{i}": 1 + 37 * i for i in range(9)}
    want = {r: some_rows(n, seed=n) for r, n in lengths.items()}
    done = dict.fromkeys(lengths, 0)
    generator = np.random.default_rng(0)
    while any(done[r] < n for r, n in lengths.items()):
        live = [r for r, n in lengths.items() if done[r] < n]
        counts = [int(min(generator.integers(1, 80), lengths[r] - done[r])) for r in live]
        owner = np.repeat(np.arange(len(live)), counts)
        position = np.concatenate([np.arange(done[r], done[r] + c) for r, c in zip(live, counts, strict=True)])
        rows = torch.cat([want[r][done[r] : done[r] + c] for r, c in zip(live, counts, strict=True)])
        arena.put(live, owner, position, position, bits(rows), no_bad(len(rows)))
        for r, c in zip(live, counts, strict=True):
            done[r] += c
    for r, n in lengths.items():
        taken = arena.take(r, np.arange(n))
        assert (taken.missing, taken.bad) == (0, 0)
        assert torch.equal(joined(arena.pieces(taken), torch.float32), want[r])
        arena.release(taken.pages)
    assert len(arena) == 0


def test_arena_counts_missing_rows_and_keeps_the_later_of_two_rows_and_cuts_what_ran_past_the_end() -> None:
    arena = Arena(L, H, "BF16", limit_bytes=1 << 20)
    first, again = some_rows(200, 1, torch.bfloat16), some_rows(50, 2, torch.bfloat16)
    arena.put(["a"], np.zeros(200, dtype=np.int64), np.arange(200), np.arange(200), bits(first), no_bad(200))
    bad = no_bad(50)
    bad[7] = True
    arena.put(["a"], np.zeros(50, dtype=np.int64), np.arange(10, 60), np.arange(10, 60), bits(again), bad)
    taken = arena.take("a", np.arange(150))
    assert (taken.missing, taken.bad) == (0, 1)
    assert torch.equal(joined(arena.pieces(taken), torch.bfloat16), torch.cat([first[:10], again, first[60:150]]))
    arena.release(taken.pages)
    arena.put(["b"], np.zeros(10, dtype=np.int64), np.arange(90, 100), np.full(10, -1), bits(again[:10]), no_bad(10))
    taken = arena.take("b", np.arange(103))
    assert taken.missing == 93
    states = joined(arena.pieces(taken), torch.bfloat16)
    assert torch.equal(states[90:100], again[:10])
    assert not states[:90].any()
    assert not states[100:].any()  # nothing of another request's, though the pages are used ones


def test_rows_of_other_tokens_and_rows_that_repeat_the_one_before_are_counted_as_missing() -> None:
    arena = Arena(L, H, "BF16", limit_bytes=1 << 20)
    rows = some_rows(8, dtype=torch.bfloat16)
    rows[3] = rows[2]  # the buffer was not refreshed
    rows[6] = rows[5]  # the same token at the start of a text: rightly the same state
    tokens = np.array([5, 6, 7, 8, 9, 1, 1, 2])
    arena.put(["a"], np.zeros(8, dtype=np.int64), np.arange(8), tokens, bits(rows), no_bad(8))
    taken = arena.take("a", tokens.astype(np.int32))
    assert (taken.missing, taken.bad) == (1, 0)
    arena.release(taken.pages)
    other = tokens.copy()
    other[[0, 4]] = 77  # rows of another request
    other[5] = -1  # unknown: the model was given embeddings
    arena.put(
        ["a"], np.zeros(8, dtype=np.int64), np.arange(8), other, bits(some_rows(8, dtype=torch.bfloat16)), no_bad(8)
    )
    assert arena.take("a", tokens).missing == 2


def test_arena_full_is_an_error_that_says_what_to_do_and_dropping_makes_room() -> None:
    arena = Arena(L, H, "F32", limit_bytes=2 * PAGE * L * H * 4)
    rows = bits(some_rows(PAGE))
    for name in ("a", "b"):
        arena.put([name], np.zeros(PAGE, dtype=np.int64), np.arange(PAGE), np.arange(PAGE), rows, no_bad(PAGE))
    with pytest.raises(ArenaFull, match="raise arena_gb"):
        arena.put(["c"], *three(0, 0, 0), rows[:1], no_bad(1))
    arena.drop("a")
    arena.put(["c"], *three(0, 0, 0), rows[:1], no_bad(1))


def test_rows_by_name_trust_the_models_positions_over_the_schedulers() -> None:
    parts = scheduled(("a", 10, 2, 0, []), ("c", 0, 3, 0, []))
    positions = np.array([8, 9, 100, -1, -1, -1])
    row, owner, position = rows_by_name(parts, [0, 3], positions)
    assert row.tolist() == [0, 1, 3, 4, 5]
    assert owner.tolist() == [0, 0, 1, 1, 1]
    assert position.tolist() == [8, 9, 0, 1, 2]
    with pytest.raises(ValueError, match="does not name the rows"):
        rows_by_name(parts, [0, -1], positions)


def test_rows_by_slot_find_requests_by_their_blocks() -> None:
    # block size 4; a: positions 3, 4 in blocks 7, 2; b (not captured) in block 5; c: positions 8.. in block 1
    parts = scheduled(("a", 3, 2, 0, [7, 2]), ("c", 8, 2, 2, [1]))
    slots = np.array([7 * 4 + 3, 2 * 4 + 0, 5 * 4 + 1, 1 * 4 + 0, 1 * 4 + 1, -1])
    row, owner, position = rows_by_slot(parts, slots, 4)
    assert row.tolist() == [0, 1, 3, 4]
    assert owner.tolist() == [0, 0, 1, 1]
    assert position.tolist() == [3, 4, 8, 9]


def settings_for(rows: int) -> Settings:
    return Settings(Layout(rows, L, H, "F32"), (1, 2, 3), block_size=16, arena_bytes=1 << 22)


def test_filer_writes_shards_that_shard_reads_with_bad_and_missing_rows_counted(tmp_path: Path) -> None:
    settings, told = settings_for(9), []
    ring = Ring(settings.layout)
    filer = Filer(settings, ring, told.append)
    rows = some_rows(9)
    rows[4] = torch.nan
    tap = FakeTap(rows.clone())
    HostCopy(tap, ring).copy(2, 9, None)
    tap.rows.zero_()  # the next step overwrites the buffer
    filer.step(Step(scheduled(("a", 0, 5, 0, []), ("b", 0, 3, 0, [])), [1, 6], slot=2, count=9, judged=False))
    ring.states(2, 9)[:] = 0  # and a later one the slot
    path = str(tmp_path / "s.safetensors")
    tokens = np.arange(10, 16, dtype=np.int32)
    finished = [Finished("b", tokens[:6], 2, path), Finished("a", tokens, 4, path)]
    filer.books(Books(finished=finished[:1]))
    filer.books(Books(finished=finished[1:], closed=[path]))
    filer.stop()
    assert told == [path]
    shard = Shard(Path(path))
    assert (len(shard), shard.layers) == (2, [1, 2, 3])
    b, a = shard.sample(0), shard.sample(1)
    assert (b.missing_rows, b.prompt_length) == (2, 2)
    assert torch.equal(b.states[:3], rows[6:9])
    assert [r["bad_rows"] for r in shard.requests] == [0, 1]
    assert torch.equal(a.states.nan_to_num(7), rows[1:6].nan_to_num(7))
    assert a.tokens.tolist() == tokens.tolist()
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_a_step_that_was_judged_on_the_device_is_not_judged_again(tmp_path: Path) -> None:
    settings = settings_for(4)
    ring = Ring(settings.layout)
    rows = some_rows(4)
    HostCopy(FakeTap(rows), ring).copy(0, 4, None)
    smallest, largest = ring.extremes(0, 4)
    smallest[:], largest[:] = bits(rows.abs().amin(-1)), bits(rows.abs().amax(-1))
    largest[1, 2] = FLOATS["F32"].infinity
    largest[3, 0] = smallest[3, 0]
    filer = Filer(settings, ring, lambda path: None)
    filer.step(Step(scheduled(("a", 0, 4, 0, [])), [0], slot=0, count=4, judged=True))
    path = str(tmp_path / "s.safetensors")
    filer.books(Books(finished=[Finished("a", np.arange(5, dtype=np.int32), 1, path)], closed=[path]))
    filer.stop()
    assert Shard(Path(path)).requests[0]["bad_rows"] == 2


def test_what_goes_wrong_while_filing_appears_in_the_shards_error_file(tmp_path: Path) -> None:
    settings = Settings(Layout(200, L, H, "F32"), (1, 2, 3), 16, arena_bytes=1)
    ring = Ring(settings.layout)
    HostCopy(FakeTap(some_rows(200)), ring).copy(0, 200, None)
    filer = Filer(settings, ring, lambda path: None)
    filer.step(Step(scheduled(("a", 0, 200, 0, [])), [0], slot=0, count=200, judged=False))
    path = str(tmp_path / "s.safetensors")
    filer.books(Books(finished=[Finished("a", np.arange(3, dtype=np.int32), 1, path)], closed=[path]))
    filer.stop()
    assert not Path(path).exists()
    assert "raise arena_gb" in Path(path + ".error").read_text()


def test_a_write_that_fails_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    class Unreadable:
        nbytes = 0

    entry = capture_writer.Entry("a", 1, np.arange(3, dtype=np.int32), [Unreadable()], 0, 0)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        capture_writer.write(str(tmp_path / "s.safetensors"), [1, 2, 3], H, "F32", [entry])
    assert list(tmp_path.iterdir()) == []


def test_states_of_another_dtype_are_refused() -> None:
    with pytest.raises(TypeError, match=r"float64.*not supported"):
        name_of(torch.float64)


def test_tested_versions() -> None:
    for good in ("0.26.0", "0.32.0+cpu", "0.33.1rc1"):
        assert vllm_versions.problem(good) is None
    for bad in ("0.25.1", "0.34.0", "1.0.0", "dev"):
        assert "tested with" in str(vllm_versions.problem(bad))
    assert vllm_versions.environment("0.26.0") == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert vllm_versions.environment("0.32.0") == {}


def test_the_plugin_is_declared_inert_and_imports_nothing_but_what_a_server_has() -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "e, = [e for e in m.entry_points(group='vllm.general_plugins') if e.name == 'eyas_capture']\n"
        "e.load()()\n"
        "assert 'vllm' not in sys.modules\n"
        "import eyas.engine.capture_process\n"
        "assert 'vllm' not in sys.modules\n"
        "ours = {x for x in sys.modules if x.startswith('eyas')}\n"
        "ours -= {'eyas', 'eyas.engine', 'eyas.engine.vllm_versions'}\n"
        "assert all('.capture_' in x for x in ours), ours\n"
        "assert not {'pydantic', 'transformers', 'httpx'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
