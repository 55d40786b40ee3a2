"""What was trained is what is served: the exported files' independent forward agrees with the training forward."""

from pathlib import Path

import pytest
import torch

from eyas.draft.config import aux_layers, draft_config
from eyas.draft.init import init_drafter, load_drafter
from eyas.draft.loss import loss_config
from eyas.draft.vocab import load_vocab
from eyas.export.reference import ReferenceDrafter
from eyas.export.vllm import export_vllm
from eyas.progress import Progress
from eyas.states.store import HarvestStore
from eyas.train.data import collate, layout
from eyas.train.trainer import train

from .tiny_run import HIDDEN, LAYERS, tiny_recipe, tiny_run


@pytest.mark.parametrize("preset", ["eagle3", "eagle3.1"])
def test_exported_drafter_agrees_with_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str):
    torch.set_num_threads(1)
    run, target = tiny_run(tmp_path)
    recipe = tiny_recipe(tmp_path, draft={"preset": preset}, epochs=2, ttt_steps=3)
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"dtype": "float32"})})
    train(recipe, target, run, Progress(quiet=True))
    vocab, store = load_vocab(run), HarvestStore(run)
    model = init_drafter(draft_config(target, recipe.draft, 3), vocab, target)
    load_drafter(model, run.train / "final")
    reference = ReferenceDrafter(export_vllm(run, target, recipe), model.embed_tokens.weight.detach())
    how = layout(
        store.layers(), aux_layers(target, recipe.draft), LAYERS, hidden=HIDDEN, steps=3, nested=True, pad_to=None
    )
    seen: list[torch.Tensor] = []
    monkeypatch.setattr("eyas.draft.model.head_loss", lambda inputs, head, spec: _keep(seen, inputs, head))
    for ref in store.samples("holdout"):
        batch = collate([store.load(ref)], how)
        n = batch.tokens
        seen.clear()
        with pytest.raises(StopIteration):
            model(batch, loss_config("kl_div", torch.device("cpu")))
        prefix = reference.prefill(batch.input_ids[0], batch.aux_states[0].float(), batch.position_ids[0])
        rows = batch.plan.rows[0][batch.plan.loss_at[0]]
        torch.testing.assert_close(seen[0], reference.logits(prefix.logits_input[rows]), rtol=1e-4, atol=1e-4)
        # a later step, where the reference's own first proposal happens to be the token that training fed
        proposed = reference.draft(prefix, torch.arange(n), 2)
        ours = vocab.target_ids[seen[1].argmax(-1)]
        trained = batch.plan.rows[1][batch.plan.loss_at[1]]
        same = proposed[trained, 0] == batch.input_ids[0, trained + 1]
        assert torch.equal(proposed[trained[same], 1], ours[same])


def _keep(seen: list[torch.Tensor], inputs: list[torch.Tensor], head: torch.Tensor) -> None:
    seen += [x.detach() @ head.detach().t() for x in inputs]
    raise StopIteration
