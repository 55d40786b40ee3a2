"""The walk, by hand."""

import pytest
import torch

from eyas.prove.acceptance import Acceptance, Sequence, walk


def sequence(answer: list[int], *, prompt: int = 3, asked: int | None = None) -> Sequence:
    states = torch.zeros(prompt + len(answer) - 1, 1)
    return Sequence(torch.tensor([9] * prompt + answer), prompt, states, asked or len(answer))


def test_walk_jumps_by_accepted_plus_one() -> None:
    # answer 1 2 3 4 5 6 7; proposals after each token, K = 2
    proposed = torch.tensor([[2, 3], [0, 0], [0, 0], [0, 6], [6, 0], [0, 0]])
    # after 1: both accepted, the target adds 4; after 4: none, the target adds 5; after 5: 6 accepted, it adds 7
    assert list(walk(proposed, sequence([1, 2, 3, 4, 5, 6, 7]))) == [2, 0, 1]


def test_rates_are_sums_over_drafts() -> None:
    sums = Acceptance(3, [2, 1])
    assert sums.rate_per_position == pytest.approx([2 / 3, 1 / 3])
    assert sums.acceptance_length == pytest.approx(2.0)
    none = Acceptance(0, [0, 0, 0])
    assert (none.acceptance_length, none.rate_per_position) == (1.0, [0.0] * 3)


def test_right_token_after_a_wrong_one_is_not_accepted() -> None:
    assert list(walk(torch.tensor([[0, 3], [3, 0]]), sequence([1, 2, 3]))) == [0, 1]


def test_one_token_answers_draft_nothing() -> None:
    assert list(walk(torch.empty(0, 3, dtype=torch.long), sequence([1]))) == []


def test_the_last_draft_is_judged_by_tokens_that_are_not_asked_for() -> None:
    # 1 2 3 asked for, 4 5 known beyond: the draft after 2 is judged as the engine does, over the end
    proposed = torch.tensor([[0, 0, 0], [3, 4, 0]])
    assert list(walk(proposed, sequence([1, 2, 3, 4, 5], asked=3))) == [0, 2]
    # after a stop token nothing is known, and nothing taken as accepted
    assert list(walk(proposed, sequence([1, 2, 3]))) == [0, 1]


class _Oracle:
    """Proposes the true continuation of a counting sequence."""

    def prefill(self, token_ids: torch.Tensor, aux: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert token_ids.shape == positions.shape == aux.shape[:1]
        assert positions.tolist() == list(range(len(token_ids)))
        assert aux[:, 0].tolist() == positions.tolist()  # row t: states of position t, token of t + 1
        assert token_ids.tolist() == [100 + t + 1 for t in range(len(token_ids))]
        return token_ids

    def draft(self, prefix: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        return prefix[rows][:, None] + torch.arange(1, tokens + 1)


def test_perfect_drafter_is_aligned() -> None:
    from eyas.prove.acceptance import predict_acceptance

    n = 14
    sample = Sequence(100 + torch.arange(n), 5, torch.arange(n - 1.0)[:, None], asked=9)
    found = predict_acceptance(_Oracle(), [sample], 3)  # type: ignore[arg-type]
    # answer of 9 tokens: 1 + 4 + 4: two drafts, both full
    assert found.drafts == 2
    assert found.accepted_per_position == [2, 2, 2]
    assert found.acceptance_length == 4.0
