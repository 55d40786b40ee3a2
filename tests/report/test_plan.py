"""`eyas plan`: the facts, the costs and the problems, on checkpoints of real sizes without weights."""

import csv
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from eyas.draft.sizes import layer_sizes, norm_options, weight_shapes
from eyas.recipe import DraftPart, Recipe, load_recipe
from eyas.report import plan as plan_module
from eyas.report.costs import drafter_sizes
from eyas.report.machine import Gpu, Machine, _visible
from eyas.report.plan import Plan, build_plan, print_plan
from eyas.rundir import RunDir, StageRecord
from eyas.target.resolve import resolve_target
from target import fixtures, real_configs
from target.skeleton import dense_skeleton, gpt_oss_skeleton, kimi_k25_real_size

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
LARGE = Machine(128, 2 << 40, (Gpu("NVIDIA H200", 141 << 30),) * 8, 500 << 40)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kimi_k25_real_size(tmp_path_factory.mktemp("kimi"))


def prompts(path: Path, n: int = 100) -> Path:
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"what is {k} plus {k + 1}?"}) + "\n" for k in range(n)))
    return file


def planned(recipe: str, target: Path, tmp_path: Path, *overrides: str, rows: int = 100) -> Plan:
    return build_plan(loaded(recipe, target, tmp_path, *overrides, rows=rows))


def loaded(recipe: str, target: Path, tmp_path: Path, *overrides: str, rows: int = 100) -> Recipe:
    places = [f"target.path={target}", f"data.prompts={prompts(tmp_path, rows)}", f"run_dir={tmp_path / 'run'}"]
    return load_recipe(RECIPES / recipe, [*places, *overrides])


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "this_machine", lambda run_dir: LARGE)


@pytest.mark.usefixtures("large")
def test_kimi(kimi: Path, tmp_path: Path) -> None:
    plan = planned("kimi-k2.5.yaml", kimi, tmp_path, "engine.sampling.max_tokens=1980", rows=500_000)
    found = plan.as_json()
    json.dumps(found)
    on_cpu = [p for p in plan.problems if "no kernel for INT4 experts" in p.message]  # the machine of this test
    assert plan.problems == on_cpu
    target = found["target"]
    assert target["architecture"] == "KimiK25ForConditionalGeneration"
    assert target["text_architecture"] == "DeepseekV3ForCausalLM"
    assert (target["hidden_size"], target["num_hidden_layers"], target["vocab_size"]) == (7168, 61, 163840)
    assert target["attention"] == "mla"
    assert target["quantization"] == "compressed-tensors int4"
    assert target["embedding"] == "language_model.model.embed_tokens.weight"
    assert target["head"] == "language_model.lm_head.weight"
    assert target["final_norm"] == "language_model.model.norm.weight"
    assert found["states"]["bytes_per_token_bf16"] == 57_344
    assert found["states"]["bytes_per_token_fp8"] == 28_672
    assert found["states"]["total_bytes_bf16"] == pytest.approx(57e12, rel=0.02)
    assert found["drafter"]["trainable"] == pytest.approx(962e6, rel=0.001)
    assert found["drafter"]["aux_layers"] == [2, 30, 58]
    launch = found["engine"]["launch"]
    assert found["engine"]["environment"]["EYAS_CAPTURE_ARCH"] == "KimiK25ForConditionalGeneration"
    assert launch[launch.index("--tensor-parallel-size") + 1] == "8"
    assert "--language-model-only" in launch
    assert json.loads(launch[launch.index("--additional-config") + 1]) == {"eyas": {"layers": [2, 30, 58, 61]}}
    buffer = (8192 + 64) * 57_344  # vLLM's steps on such a GPU
    in_flight = loaded("kimi-k2.5.yaml", kimi, tmp_path).engine.concurrency * 8192 * 57_344
    expected = {
        "counted_for": None,
        "step_tokens": 8192,
        "device": 5 * buffer,
        "host": 4 * buffer,
        "in_flight": in_flight,
    }
    assert found["engine"]["capture_memory"] == expected
    assert {time["stage"] for time in found["times"]} == {"prepare", "harvest", "vocab", "train", "export", "verify"}
    assert all(time["source"] and time["seconds"] > 0 for time in found["times"])


def test_kimi_on_a_small_machine(kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Machine(2, 24 << 30, (), 70 << 30)
    monkeypatch.setattr(plan_module, "this_machine", lambda run_dir: small)
    plan = planned("kimi-k2.5.yaml", kimi, tmp_path, rows=10_000)
    assert not plan.ok
    messages = [p.message for p in plan.problems]
    assert any("not enough memory: the target's weights take 595" in m for m in messages)
    assert any("not enough disk" in m for m in messages)
    assert all(p.fix for p in plan.problems)
    assert any(
        "their states take" in note and "with engine.concurrency 27 they always fit" in note for note in plan.notes
    )
    assert plan.states.disk_bytes == plan.states.total_bytes_bf16


@pytest.mark.usefixtures("large")
def test_the_line_that_starts_a_server_of_the_users_own(
    kimi: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned("kimi-k2.5.yaml", kimi, tmp_path, "engine.urls=[http://gpu-box:8123/v1]", "engine.python=/no/python")
    assert plan.ok, plan.problems
    print_plan(plan, Console(width=80))
    words = shlex.split(next(x for x in capsys.readouterr().out.splitlines() if x.startswith("env ")))
    assert "EYAS_CAPTURE_ARCH=KimiK25ForConditionalGeneration" in words
    assert words[words.index("/no/python") :][:3] == ["/no/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--port") + 1] == "8123"
    assert "--kv-transfer-config" in words


def test_the_capture_of_a_given_server_is_counted_for_gpus_also_where_there_are_none(
    kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "this_machine", lambda run_dir: replace(LARGE, gpus=(), memory=40 << 30))
    (tmp_path / "key").write_text("k")
    given = ("engine.urls=[http://gpu-box:8000]", f"engine.api_key_file={tmp_path / 'key'}")
    plan = planned("kimi-k2.5.yaml", kimi, tmp_path, *given)
    assert plan.ok, plan.problems
    assert plan.engine.capture_memory is not None
    buffer = (8192 + 64) * 57_344
    assert (plan.engine.capture_memory.device, plan.engine.capture_memory.host) == (5 * buffer, 4 * buffer)
    assert not [note for note in plan.notes if "this machine's" in note]
    text = io.StringIO()
    print_plan(plan, Console(file=text, width=300))
    assert "at most; counted for GPUs of 85.9 GB; which the server has is not known" in text.getvalue()
    wrong = planned("kimi-k2.5.yaml", kimi, tmp_path, *given, "engine.api_key_file=/no/key")
    assert [p.message for p in wrong.problems if "engine.api_key_file: /no/key" in p.message]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("given", "tokens"), [("4096", 4096), ("'4096'", 4096), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("null", 8192)]
)
def test_steps_as_vllm_reads_them(kimi: Path, tmp_path: Path, given: str, tokens: int) -> None:
    plan = planned("kimi-k2.5.yaml", kimi, tmp_path, f"engine.args.max_num_batched_tokens={given}", rows=1)
    assert plan.engine.capture_memory is not None
    assert plan.engine.capture_memory.step_tokens == tokens


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("recipe", "write", "config", "bytes_per_token"),
    [
        ("qwen3-8b.yaml", dense_skeleton, real_configs.QWEN3_8B, 32_768),
        ("llama-3.1-8b.yaml", dense_skeleton, real_configs.LLAMA_31_8B, 32_768),
        ("gpt-oss-120b.yaml", gpt_oss_skeleton, real_configs.GPT_OSS_120B, 23_040),
    ],
)
def test_recipes(tmp_path: Path, recipe: str, write: Any, config: fixtures.Config, bytes_per_token: int) -> None:
    kind = {"qk_norm": True} if config["model_type"] == "qwen3" else {}
    plan = planned(recipe, write(tmp_path / "target", config, **kind), tmp_path)
    assert plan.ok, plan.problems
    assert plan.states.bytes_per_token_bf16 == bytes_per_token
    assert plan.engine.supports_eagle3
    expected = {"qwen3": 16.4e9, "llama": 16.1e9, "gpt_oss": 65.2e9}[config["model_type"]]
    assert plan.target.weight_bytes == pytest.approx(expected, rel=0.02)
    assert list(plan.drafter.aux_layers) == [2, config["num_hidden_layers"] // 2, config["num_hidden_layers"] - 3]


@pytest.mark.parametrize(
    "changes", [{}, {"attention_heads": 2}, {"intermediate_size": 96, "layers": 2}, {"preset": "eagle3.1"}]
)
@pytest.mark.parametrize("write", [fixtures.llama, fixtures.qwen3, fixtures.deepseek_v3])
def test_drafter_is_the_one_that_is_trained(tmp_path: Path, write: Any, changes: dict[str, Any]) -> None:
    """The plan counts without torch what the model then has."""
    from speculators.models.eagle3 import Eagle3DraftModel

    from eyas.draft.config import draft_config

    target = resolve_target(str(write(tmp_path / "target")))
    recipe = loaded("qwen3-8b.yaml", target.path, tmp_path)
    part = recipe.draft.model_copy(update={"vocab_size": 100, "aux_layers": [1, 2], **changes})
    recipe = recipe.model_copy(update={"draft": part})
    sizes = drafter_sizes(target, recipe)
    config = draft_config(target, part, 3)
    layer = config.transformer_layer_config
    assert (sizes.heads, sizes.key_value_heads, sizes.head_dim, sizes.intermediate_size) == (
        layer.num_attention_heads,
        layer.num_key_value_heads,
        layer.head_dim,
        layer.intermediate_size,
    )
    torch.set_num_threads(1)
    model = Eagle3DraftModel(config)
    left_out = ("embed_tokens", "lm_head", "verifier")
    counted = sum(p.numel() for name, p in model.named_parameters() if not name.startswith(left_out))
    assert sizes.trainable == counted, {name: tuple(p.shape) for name, p in model.named_parameters()}


def tiny(tmp_path: Path, *overrides: str) -> Plan:
    target = fixtures.llama(tmp_path / "target", tokenizer=True)
    return planned("qwen3-8b.yaml", target, tmp_path, "draft.vocab_size=100", "draft.aux_layers=[1,2]", *overrides)


DATA = ("data.max_length=512", "engine.sampling.max_tokens=100")


def test_tiny_is_ok_and_prints(tmp_path: Path) -> None:
    plan = tiny(tmp_path, *DATA)
    assert plan.ok, plan.problems
    assert plan.data is not None
    assert plan.data.samples == 100
    text = io.StringIO()
    print_plan(plan, Console(file=text, width=100))
    for part in ("LlamaForCausalLM", "model.embed_tokens.weight", "--max-model-len 520", "plan: ok", "384 (bf16)"):
        assert part in text.getvalue()


@pytest.mark.parametrize(
    ("override", "message", "fix"),
    [
        ("draft.vocab_size=1000", "draft.vocab_size is 1,000, but the target has only 320 tokens", "at most 320"),
        ("draft.aux_layers=[1,9]", "draft.aux_layers: [1, 9] does not fit a target of 3", "set draft.aux_layers"),
        ("draft.aux_layers=[2,1]", "does not fit a target of 3 layers", "set draft.aux_layers"),
        ("draft.aux_layers=null", "the default [2, 1, 0] does not fit", "set draft.aux_layers"),
        ("data.max_length=4096", "data.max_length is 4,096, but the target ends at position 2,048", "at most 2048"),
        ("data.prompts=/no/such.jsonl", "/no/such.jsonl does not exist", "data.prompts"),
        ("engine.python=/no/python", "/no/python cannot be run", "engine.python"),
        ("draft.key_value_heads=3", "3 does not divide the 4 attention heads", "divisor"),
        ("draft.attention_heads=3", "draft.attention_heads: 3 heads do not divide the hidden size 64", "divisor"),
        ("draft.head_dim=15", "draft.head_dim: heads of 15 cannot be rotated", "even number"),
        ("draft.from=/no/drafter", "draft.from: /no/drafter holds no drafter", "directory of a drafter"),
        ("export.formats=[sglang]", "SGLang ignores norm_before_residual", "set draft.norm_before_residual: false"),
        ("states.window=10", "states.window is 10", "data.limit"),
    ],
)
def test_problems(tmp_path: Path, override: str, message: str, fix: str) -> None:
    plan = tiny(tmp_path, *DATA, override)
    assert not plan.ok
    assert [p for p in plan.problems if message in p.message and fix in p.fix], plan.problems


def test_a_plan_for_a_larger_machine_is_a_note(kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(machine: Machine, *overrides: str) -> list[str]:
        monkeypatch.setattr(plan_module, "this_machine", lambda run_dir: machine)
        plan = planned("kimi-k2.5.yaml", kimi, tmp_path, *overrides)
        assert not [p for p in plan.problems if "GPUs" in p.message]
        assert plan.as_json()["notes"] == plan.notes
        return [note for note in plan.notes if "this machine" in note]

    laptop, half = replace(LARGE, gpus=()), replace(LARGE, gpus=LARGE.gpus[:4])
    assert "this machine has 0 GPUs and 1 NUMA node(s), the recipe needs 8" in notes(laptop)[0]
    assert "this machine has 4 GPUs, the recipe needs 8 (engine.tensor_parallel)" in notes(half)[0]
    assert notes(LARGE) == []
    assert notes(laptop, "engine.urls=[http://gpu-box:8000]") == []
    assert notes(laptop, "engine.kind=hf") == []
    assert notes(replace(laptop, numa_nodes=2), "engine.tensor_parallel=2") == []


@pytest.mark.parametrize(
    ("chosen", "left"),
    [(None, "ab"), ("", ""), ("1", "b"), ("1,0", "ba"), ("0,7,1", "a"), ("-1", ""), ("GPU-bb", "b"), ("MIG-1", "ab")],
)
def test_gpus_that_cuda_is_told_to_see(chosen: str | None, left: str) -> None:
    gpus = {("0", "GPU-aa1"): Gpu("a", 1), ("1", "GPU-bb2"): Gpu("b", 1)}
    assert "".join(gpu.name for gpu in _visible(gpus, chosen)) == left


def test_planning_imports_no_framework() -> None:
    """That alone would take longer than the plan."""
    heavy = ("torch", "transformers", "speculators", "vllm")
    code = f"import sys, eyas.pipeline, eyas.report.plan; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_all_problems_become_one_error_a_line_each(tmp_path: Path) -> None:
    plan = tiny(tmp_path, *DATA, "draft.vocab_size=1000", "data.max_length=4096")
    first, second = str(plan.error()).splitlines()
    assert first.endswith("the target has only 320 tokens - set draft.vocab_size to at most 320")
    assert second.startswith("data.max_length is 4,096, but")
    assert second.endswith(" - set data.max_length to at most 2048")


@pytest.mark.parametrize(("config", "said"), [({"norm_before_residual": True}, "true"), ({}, "false")])
def test_a_start_that_takes_the_residual_elsewhere(tmp_path: Path, config: dict[str, bool], said: str) -> None:
    """The weights of both kinds have the same names and shapes."""
    start = tmp_path / "start"
    start.mkdir()
    same, other = (f"draft.norm_before_residual={x}" for x in (("true", "false") if config else ("false", "true")))
    target = resolve_target(str(fixtures.llama(tmp_path / "target", tokenizer=True)))
    part = DraftPart()
    shapes = weight_shapes(target.hidden_size, layer_sizes(target, part), norm_options(part), layers=1, aux=2)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, start / "model.safetensors")
    layer = {"model_type": "llama", "rms_norm_eps": target.rms_norm_eps, "rope_parameters": target.rope_parameters}
    (start / "config.json").write_text(json.dumps({**layer, **config}))
    assert tiny(tmp_path, *DATA, f"draft.from={start}", same).ok
    (problem,) = tiny(tmp_path, *DATA, f"draft.from={start}", other).problems
    assert f"config.json has norm_before_residual {said}" in problem.message
    assert problem.fix == f"set draft.norm_before_residual: {said}"


def test_no_chat_template(tmp_path: Path) -> None:
    fixtures.write_tokenizer(fixtures.llama(tmp_path / "target"), chat_template=None)
    plan = planned(
        "qwen3-8b.yaml", tmp_path / "target", tmp_path, "draft.vocab_size=100", "draft.aux_layers=[1,2]", *DATA
    )
    assert [p for p in plan.problems if "has no chat template" in p.message]


def test_unsupported_by_the_engine(tmp_path: Path) -> None:
    fixtures.write_tokenizer(fixtures.gemma3(tmp_path / "target"))
    common = ("draft.vocab_size=100", "draft.aux_layers=[1,2]", *DATA)
    plan = planned("qwen3-8b.yaml", tmp_path / "target", tmp_path, *common)
    assert [p for p in plan.problems if "gives no auxiliary hidden states for" in p.message]
    assert planned("qwen3-8b.yaml", tmp_path / "target", tmp_path, *common, "engine.kind=hf").ok


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "this_machine", lambda run_dir: replace(LARGE, disk_free=10_000))
    plan = tiny(tmp_path, *DATA)
    assert [p for p in plan.problems if "not enough disk" in p.message and "data.limit" in p.fix]


def test_disk_for_checkpoints_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are there: of fewer prompts, nothing would become smaller."""
    monkeypatch.setattr(plan_module, "this_machine", lambda run_dir: replace(LARGE, disk_free=10_000))
    run = RunDir(tmp_path / "run")
    run.previous.mkdir(parents=True)
    run.write_record("harvest", StageRecord("f", "done"))
    common = (*DATA, "train.keep=3")
    (problem,) = tiny(tmp_path, *common).problems
    assert problem.fix == (
        f"set train.keep below 3, delete what you do not need of {run.previous}, or put run_dir on a larger disk"
    )
    run.previous.rmdir()
    (problem,) = tiny(tmp_path, *DATA, "train.keep=1").problems
    assert problem.fix == "put run_dir on a larger disk"


def test_states_on_a_disk_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is no file system of its own here")
        run = RunDir(tmp_path / "run")
        run.root.mkdir()
        run.states.symlink_to(other)
        assert tiny(tmp_path, *DATA).ok
        monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10_000, 0, 10_000))
        (problem,) = tiny(tmp_path, *DATA).problems
        assert problem.message.endswith(f"are free at {run.states}")


def test_conversations_of_several_turns_and_kept_answers(tmp_path: Path) -> None:
    target = fixtures.llama(tmp_path / "target", tokenizer=True)
    texts = (("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"))
    rows = [{"messages": [{"role": r, "content": f"{c} {k}"} for r, c in texts]} for k in range(5)]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(rows))
    common = (f"data.prompts={file}", "draft.vocab_size=100", "draft.aux_layers=[1,2]", *DATA)
    again = planned("qwen3-8b.yaml", target, tmp_path, *common)
    assert again.data is not None
    assert (again.data.conversations, again.data.samples) == (5, 10)
    assert again.data.answer_tokens == 10 * 100
    kept = planned("qwen3-8b.yaml", target, tmp_path, *common, "data.responses=keep")
    assert kept.data is not None
    assert kept.data.samples == 5
    assert 0 < kept.data.answer_tokens < kept.data.tokens < 5 * 60
    few = planned("qwen3-8b.yaml", target, tmp_path, *common, "data.limit=2")
    assert few.data is not None
    assert few.data.samples == 4


def with_rows(tmp_path: Path, file: Path, *overrides: str) -> Plan:
    return tiny(tmp_path, *DATA, f"data.prompts={file}", *overrides)


def write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    with open(file, "w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("name", ["wrapped.json", "a.jsonl", "a.csv", "a.JSON"])
def test_rows_and_shapes_are_counted_whatever_the_file(tmp_path: Path, name: str) -> None:
    file, rows = tmp_path / name, [{"prompt": f"one\ntwo\nthree {k}", "response": "a"} for k in range(1000)]
    if name == "a.csv":
        write_csv(file, rows)
    elif name == "a.jsonl":
        file.write_text("\n\n".join(map(json.dumps, rows)))
    else:
        file.write_text(json.dumps({"data": rows} if name == "wrapped.json" else rows))
    plan = with_rows(tmp_path, file)
    assert plan.data is not None
    assert plan.data.conversations == 1000
    assert "first 400 of 1,000 rows" in plan.data.source
    assert plan.as_json()["data"]["shapes"] == {"prompt": 400}
    text = io.StringIO()
    print_plan(plan, Console(file=text, width=100))
    assert "400 prompt" in text.getvalue()


@pytest.mark.parametrize("responses", ["regenerate", "keep"])
def test_the_plan_counts_the_tokens_that_prepare_then_makes(tmp_path: Path, responses: str) -> None:
    from eyas.data.prepare import prepare
    from eyas.progress import Progress
    from eyas.rundir import RunDir

    rows = [
        {"system": "be brief", "prompt": f"what is {k}? " * (k % 7 + 1), "response": "it is " * k} for k in range(9)
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in [*rows, rows[1], {"foo": 1}]))
    plan = with_rows(tmp_path, file, f"data.responses={responses}")
    assert plan.data is not None
    run = RunDir(tmp_path / "made")
    recipe = loaded("qwen3-8b.yaml", plan.target.path, tmp_path, *DATA, f"data.prompts={file}", "data.holdout=0")
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"responses": responses})})
    made = prepare(recipe, plan.target, run, Progress(quiet=True))
    assert plan.data.conversations == made["conversations"]
    assert (plan.data.shapes, plan.data.dropped) == (made["shapes"], made["dropped"])
    expected = made["tokens"] + (100 * made["samples"] if responses == "regenerate" else 0)
    assert plan.data.tokens == expected
    if responses == "keep":
        assert plan.data.answer_tokens == made["supervised_tokens"]


def lines(*rows: Any) -> str:
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)


GOOD = [{"prompt": f"q {k}"} for k in range(20)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines(*GOOD, '{"prompt": '), "a.jsonl, line 21: broken JSON: Expecting value at column 12"),
        (lines({"foo": 1}, {"foo": 2}), "2 of 2 dropped\n  2 x no known shape (first: a.jsonl, line 1: its keys: foo)"),
        (lines(GOOD[0], {"foo": 1}, {"foo": 2}), "more bad rows than good ones"),
        ("\ufeff\n", "holds no row"),
    ],
)
def test_what_prepare_would_refuse_at_once(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    assert [p for p in with_rows(tmp_path, file).problems if message in p.message and p.fix]


def test_a_chat_template_that_does_not_parse(tmp_path: Path) -> None:
    target = fixtures.llama(tmp_path / "target")
    fixtures.write_tokenizer(target, chat_template="{% for m in messages %}{{ m.content }")
    common = ("draft.vocab_size=100", "draft.aux_layers=[1,2]", *DATA)
    (problem,) = planned("qwen3-8b.yaml", target, tmp_path, *common).problems
    assert "chat template cannot render one user message" in problem.message


def test_many_bad_rows_first(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(lines(*[{"foo": k} for k in range(500)], *[{"prompt": f"q {k}"} for k in range(2000)]))
    plan = with_rows(tmp_path, file)
    assert plan.ok, plan.problems
    assert plan.data is not None
    assert plan.data.dropped == {"no known shape": 500}
    assert plan.data.conversations == 1250, "half of the rows that were read"


def test_rows_beyond_the_limit_are_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(lines(*GOOD, "{"))
    assert with_rows(tmp_path, file, "data.limit=20").ok


def test_a_later_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_text(lines(*[{"prompt": f"q {k}"} for k in range(500)]))
    (tmp_path / "d" / "b.parquet").write_text("PAR1 no")
    (problem,) = with_rows(tmp_path, tmp_path / "d").problems
    assert "b.parquet is not a Parquet file" in problem.message
