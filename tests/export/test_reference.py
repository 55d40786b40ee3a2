"""The exported files, read by the independent forward, compute what speculators' model computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.export.reference import ReferenceDrafter
from eyas.export.vllm import export_vllm
from eyas.rundir import RunDir

from . import tiny_drafter as tiny

STEPS = 4


class Recording(ReferenceDrafter):
    """Keeps the logits of every choice."""

    seen: list[torch.Tensor]

    def _choose(self, normed: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.logits(normed))
        return super()._choose(normed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_before_residual": False},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True},
        {"layers": 2},
        {"layers": 2, "norm_output": True},
        {"rope": "linear"},
        {"rope": "llama3"},
        {"rope": "yarn"},
        {"eagle_aux_hidden_state_layer_ids": [2, 4]},
        {"draft_vocab": tiny.VOCAB},
    ],
    ids=str,
)
def test_reference_equals_speculators(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    run = RunDir(tmp_path)
    made = tiny.config(**options)
    model = tiny.model(made)
    tiny.save_trained(run, made, tiny.trained_tensors(model))
    drafter = Recording(
        export_vllm(run, tiny.target_info(tmp_path), tiny.recipe(run)), model.embed_tokens.weight.detach()
    )

    n, row = 40, 30
    ids = torch.randint(0, tiny.VOCAB, (n,))
    aux = torch.randn(n, len(made.eagle_aux_hidden_state_layer_ids or []) * tiny.HIDDEN)
    drafter.seen = []
    prefix = drafter.prefill(ids, aux, torch.arange(n))
    proposed = drafter.draft(prefix, torch.tensor([row]), STEPS)[0]

    # speculators feeds known tokens in later steps: make the known tokens those that were proposed
    ids[row + 1 : row + STEPS] = proposed[:-1]
    logits: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: logits.append(out[0]))
    with torch.inference_mode():
        model(
            hidden_states=aux[None],
            input_ids=ids[None],
            document_ids=torch.zeros(1, n, dtype=torch.long),
            ttt_steps=STEPS,
        )
    hook.remove()
    for step in range(STEPS):
        torch.testing.assert_close(drafter.seen[step][0], logits[step][row], atol=1e-5, rtol=1e-5)
        draft_id = int(logits[step][row].argmax())
        assert int(proposed[step]) == draft_id + (0 if model.d2t is None else int(model.d2t[draft_id]))


def test_rows_are_independent_and_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    made = tiny.config()
    model = tiny.model(made)
    tiny.save_trained(run, made, tiny.trained_tensors(model))
    drafter = ReferenceDrafter(
        export_vllm(run, tiny.target_info(tmp_path), tiny.recipe(run)), model.embed_tokens.weight.detach()
    )
    ids, aux = torch.randint(0, tiny.VOCAB, (24,)), torch.randn(24, 3 * tiny.HIDDEN)
    prefix = drafter.prefill(ids, aux, torch.arange(24))
    rows = torch.arange(5, 24)
    together = drafter.draft(prefix, rows, 3)
    one_by_one = torch.cat([drafter.draft(prefix, rows[i : i + 1], 3) for i in range(len(rows))])
    assert torch.equal(together, one_by_one)
    # what comes later does not change a row: the prefix may be shorter
    short = drafter.prefill(ids[:11], aux[:11], torch.arange(11))
    assert torch.equal(drafter.draft(short, rows[:6], 3), together[:6])
    monkeypatch.setattr("eyas.export.reference.SCORES_AT_ONCE", 4 * 24 * 5)
    assert torch.equal(drafter.draft(drafter.prefill(ids, aux, torch.arange(24)), rows, 3), together)
