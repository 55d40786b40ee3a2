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


def test_relative_paths_start_at_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("{}\n")
    recipe = load_recipe(write(tmp_path, GOOD))
    assert recipe.data.prompts == [str((tmp_path / "p.jsonl").resolve())]
    assert recipe.target.path == "some/model"


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    recipe = load_recipe(path, ["train.epochs=3", "draft.from=abc", "draft.aux_layers=[1, 2, 3]", "data.limit=10"])
    assert (recipe.train.epochs, recipe.draft.from_, recipe.draft.aux_layers) == (3, "abc", [1, 2, 3])
    assert recipe.data.limit == 10


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trian": {}}, 'unknown key trian - did you mean "train"?'),
        ({"train": {"epoch": 3}}, 'unknown key train.epoch - did you mean "train.epochs"?'),
        ({"engine": {"sampling": {"temprature": 1}}}, 'did you mean "engine.sampling.temperature"?'),
        ({"draft": {"zzz": 1}}, "unknown key draft.zzz - known keys here: preset, vocab_size, layers"),
        ({"train": {"epochs": "many"}}, "train.epochs: Input should be a valid integer"),
        ({"train": {"epochs": "many"}}, "found 'many'"),
        ({"train": {"epochs": 0}}, "train.epochs: Input should be greater than or equal to 1, found 0"),
        ({"data": {}}, "key data.prompts is missing - add it"),
        ({"data": {"prompts": []}}, "data.prompts: List should have at least 1 item"),
        ({"train": {"optimizer": "sgd"}}, "train.optimizer: Input should be 'adamw' or 'muon', found 'sgd'"),
        ({"data": {"prompts": "p", "max_length": 64}}, "engine.sampling.max_tokens (2048) leaves no room for a prompt"),
        ({"engine": {"args": {"trust-remote-code": True}}}, "set target.remote_code instead"),
        ({"train": {"epochs": True}}, "train.epochs: Input should be a valid integer, found True"),
        ({"train": {"lr": float("inf")}}, "train.lr: Input should be a finite number"),
        ({"data": {"prompts": "p", "holdout": 1.5}}, "data.holdout: a share must be below 1"),
        ({"run_dir": ""}, "run_dir: String should have at least 1 character"),
        ({"train": 3}, "train: Input should be"),
        ({"train": {"loss": "nope"}}, "train.loss"),
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
        ("a: [1", "is not valid YAML"),
        ("- a\n", "holds a list, not a mapping"),
        ("", "holds nothing, not a mapping"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_recipe(write(tmp_path, text))


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
