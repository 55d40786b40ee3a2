"""Packing: budgets are kept, little is wasted, the same seed and epoch give the same packs, ranks are balanced."""

from dataclasses import replace

import numpy as np
import pytest

from eyas.errors import InputError
from eyas.states.store import SampleRef
from eyas.train.packing import check_budget, deal, make_schedule, pack, trainable


def ref(i: int, tokens: int, supervised: int) -> SampleRef:
    return SampleRef(f"s{i}/0", "train", tokens, tokens - supervised, supervised, tokens - 1, "a.safetensors", i, 0, i)


def lengths(n: int = 500, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(20, 900, n).tolist()


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
    assert sorted(i for s in a for p in s for i in p) == sorted(i for s in b for p in s for i in p)


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


def test_too_long_a_sample_is_refused():
    with pytest.raises(InputError, match=r"tokens_per_batch is 64, but sample s1/0 alone has 98 training tokens") as e:
        check_budget([ref(0, 20, 5), ref(1, 100, 5)], 64)
    assert "at least 98" in str(e.value.fix)


def test_samples_without_a_label_are_left_out():
    refs = [ref(0, 20, 5), ref(1, 20, 1), ref(2, 20, 0), replace(ref(3, 2, 2))]
    assert [r.id for r in trainable(refs)] == ["s0/0"]
