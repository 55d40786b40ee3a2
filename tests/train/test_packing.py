"""Packing: budgets are kept, little is wasted, the same seed and epoch give the same packs, ranks are balanced."""

from dataclasses import replace

import numpy as np
import pytest

from eyas.errors import InputError
from eyas.states.store import SampleRef
from eyas.train.packing import Step, check_budget, deal, make_schedule, pack, share_out, trainable


def ref(i: int, tokens: int, supervised: int) -> SampleRef:
    return SampleRef(f"s{i}/0", "train", tokens, tokens - supervised, supervised, tokens - 1, "a.safetensors", i, 0, i)


def lengths(n: int = 500, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(20, 900, n).tolist()


def samples_of(steps: list[Step]) -> list[int]:
    return sorted(i for step in steps for rank in step for pack in rank for i in pack)


def test_every_sample_once_within_the_budget_and_little_waste():
    sizes = lengths()
    packs = pack(sizes, 2048, np.random.default_rng(0))
    assert sorted(i for p in packs for i in p) == list(range(len(sizes)))
    assert max(sum(sizes[i] for i in p) for p in packs) <= 2048
    assert sum(sizes) / (len(packs) * 2048) > 0.97


def test_deterministic_by_seed_and_epoch():
    refs = [ref(i, n, n // 2) for i, n in enumerate(lengths())]
    first, again, other = (make_schedule(refs, 2048, 2, seed, 1) for seed in (0, 0, 1))
    assert first == again
    assert first.steps != other.steps
    a, b = first.steps[: first.epoch_ends[0]], first.steps[first.epoch_ends[0] :]
    assert a != b
    assert samples_of(a) == samples_of(b) == list(range(len(refs)))


def test_epoch_of_a_step():
    schedule = make_schedule([ref(i, 30, 9) for i in range(4)], 60, 3, 0, 1)
    assert schedule.epoch_ends == [2, 4, 6]
    assert [schedule.epoch_of(s) for s in range(6)] == [0, 0, 1, 1, 2, 2]
    assert schedule.tokens == 4 * 28


def test_ranks_are_balanced_and_all_have_a_pack_or_an_empty_one():
    rng = np.random.default_rng(0)
    supervised = rng.integers(10, 1000, 81).tolist()
    groups = deal([[i] for i in range(81)], supervised, 4, rng)
    assert all(len(g) == 4 for g in groups)
    assert sorted(i for g in groups for p in g for i in p) == list(range(81))
    assert sum(p == [] for g in groups for p in g) == 3
    spread = [max(x) - min(x) for g in groups if (x := [supervised[p[0]] for p in g if p])]
    assert np.mean(spread) < 200


def test_a_step_has_the_same_packs_however_it_is_split_into_ranks_and_micro_batches():
    refs = [ref(i, n, n // 2) for i, n in enumerate(lengths())]
    schedules = [make_schedule(refs, 2048, 2, 0, world, accumulate) for world, accumulate in ((4, 1), (1, 4), (2, 2))]
    wanted = [(4, 1), (1, 4), (2, 2)]
    assert [(len(s.steps[0]), len(s.steps[0][0])) for s in schedules] == wanted
    packs = [[sorted(p for rank in step for p in rank) for step in s.steps] for s in schedules]
    assert packs[0] == packs[1] == packs[2]
    assert schedules[0].epoch_ends == schedules[1].epoch_ends


def test_ranks_are_balanced_over_the_micro_batches():
    assert share_out([[9], [8], [7], [6], [5], [4], [], []], 2) == [[[9], [6], [5], []], [[8], [7], [4], []]]


def test_too_long_a_sample_is_refused():
    with pytest.raises(InputError, match=r"tokens_per_batch is 64, but sample s1/0 alone has 98 training tokens") as e:
        check_budget([ref(0, 20, 5), ref(1, 100, 5)], 64)
    assert "at least 98" in str(e.value.fix)


def test_samples_without_a_label_are_left_out():
    refs = [ref(0, 20, 5), ref(1, 20, 1), ref(2, 20, 0), replace(ref(3, 2, 2))]
    assert [r.id for r in trainable(refs)] == ["s0/0"]
