"""What a plan says of a target that resolves, but cannot be used with its tokenizer or its depth."""

import json
from pathlib import Path

import pytest

from eyas.errors import InputError
from eyas.recipe import load_recipe
from eyas.report.plan import build_plan
from eyas.target.resolve import resolve_target
from eyas.target.tokenizer import load_tokenizer
from eyas.target.tokens import tokenizer_size
from target import fixtures
from target.fixtures import VOCAB, edit_config

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def problems(target: Path, *overrides: str) -> list[str]:
    prompts = target.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"what is {k}?"}) + "\n" for k in range(20)))
    places = [f"target.path={target}", f"data.prompts={prompts}", f"run_dir={target.parent / 'run'}"]
    small = ["draft.vocab_size=100", "data.max_length=512", "engine.sampling.max_tokens=64"]
    recipe = load_recipe(RECIPES / "qwen3-8b.yaml", [*places, *small, *overrides])
    return [p.message for p in build_plan(recipe).problems]


@pytest.mark.parametrize(("tokens", "found"), [(VOCAB, False), (VOCAB + 40, True)])
def test_tokenizer_larger_than_the_embedding(tmp_path: Path, tokens: int, found: bool) -> None:
    target = fixtures.llama(tmp_path / "target")
    fixtures.write_tokenizer(target, vocab=tokens)
    said = f"the tokenizer has {tokens} tokens, the embedding only {VOCAB} rows"
    assert any(said in m for m in problems(target, "draft.aux_layers=[1,2]")) is found


@pytest.mark.parametrize("first", [True, False])
def test_tokenizer_size_is_what_transformers_counts(tmp_path: Path, first: bool) -> None:
    target = fixtures.llama(tmp_path / "target")
    fixtures.write_tokenizer(target, special_first=first)
    assert tokenizer_size(target) == len(load_tokenizer(resolve_target(str(target))))


def test_one_layer(tmp_path: Path) -> None:
    target = fixtures.llama(tmp_path / "target", tokenizer=True)
    edit_config(target, lambda c: c.update(num_hidden_layers=1))
    assert any("the target is too small: it has 1 layer" in m for m in problems(target))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "tokenizer.json",
            {"added_tokens": {"a": 1}},
            r"tokenizer\.json: added_tokens is .* a list of objects expected",
        ),
        ("tokenizer.json", {"model": [1]}, r"tokenizer\.json: model is \[1\], an object expected"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, r"added_tokens_decoder is \[1\], an object expected"),
    ],
)
def test_broken_tokenizer_files(tmp_path: Path, file: str, content: object, said: str) -> None:
    target = fixtures.llama(tmp_path, tokenizer=True)
    (target / file).write_text(json.dumps(content))
    with pytest.raises(InputError, match=said):
        tokenizer_size(resolve_target(str(target)).path)
