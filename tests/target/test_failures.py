"""What eyas must refuse or get right where other tools fail silently; one clear message each."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import InputError
from eyas.target.resolve import resolve_target
from eyas.target.tokenizer import load_tokenizer
from eyas.target.weights import load_embedding, load_final_norm, load_head
from target import fixtures
from target.fixtures import HIDDEN, LAYERS, VOCAB, Config, Weights, edit_config


def refused(path: Path | str, *parts: str) -> None:
    """The target is refused with one message that holds all `parts`, and with a fix."""
    with pytest.raises(InputError) as e:
        resolve_target(str(path))
    assert e.value.fix
    for part in parts:
        assert part in e.value.message, e.value.message


def with_weights(path: Path, change: Callable[[Weights], None], *, shards: int = 1) -> Path:
    """A Llama whose weights were changed."""
    fixtures.llama(path)
    weights = fixtures.dense_weights().weights
    change(weights)
    fixtures.write_weights(path, weights, shards=shards)
    return path


# 1. Sizes at the top level of a nested config


@pytest.mark.parametrize(
    "nesting",
    [("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config"), ("lm_config",)],
)
def test_nested_sizes_win_over_the_top_level(tmp_path: Path, nesting: tuple[str, ...]) -> None:
    text = fixtures.dense_config("llama", "LlamaForCausalLM")
    config: Config = text
    for key in reversed(nesting):
        config = {key: config}
    config |= {"architectures": ["Wrapper"], "model_type": "wrapper"}
    # planted: plausible sizes of another part at the top
    config |= {"hidden_size": 32, "num_hidden_layers": 12, "vocab_size": 1000, "num_attention_heads": 2}
    fixtures.write_checkpoint(tmp_path, config, fixtures.dense_weights().weights)
    info = resolve_target(str(tmp_path))
    assert (info.hidden_size, info.num_hidden_layers, info.vocab_size) == (HIDDEN, LAYERS, VOCAB)
    assert (info.architecture, info.text_architecture) == ("Wrapper", "LlamaForCausalLM")


def test_no_text_model(tmp_path: Path) -> None:
    config = {"architectures": ["SiglipModel"], "model_type": "siglip", "vision_config": {"hidden_size": 64}}
    fixtures.write_checkpoint(tmp_path, config, fixtures.dense_weights().weights)
    refused(tmp_path, "holds no language model", "vision_config")


def test_no_config(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json")


def test_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json is not valid JSON")


def test_config_of_another_width(tmp_path: Path) -> None:
    fixtures.llama(tmp_path)
    edit_config(tmp_path, lambda c: c.update(hidden_size=128))
    refused(tmp_path, "no embedding of shape [vocabulary, 128]", "model.embed_tokens.weight [320, 64]")


def test_config_with_more_layers(tmp_path: Path) -> None:
    fixtures.llama(tmp_path)
    edit_config(tmp_path, lambda c: c.update(num_hidden_layers=LAYERS + 1))
    refused(tmp_path, "num_hidden_layers 4, the weights hold only layer 0 to 2 (model.layers.*)")
    edit_config(tmp_path, lambda c: c.update(num_hidden_layers=10**9))
    refused(tmp_path, "num_hidden_layers 1000000000, the weights hold only layer 0 to 2")


def test_config_of_another_width_and_depth(tmp_path: Path) -> None:
    fixtures.llama(tmp_path)
    edit_config(tmp_path, lambda c: c.update(hidden_size=128, num_hidden_layers=32))
    refused(tmp_path, "decoder layers 0 to 31, which no module owns ('model.' has layer 0 to 2)", "embed_tokens.weight")


def test_config_with_fewer_layers(tmp_path: Path) -> None:
    fixtures.llama(tmp_path)
    edit_config(tmp_path, lambda c: c.update(num_hidden_layers=LAYERS - 1))
    assert "the checkpoint has also layer 2" in resolve_target(str(tmp_path)).notes[0]


# 2. Embedding, head and final norm


def test_vision_norm_of_the_same_suffix_does_not_win(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        r = fixtures.Random(seed=1)
        fixtures.vision_tower(r, "model.visual.")
        weights.update(r.weights)

    info = resolve_target(str(with_weights(tmp_path, change)))
    assert info.final_norm.name == "model.norm.weight"
    assert info.embedding.name == "model.embed_tokens.weight"


def test_missing_norm_is_not_replaced_by_a_towers(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        r = fixtures.Random(seed=1)
        fixtures.vision_tower(r, "model.visual.")
        weights.update(r.weights)
        del weights["model.norm.weight"]

    refused(with_weights(tmp_path, change), "no final norm of shape [64]", "model.visual.norm.weight")


def test_missing_embedding(tmp_path: Path) -> None:
    refused(with_weights(tmp_path, lambda w: w.pop("model.embed_tokens.weight")), "no embedding")


def test_two_heads(tmp_path: Path) -> None:
    path = with_weights(tmp_path, lambda w: w.update({"output.weight": w["lm_head.weight"].clone()}))
    refused(path, "2 tensors could be the head", "lm_head.weight [320, 64]", "output.weight [320, 64]")


def test_two_embeddings(tmp_path: Path) -> None:
    path = with_weights(tmp_path, lambda w: w.update({"model.wte.weight": w["lm_head.weight"].clone()}))
    refused(path, "2 tensors could be the embedding", "model.embed_tokens.weight", "model.wte.weight")


def test_not_tied_without_a_head(tmp_path: Path) -> None:
    refused(with_weights(tmp_path, lambda w: w.pop("lm_head.weight")), "tie_word_embeddings is false", "no head tensor")


def test_nothing_said_and_no_head(tmp_path: Path) -> None:
    path = with_weights(tmp_path, lambda w: w.pop("lm_head.weight"))
    edit_config(path, lambda c: c.pop("tie_word_embeddings"))
    refused(path, "absent (false for this model type)")


def test_said_tied_with_a_head_of_its_own(tmp_path: Path) -> None:
    path = fixtures.llama(tmp_path)
    edit_config(path, lambda c: c.update(tie_word_embeddings=True))
    info = resolve_target(str(path))
    assert info.head.name == "lm_head.weight"
    assert any("own head" in note for note in info.notes)


def test_head_of_fewer_rows(tmp_path: Path) -> None:
    path = with_weights(tmp_path, lambda w: w.update({"lm_head.weight": w["lm_head.weight"][:300].clone()}))
    refused(path, "has 300 rows", "320")


def test_head_in_an_unknown_packing_is_not_taken_for_tied(tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        del weights["lm_head.weight"]
        weights["lm_head.weight_codes"] = torch.zeros(320, 8, dtype=torch.uint8)

    path = with_weights(tmp_path, change)
    edit_config(path, lambda c: c.update(tie_word_embeddings=True))
    refused(path, "stored in a way that eyas cannot read", "lm_head.weight_codes")


def test_fp8_head_without_scales(tmp_path: Path) -> None:
    path = with_weights(tmp_path, lambda w: w.update({"lm_head.weight": w["lm_head.weight"].to(torch.float8_e4m3fn)}))
    refused(path, "lm_head.weight is F8_E4M3 and has no weight_scale")


def test_loaded_weights_are_the_files(tmp_path: Path) -> None:
    path = fixtures.llama(tmp_path, shards=3)
    info = resolve_target(str(path))
    stored = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    assert torch.equal(load_embedding(info), stored["model.embed_tokens.weight"])
    assert torch.equal(load_final_norm(info), stored["model.norm.weight"])
    rows = torch.tensor([7, 3, 319, 3])
    assert torch.equal(load_head(info, rows), stored["lm_head.weight"][rows])
    with pytest.raises(InputError, match="asked for"):
        load_head(info, torch.tensor([320]))


def test_not_finite(tmp_path: Path) -> None:
    path = with_weights(tmp_path, lambda w: w["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(InputError, match=r"model\.norm\.weight holds values that are not finite"):
        load_final_norm(resolve_target(str(path)))


# Files


def test_no_weights(tmp_path: Path) -> None:
    fixtures.llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "no *.safetensors weights")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "only as pickle files", "pytorch_model.bin")


def test_missing_index(tmp_path: Path) -> None:
    fixtures.llama(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "the index model.safetensors.index.json is missing")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "the index model.safetensors.index.json is missing")  # one shard is no whole checkpoint


def test_missing_shard(tmp_path: Path) -> None:
    fixtures.llama(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "1 of 3 shards", "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("left", [4, 60, -100])
def test_truncated_file(tmp_path: Path, shards: int, left: int) -> None:
    fixtures.llama(tmp_path, shards=shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    data = file.read_bytes()
    file.write_bytes(data[:left])
    refused(tmp_path, file.name, "is no safetensors file" if left == 4 else "is cut short")


def test_index_of_another_checkpoint(tmp_path: Path) -> None:
    fixtures.llama(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.layers.0.new.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(value))
    refused(tmp_path, "places model.layers.0.new.weight in model-00001-of-00002.safetensors")


def test_index_leaves_the_directory(tmp_path: Path) -> None:
    fixtures.llama(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    refused(tmp_path, "no usable weight_map")


@pytest.mark.parametrize("shards", [1, 2])
def test_lfs_pointer(tmp_path: Path, shards: int) -> None:
    path = fixtures.llama(tmp_path, shards=shards)
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n")
    with pytest.raises(InputError, match=f"{file.name} is a Git LFS pointer") as e:
        resolve_target(str(path))
    assert "git lfs pull" in str(e.value.fix)


def test_weights_that_are_a_directory(tmp_path: Path) -> None:
    fixtures.llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "model.safetensors is a directory")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"data_offsets": [0.0, 256.0]}, "two ascending data_offsets in whole numbers expected"),
        ({"data_offsets": ["0", "256"]}, "two ascending data_offsets in whole numbers expected"),
        ({"data_offsets": [256, 0]}, "a tensor lies at bytes 256 to 0 of the data"),
        ({"data_offsets": [-256, 0]}, "two ascending data_offsets in whole numbers expected"),
        ({"data_offsets": [0, 256]}, "of the data, the one before it ends at 256"),
        ({"data_offsets": [0]}, "in whole numbers expected"),
        ({"shape": [64.0]}, "in whole numbers expected"),
        ({"shape": "ab"}, "in whole numbers expected"),
        ({"shape": [10**30]}, "says F32 [1000000000000000000000000000000], but 256 bytes"),
        ({"dtype": 5}, "a dtype, a shape"),
    ],
)
def test_malformed_header(tmp_path: Path, entry: Config, said: str) -> None:
    file = fixtures.llama(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"].update(entry)
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])
    refused(tmp_path, str(file), said)


# Names


def test_no_directory() -> None:
    refused("/no/such/directory", "no such directory")


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    refused("someone/no-such-model", "no local directory", "not in the local cache", "hub cannot be reached")


# Tokens


def test_no_stop_token(tmp_path: Path) -> None:
    fixtures.llama(tmp_path)
    edit_config(tmp_path, lambda c: c.pop("eos_token_id"))
    (tmp_path / "generation_config.json").unlink()
    refused(tmp_path, "names an eos_token_id")


def test_stop_token_outside(tmp_path: Path) -> None:
    fixtures.llama(tmp_path)
    edit_config(tmp_path, lambda c: c.update(eos_token_id=5000))
    refused(tmp_path, "eos token id 5000 lies outside the 320 rows")


def test_tokenizer(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.llama(tmp_path, tokenizer=True)))
    assert len(load_tokenizer(info)) <= VOCAB


def test_tokenizer_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the tokenizer cannot be loaded"):
        load_tokenizer(resolve_target(str(fixtures.llama(tmp_path))))


def test_no_chat_template(tmp_path: Path) -> None:
    fixtures.write_tokenizer(fixtures.llama(tmp_path), chat_template=None)
    with pytest.raises(InputError, match="has no chat template"):
        load_tokenizer(resolve_target(str(tmp_path)))


OWN_CODE = """
from transformers import PythonBackend


class OwnTokenizer(PythonBackend):
    vocab_files_names = {"vocab_file": "own.vocab"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        with open(vocab_file, encoding="utf-8") as f:
            self.pieces = f.read().split()
        self.ids = {piece: k for k, piece in enumerate(self.pieces)}
        super().__init__(unk_token="<unk>", eos_token="<|end|>", **kwargs)

    @property
    def vocab_size(self):
        return len(self.pieces)

    def get_vocab(self):
        return dict(self.ids)

    def _tokenize(self, text):
        return text.split()

    def _convert_token_to_id(self, token):
        return self.ids.get(token, 0)

    def _convert_id_to_token(self, index):
        return self.pieces[index]

    def save_vocabulary(self, *args, **kwargs):
        return ()
"""


def test_slow_tokenizer_of_the_checkpoints_own_code(tmp_path: Path) -> None:
    """Kimi's tokenizer is such code: refused unless allowed, then used as it is."""
    fixtures.llama(tmp_path)
    (tmp_path / "tokenization_own.py").write_text(OWN_CODE)
    (tmp_path / "own.vocab").write_text("<unk> <s> <|end|> what is two")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }} <|end|>")
    fixtures.write_json(
        tmp_path / "tokenizer_config.json",
        {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}},
    )
    info = resolve_target(str(tmp_path))
    with pytest.raises(InputError, match="the tokenizer cannot be loaded") as e:
        load_tokenizer(info)
    assert "remote_code" in str(e.value.fix)
    tokenizer = load_tokenizer(info, remote_code=True)
    messages = [{"role": "user", "content": "what is two"}]
    assert tokenizer.apply_chat_template(messages, return_dict=False) == [3, 4, 5, 2]


def test_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    fixtures.write_tokenizer(fixtures.llama(tmp_path), vocab=VOCAB + 40)
    with pytest.raises(InputError, match="tokens, the embedding only 320 rows"):
        load_tokenizer(resolve_target(str(tmp_path)))
