"""Two gloo ranks on the CPU: one step is the step of the global batch, and a rank without samples joins it."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.draft.config import aux_layers, draft_config
from eyas.draft.init import init_drafter
from eyas.draft.loss import loss_config
from eyas.draft.vocab import load_vocab
from eyas.states.store import HarvestStore
from eyas.train.data import collate, layout
from eyas.train.packing import make_schedule, trainable

from . import ranked
from .tiny_run import tiny_recipe, tiny_run, tiny_target

TESTS = Path(__file__).resolve().parent.parent


def test_two_ranks_take_the_step_of_the_global_batch(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run, _ = tiny_run(tmp_path)
    recipe, target, store = (
        tiny_recipe(run.root, **ranked.SETTINGS),
        tiny_target(run.root / "target"),
        HarvestStore(run),
    )
    part, refs = recipe.train, trainable(store.samples("train"))
    schedule = make_schedule(refs, part.tokens_per_batch, part.epochs, part.seed, 2)
    assert any(not pack for step in schedule.steps for rank in step for pack in rank), "no rank is ever without samples"
    _train_in_ranks(run.root)

    log = [json.loads(line) for line in (run.train / "log.jsonl").read_text().splitlines()]
    steps = [e for e in log if e["kind"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, len(schedule.steps) + 1))
    a, b = (load_file(run.root / f"rank{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)

    # the first step by hand: both packs with the global number of rows
    how = layout(store.layers(), aux_layers(target, recipe.draft), target.num_hidden_layers,
                 hidden=target.hidden_size, steps=part.ttt_steps, nested=True, pad_to=None)  # fmt: skip
    config = draft_config(target, recipe.draft, part.ttt_steps)
    model = init_drafter(config, load_vocab(run), target, seed=part.seed)
    batches = [collate([store.load(refs[i]) for i in pack], how) for rank in schedule.steps[0] for pack in rank]
    rows = sum((x.plan.counts for x in batches), torch.zeros(part.ttt_steps))
    losses = loss_config(part.loss, torch.device("cpu"))
    loss = sum(model(x, losses, denominators=rows).loss for x in batches)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert steps[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert steps[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    shutil.rmtree(run.train)


def _train_in_ranks(root: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "train.ranked", str(root)]
    started = [
        subprocess.Popen(command, cwd=TESTS, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)
    ]
    try:
        assert [p.wait(timeout=200) for p in started] == [0, 0]
    finally:
        for p in started:
            p.kill()
