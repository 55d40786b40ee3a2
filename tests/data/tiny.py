"""A tiny random Llama checkpoint with a byte-level tokenizer, and an engine that answers with it and writes shards."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas.engine.base import Captured, Completion, Request
from eyas.recipe import Recipe, SamplingPart
from eyas.states.shard import ShardSample, write_shard

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
LAYERS = [1, 2, 3]


def byte_tokenizer(template: str, special: list[str], *, eos: str, plain: list[str] = ()) -> PreTrainedTokenizerFast:  # type: ignore[assignment]
    """One token for each byte, one for each of `special`, and `plain` added tokens that decoding keeps."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    core.add_tokens(list(plain))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def make_tiny(directory: Path, *, template: str = CHATML) -> Path:
    """Writes the checkpoint (float32, 3 layers, hidden 32) and its tokenizer."""
    torch.manual_seed(7)
    tokenizer = byte_tokenizer(template, SPECIAL, eos="<|im_end|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.3,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.exp(0.7 * torch.randn(32)))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def recipe(run_dir: Path, target: Path, prompts: list[Path], **data: Any) -> Recipe:
    states = data.pop("states", "engine")
    sampling = {"max_tokens": data.pop("max_tokens", 6), "temperature": data.pop("temperature", 0.0)}
    return Recipe.model_validate(
        {
            "run_dir": str(run_dir),
            "target": {"path": str(target)},
            "data": {"prompts": [str(p) for p in prompts], "max_length": 400, "broken_rows": "drop", **data},
            "engine": {"dtype": "float32", "sampling": sampling},
            "states": {"dtype": states},
        }
    )


class TinyEngine:
    """Answers with the tiny Llama; shards of `per_shard` samples. `spoil(samples)` may ruin a shard on its way to disk;
    `lose(request)` makes a reply get lost although the states are written, `pause()` runs between steps."""

    serial = itertools.count()

    def __init__(
        self,
        target: Path,
        states: Path,
        *,
        per_shard: int = 5,
        layers: list[int] = LAYERS,
        spoil: Callable[[list[ShardSample]], list[ShardSample]] | None = None,
        lose: Callable[[Request], bool] = lambda r: False,
        pause: Callable[[], None] = lambda: None,
        stop_after: Callable[[Request], int | None] = lambda r: None,
        tag: str = "tiny",
    ) -> None:
        self.model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.states, self.per_shard, self.layers = states, per_shard, layers
        self.spoil, self.lose, self.pause, self.tag, self.stop_after = spoil, lose, pause, tag, stop_after
        self.asked: list[Request] = []
        self.opened = 0
        self.temperature = 0.0

    def __enter__(self) -> "TinyEngine":
        self.opened += 1
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def generate(self, requests: Iterable[Request], sampling: SamplingPart) -> Iterator[Completion]:
        self.temperature = sampling.temperature
        requests = iter(requests)
        while batch := list(itertools.islice(requests, self.per_shard)):
            yield from self._shard(batch)

    def _shard(self, batch: list[Request]) -> Iterator[Completion]:
        path = self.states / f"{self.tag}-{next(self.serial):06d}-{random.randrange(1 << 30):08x}.safetensors"
        samples, completions = [], []
        for index, request in enumerate(batch):
            self.asked.append(request)
            output, logprobs, prompt_logprobs, states = self._answer(request)
            tokens = torch.tensor(request.prompt_ids + output)
            samples.append(ShardSample(states, tokens, len(request.prompt_ids), 0))
            reason = "stop" if output[-1] == self.model.config.eos_token_id else "length"
            captured = Captured(path, index, len(tokens) - 1)
            completions.append(
                Completion(request.id, request.prompt_ids, output, logprobs, prompt_logprobs, reason, captured)
            )
            self.pause()
        for completion, request in zip(completions, batch, strict=True):
            if not self.lose(request):
                yield completion  # before the file is there, as real replies come
        if self.spoil is not None:
            samples = self.spoil(samples)
        write_shard(path, self.layers, samples, [r.id for r in batch])
        self.pause()

    @torch.no_grad()
    def _answer(self, request: Request) -> tuple[list[int], list[float], list[float] | None, torch.Tensor]:
        ids, output = list(request.prompt_ids), list[int]()
        draw = torch.Generator().manual_seed(request.seed or 0)
        for _ in range(request.max_tokens):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            stop = len(output) + 1 == self.stop_after(request)
            if self.temperature == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial(torch.softmax(logits / self.temperature, -1), 1, generator=draw))
            output.append(self.model.config.eos_token_id if stop else token)
            ids.append(output[-1])
            if output[-1] == self.model.config.eos_token_id:
                break
        consumed = ids[:-1]
        states, logits = all_states(self.model, consumed)
        logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        at = len(request.prompt_ids) - 1
        return output, logprobs[at:], logprobs[:at] if request.prompt_logprobs else None, states[:, self.layers]


@torch.no_grad()
def all_states(model: LlamaForCausalLM, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """States after 0, 1, ... layers [rows, layers + 1, hidden] before the final norm; logits [rows, vocab]."""
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    out = model(torch.tensor([ids]), output_hidden_states=True)
    hook.remove()
    return torch.stack([h[0] for h in out.hidden_states[:-1]] + [before_norm[0][0]], 1), out.logits[0]
