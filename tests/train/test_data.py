"""Batches: the alignment of tokens, states and labels; reading ahead; what is refused."""

import threading
from pathlib import Path

import pytest
import torch

from eyas.errors import EyasError, InputError
from eyas.rundir import RunDir
from eyas.states.store import HarvestStore, Sample
from eyas.train.data import Layout, Reader, collate, layout

from .tiny_run import HIDDEN, STORED, tiny_harvest


def numbered(n: int, mask: list[int], start: int = 0) -> Sample:
    """State of position i and stored layer l: the number 10 * i + l."""
    states = (10 * (start + torch.arange(n - 1))[:, None] + torch.arange(4)[None]).float()
    return Sample("a/0", start + torch.arange(n), torch.tensor(mask).bool(), states[..., None], torch.zeros(0))


def how(**changes) -> Layout:
    return Layout(**{"aux": [0, 2], "last": 3, "hidden": 1, "steps": 2, "nested": True, "pad_to": None, **changes})


def test_alignment_by_hand():
    batch = collate([numbered(5, [0, 0, 1, 1, 1]), numbered(4, [0, 1, 1, 0], start=7)], how(pad_to=7))
    assert batch.tokens == 5
    assert batch.input_ids[0].tolist() == [1, 2, 3, 8, 9, 0, 0]
    assert batch.label_ids[0].tolist() == [2, 3, 4, 9, 10, 0, 0]
    assert batch.aux_states[0, :5].tolist() == [[0, 2], [10, 12], [20, 22], [70, 72], [80, 82]]
    assert batch.last_states[0, :5, 0].tolist() == [13, 23, 33, 83, 93]
    assert batch.document_ids[0].tolist() == [0, 0, 0, 1, 1, -1, -1]
    assert batch.position_ids[0].tolist() == [1, 2, 3, 1, 2, 0, 0]
    # row t is supervised iff the mask is true at t + 1 and t + 2
    assert batch.label_mask[0].tolist() == [False, True, True, True, False, False, False]
    assert batch.supervised == 3


def test_an_empty_pack_is_a_batch_without_labels():
    batch = collate([], how(pad_to=None))
    assert batch.tokens == batch.supervised == 0
    assert batch.aux_states.shape == (1, 1, 2)


def test_wrong_states_are_refused():
    short = numbered(5, [1] * 5)
    with pytest.raises(EyasError, match=r"sample a/0: states of shape \[3, 4, 1\] for 5 tokens, expected \[4"):
        collate([Sample(short.id, short.token_ids, short.loss_mask, short.states[:3], short.logprobs)], how())


def test_layers_that_were_not_harvested_are_refused():
    rest = {"hidden": 1, "steps": 1, "nested": True, "pad_to": None}
    assert layout([2, 3, 4, 6], [2, 4], 6, **rest).aux == [0, 2]
    with pytest.raises(InputError, match=r"after layers \[2, 3, 4, 6\], not after \[5\]"):
        layout([2, 3, 4, 6], [2, 5], 6, **rest)


def reader(tmp_path: Path, packs: list[list[int]]) -> Reader:
    run = RunDir(tmp_path)
    tiny_harvest(run)
    refs = HarvestStore(run).samples("train")
    return Reader(lambda: HarvestStore(run), refs, packs, how(hidden=HIDDEN, last=STORED.index(6)), torch.device("cpu"))


def test_reader_gives_the_packs_in_order_and_its_thread_ends(tmp_path: Path):
    got = [x.ids for x in reader(tmp_path, [[3, 1], [0], [], [2]])]
    assert got == [["part-0-3/0", "part-0-1/0"], ["part-0-0/0"], [], ["part-0-2/0"]]
    assert not [t for t in threading.enumerate() if t.name == "eyas-reader"]


def test_reader_ends_when_it_is_left_early(tmp_path: Path):
    batches = iter(reader(tmp_path, [[0]] * 50))
    next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name == "eyas-reader"]


def test_an_error_while_reading_reaches_the_consumer(tmp_path: Path):
    with pytest.raises(IndexError):
        list(reader(tmp_path, [[0], [99]]))
