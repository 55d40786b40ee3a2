"""The recipe: every bad input has one clear message; overrides and paths resolve as documented."""

from pathlib import Path

import pytest
import yaml

from eyas.errors import InputError
from eyas.recipe import Recipe, dump_recipe, load_recipe

GOOD = {"run_dir": "runs/x", "target": {"path": "some/model"}, "data": {"prompts": "p.jsonl"}}


def write(tmp_path: Path, value: object) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value))
    return path


def test_minimal_recipe_has_defaults_and_round_trips(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD))
    assert recipe.data.prompts == ["p.jsonl"]
    assert recipe.engine.sampling.temperature == 0.0
    again = Recipe.model_validate(yaml.safe_load(dump_recipe(recipe)))
    assert again == recipe


def test_the_largest_seed_is_taken_everywhere(tmp_path: Path) -> None:
    largest = 2**31 - 1
    recipe = load_recipe(write(tmp_path, GOOD), [f"train.seed={largest}", f"engine.sampling.seed={largest}"])
    assert recipe.train.seed == recipe.engine.sampling.seed == largest
    assert load_recipe(write(tmp_path, GOOD), ["engine.sampling.seed=null"]).engine.sampling.seed is None


def test_relative_paths_start_at_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("{}\n")
    recipe = load_recipe(write(tmp_path, GOOD))
    assert recipe.data.prompts == [str((tmp_path / "p.jsonl").resolve())]
    assert recipe.target.path == "some/model"


def test_a_key_file_lies_beside_the_recipe(tmp_path: Path) -> None:
    path = write(tmp_path, {**GOOD, "engine": {"urls": "http://a:1", "api_key_file": "key"}})
    assert load_recipe(path).engine.api_key_file == "key"
    (tmp_path / "key").write_text("k")
    assert load_recipe(path).engine.api_key_file == str((tmp_path / "key").resolve())


def test_options_of_the_server_that_change_nothing_of_eyas(tmp_path: Path) -> None:
    args = {"gpu-memory-utilization": 0.8, "max_num_batched_tokens": 4096, "pipeline-parallel-size": 1}
    args |= {"enable-dbo": False, "model-impl": "auto", "max-num-seqs": 8}
    assert load_recipe(write(tmp_path, {**GOOD, "engine": {"args": args}})).engine.args == args


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    recipe = load_recipe(path, ["train.epochs=3", "draft.from=abc", "draft.aux_layers=[1, 2, 3]", "data.limit=10"])
    assert (recipe.train.epochs, recipe.draft.from_, recipe.draft.aux_layers) == (3, "abc", [1, 2, 3])
    assert recipe.data.limit == 10


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trian": {}}, 'line 6: unknown key trian\n  fix: did you mean "train"?'),
        ({"train": {"epoch": 3}}, 'line 7: unknown key train.epoch\n  fix: did you mean "train.epochs"?'),
        ({"engine": {"sampling": {"temprature": 1}}}, 'did you mean "engine.sampling.temperature"?'),
        ({"draft": {"zzz": 1}}, "unknown key draft.zzz\n  fix: known keys here: preset, vocab_size, layers"),
        ({"train": {"epochs": "many"}}, "line 7: train.epochs: expected a whole number, found 'many'"),
        ({"train": {"epochs": "many"}}, "fix: e.g. train.epochs: 10, which is the default"),
        ({"train": {"epochs": 0}}, "train.epochs: expected a number of at least 1, found 0"),
        (
            {"engine": {"urls": ["gpu-box:8000"]}},
            "line 5: engine.urls.0: expected the address of a server, such as http://",
        ),
        ({"engine": {"urls": "http://a:port"}}, "expected the address of a server"),
        ({"data": {}}, "line 1: key data.prompts is missing\n  fix: add it"),
        ({"data": {"prompts": [""]}}, "data.prompts.0: expected a text that is not empty, found ''"),
        ({"data": {"prompts": []}}, "data.prompts: expected a list that is not empty, found an empty list"),
        ({"train": {"optimizer": "sgd"}}, "train.optimizer: expected 'adamw' or 'muon', found 'sgd'"),
        ({"data": {"prompts": "p", "max_length": 64}}, "engine.sampling.max_tokens (2048) leaves no room for a prompt"),
        ({"engine": {"args": {"trust-remote-code": True}}}, "set target.remote_code instead"),
        ({"engine": {"args": {"--trust_remote-code": True}}}, "set target.remote_code instead"),
        (
            {"engine": {"args": {"host": "0.0.0.0"}}},
            "line 5: engine.args.host would replace what eyas sets\n  fix: a server that eyas starts",
        ),
        ({"engine": {"args": {"host": None}}}, "engine.args.host would replace"),  # vLLM's own is every interface
        ({"engine": {"args": {"--api_key": "k"}}}, "engine.args.--api_key would replace what eyas sets"),
        ({"engine": {"args": {"port=80": True}}}, "engine.args.port=80 would replace"),
        ({"engine": {"args": {"model": "other"}}}, "fix: set target.path"),
        ({"engine": {"args": {"tensor_parallel_size": 2}}}, "fix: set engine.tensor_parallel"),
        ({"engine": {"args": {"dtype": "float16"}}}, "fix: set engine.dtype"),
        ({"engine": {"args": {"kv-transfer-config": "{}"}}}, "eyas itself tells the server what to capture"),
        ({"engine": {"args": {"additional-config.x": 1}}}, "eyas itself tells the server what to capture"),
        (
            {"engine": {"args": {"pipeline-parallel-size": 2}}},
            "pipeline-parallel-size: 2: capture does not work with pipeline parallelism\n  fix: leave it out",
        ),
        ({"engine": {"args": {"decode_context_parallel_size": "2"}}}, "with decode context parallelism"),
        ({"engine": {"args": {"prefill-context-parallel-size": 4}}}, "with prefill context parallelism"),
        ({"engine": {"args": {"enable-dbo": True}}}, "with dual-batch overlap"),
        ({"train": {"epochs": True}}, "train.epochs: expected a whole number, found true"),
        ({"train": {"seed": -1}}, "train.seed: expected a number of at least 0, found -1"),
        ({"train": {"seed": 2**31}}, "train.seed: expected a number of at most 2147483647, found 2147483648"),
        ({"engine": {"sampling": {"seed": -1}}}, "engine.sampling.seed: expected a number of at least 0, found -1"),
        ({"train": {"lr": float("inf")}}, "train.lr: expected a finite number, found inf"),
        (
            {"data": {"prompts": "p", "holdout": 1.5}},
            "a share must be below 1, a count a whole number, found 1.5",
        ),
        ({"run_dir": ""}, "run_dir: expected a text that is not empty, found ''"),
        ({"train": 3}, "line 6: train: expected a section of keys, found 3"),
        ({"train": {"loss": "nope"}}, "train.loss: expected 'kl_div', 'rkl'"),
        ({"data": {"prompts": "p", "holdout": "x"}}, "data.holdout: expected a number or a whole number, found 'x'"),
        ({"engine": {"args": {"x": [1]}}}, "line 5: engine.args.x: expected text or a whole number or a number or"),
        ({"target": 3}, "line 4: target: expected a section of keys, found 3"),
        ({"target": None}, "line 4: key target.path is missing"),
        ({"train": [1]}, "train: expected a section of keys, found a list"),
        ({"train": {"lr": "1e-4x"}}, "train.lr: expected a number, found '1e-4x'"),
        ({"train": {"epochs": "1e1"}}, "train.epochs: expected a whole number, found '1e1'"),
        ({"run_dir": "a\0b"}, "line 3: run_dir holds a null byte"),
        ({"data": {"prompts": ["a", "\0"]}}, "line 4: data.prompts.1 holds a null byte"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    path = write(tmp_path, {**GOOD, **change})
    with pytest.raises(InputError) as e:
        load_recipe(path)
    assert expected in str(e.value)
    assert str(path) in str(e.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "line 1: not valid YAML: while parsing a flow sequence expected"),
        ("a: 2024-99-99", "is not valid YAML: month must be"),
        ("[" * 2000, "nested too deeply"),
        ("a: 1\nb: {c: 1,\n  c: 2}", "line 3: key b.c is written twice, first in line 2"),
        ("train: {}\ntrain: {}", "line 2: key train is written twice, first in line 1"),
        ("x: &x {a: 1}\ny: {<<: *x, a: 2, a: 3}", "line 2: key y.a is written twice"),
        ("- a\n", "holds a list, not a mapping"),
        ("", "holds nothing, not a mapping"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_recipe(write(tmp_path, text))


def test_merged_keys_may_be_written_again(tmp_path: Path) -> None:
    text = "run_dir: r\ntarget: m\ndata: {prompts: p}\ntrain: &t {epochs: 3, lr: 1e-4}\n"
    recipe = load_recipe(write(tmp_path, text))
    assert (recipe.target.path, recipe.train.lr) == ("m", 1e-4)
    merged = "engine: &e {concurrency: 3, dtype: float32}\n"
    again = write(tmp_path, text + merged + "draft: {<<: *e, concurrency: 4}\n")
    with pytest.raises(InputError, match=r"line 6: unknown key draft\.concurrency"):
        load_recipe(again)


@pytest.mark.parametrize("name", ["engine", "states", "draft", "train", "export", "verify"])
def test_an_empty_section_means_its_defaults(tmp_path: Path, name: str) -> None:
    assert load_recipe(write(tmp_path, {**GOOD, name: None})) == load_recipe(write(tmp_path, GOOD))
    engine = {"args": None, "sampling": None}
    assert load_recipe(write(tmp_path, {**GOOD, "engine": engine}), ["target.remote_code=true"]).server.args


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", ".1e-3", "+1e-4", "0.0001", "1.0e-4"])
def test_numbers_as_yaml_1_2_writes_them(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, yaml.safe_dump(GOOD) + f"train: {{lr: {text}}}\n")
    assert load_recipe(path).train.lr == 1e-4
    assert load_recipe(write(tmp_path, GOOD), [f"train.lr={text}"]).train.lr == 1e-4


@pytest.mark.parametrize(
    ("option", "limit", "expected"),
    [
        (
            "train.epochs=many",
            None,
            "--set train.epochs=many: expected a whole number, found 'many'\n"
            "  fix: e.g. --set train.epochs=10, which is the default",
        ),
        ("run_dir=", None, "--set run_dir=: expected text, found nothing\n  fix: give text: --set run_dir=..."),
        ("train=3", None, "expected a section of keys, found 3\n  fix: give --set train.KEY=VALUE, or leave it out"),
        ("engine.urls=3", None, "expected a list, found 3\n  fix: give a list: --set engine.urls=..."),
        ("engine.args=3", None, "fix: give --set engine.args.KEY=VALUE, or leave it out"),
        ("train.epoch=3", None, "--set train.epoch=3: unknown key train.epoch\n  fix: did you mean"),
        ("train={epochs: 0}", None, "--set train={epochs: 0}: train.epochs: expected a number of at least 1, found 0"),
        ("train={a: 1, a: 2}", None, "--set train={a: 1, a: 2}, line 1: key a is written twice"),
        ("data.max_length=64", None, "--set data.max_length=64: engine.sampling.max_tokens (2048) leaves no room"),
        ('run_dir="\\0"', None, "run_dir holds a null byte"),
        ("data.limit=5", 1, "--limit 1: expected a number of at least 2, found 1\n  fix: e.g. --limit 10"),
    ],
)
def test_errors_of_options_name_them(tmp_path: Path, option: str, limit: int | None, expected: str) -> None:
    with pytest.raises(InputError) as e:
        load_recipe(write(tmp_path, GOOD), [option], limit)
    assert expected in str(e.value)
    assert str(e.value).startswith("--")


def test_two_errors_have_each_their_place_and_fix(tmp_path: Path) -> None:
    path = write(tmp_path, {**GOOD, "train": {"epochs": 0, "lr": "x"}})
    with pytest.raises(InputError) as e:
        load_recipe(path)
    first, second = str(e.value).splitlines()
    assert first.startswith(f"{path}, line 7: train.epochs: ")
    assert (
        second
        == f"{path}, line 8: train.lr: expected a number, found 'x' - e.g. train.lr: 0.0001, which is the default"
    )


def test_a_recipe_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory, not a recipe file"):
        load_recipe(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no recipe file"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["epochs", "=3", "run_dir.x=1", "train.epochs=[1"])
def test_bad_overrides(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="--set"):
        load_recipe(write(tmp_path, GOOD), [text])


def test_remote_code_reaches_the_server_only_when_allowed(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, GOOD)).server.args == {}
    allowed = load_recipe(write(tmp_path, {**GOOD, "target": {"path": "m", "remote_code": True}}))
    assert allowed.server.args == {"trust-remote-code": True}
