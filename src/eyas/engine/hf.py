"""The hf engine: transformers in this process. The numeric oracle, and what runs where vLLM is not installed.

Batches are padded on the left with explicit position ids and attention masks, so that a sample's numbers do not
depend on its batch beyond float noise. Shapes: B sequences, T padded length, L layers, H hidden, V vocabulary.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import nn

from eyas.engine.base import Captured, Completion, Request
from eyas.errors import InputError
from eyas.progress import own_bars_only
from eyas.recipe import EnginePart, SamplingPart
from eyas.states.shard import ShardSample, write_shard
from eyas.target.info import TargetInfo

LOGITS_BYTES = 2**30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HfEngine:
    """An engine (eyas.engine.base.Engine). layers: states after k layers, ascending; None: no states."""

    def __init__(
        self, engine: EnginePart, target: TargetInfo, layers: list[int] | None, states_dir: Path | None
    ) -> None:
        if layers is not None and states_dir is None:
            raise ValueError("capturing layers needs a states_dir")
        depth = target.num_hidden_layers
        if layers is not None and (layers != sorted(set(layers)) or not all(0 < k <= depth for k in layers)):
            raise InputError(f"layers must be ascending and within 1..{depth}, found {layers}")
        self._engine, self._target, self._layers, self._dir = engine, target, layers or [], states_dir
        self._model: Any = None
        self._decoder: Any = None
        self._kept: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._tag, self._serial = token_hex(4), 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def __enter__(self) -> "HfEngine":
        self._model = _load(self._target, self._engine, self.device)
        self._decoder = text_decoder(self._model, self._target)
        for k in self._layers:
            self._hooks.append(self._decoder.layers[k - 1].register_forward_hook(self._keep(k)))
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._model = self._decoder = None
        self._kept = {}

    def generate(self, requests: Iterable[Request], sampling: SamplingPart) -> Iterator[Completion]:
        """See eyas.engine.base.Engine. Works batch by batch of at most `engine.concurrency` requests."""
        waiting = iter(requests)
        while batch := list(islice(waiting, self._engine.concurrency)):
            for part in self._parts(batch):
                yield from self._batch(part, sampling)

    def _parts(self, batch: list[Request]) -> list[list[Request]]:
        """Where log probabilities of whole prompts are wanted, batches whose logits fit into LOGITS_BYTES."""
        if not any(r.prompt_logprobs for r in batch):
            return [batch]
        longest = max(len(r.prompt_ids) for r in batch)
        size = max(1, LOGITS_BYTES // (4 * longest * self._target.vocab_size))
        return [batch[i : i + size] for i in range(0, len(batch), size)]

    def forward(self, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence of n tokens without a cache: states [n, L, H] and logits [n, V], both float32 on the CPU."""
        with torch.no_grad():
            ids = torch.tensor([token_ids], device=self.device)
            logits = self._model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=torch.arange(len(token_ids), device=self.device)[None],
            ).logits
        return self._states()[0].float().cpu(), logits[0].float().cpu()

    def _keep(self, k: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._kept[k] = output[0] if isinstance(output, tuple) else output

        return hook

    def _states(self) -> torch.Tensor:
        """Of the last forward pass: [B, T, L, H]."""
        return torch.stack([self._kept[k] for k in self._layers], dim=2)

    @torch.no_grad()
    def _batch(self, batch: list[Request], sampling: SamplingPart) -> list[Completion]:
        lengths = [len(r.prompt_ids) for r in batch]
        width = max(lengths)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros(len(batch), width, dtype=torch.long)
        for i, r in enumerate(batch):
            ids[i, width - lengths[i] :] = torch.tensor(r.prompt_ids)
            mask[i, width - lengths[i] :] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        generators = [_generator(sampling.seed if r.seed is None else r.seed, self.device) for r in batch]
        outputs: list[list[int]] = [[] for _ in batch]
        logprobs: list[list[float]] = [[] for _ in batch]
        reasons: list[str | None] = [None] * len(batch)
        states: list[list[torch.Tensor]] = [[] for _ in batch]
        prompt_logprobs: list[list[float] | None] = [None] * len(batch)
        cache: Any = None
        while True:
            wanted = any(r.prompt_logprobs for r in batch) and cache is None
            out = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=0 if wanted else 1,
            )
            if self._layers:
                kept = self._states().to("cpu")
                for i in range(len(batch)):
                    if reasons[i] is None:  # this step consumed a token of a live sequence
                        states[i].append(kept[i, width - lengths[i] :] if cache is None else kept[i])
            if wanted:
                for i, r in enumerate(batch):
                    if r.prompt_logprobs:
                        own = torch.log_softmax(out.logits[i, width - lengths[i] : -1].float(), -1)
                        after = torch.tensor(r.prompt_ids[1:], device=self.device)
                        prompt_logprobs[i] = own.gather(1, after[:, None])[:, 0].tolist()
            cache = out.past_key_values
            logits = out.logits[:, -1].float()
            chosen = torch.tensor(
                [_sample(row, sampling, g) for row, g in zip(logits, generators, strict=True)], device=self.device
            )
            chosen_logprobs = torch.log_softmax(logits, -1).gather(1, chosen[:, None])[:, 0].tolist()
            for i, r in enumerate(batch):
                if reasons[i] is None:
                    token = int(chosen[i])
                    outputs[i].append(token)
                    logprobs[i].append(chosen_logprobs[i])
                    if token in self._target.eos_token_ids:
                        reasons[i] = "stop"
                    elif len(outputs[i]) == r.max_tokens:
                        reasons[i] = "length"
            if all(reason is not None for reason in reasons):
                break
            ids = chosen[:, None]
            mask = torch.cat([mask, mask.new_ones(len(batch), 1)], 1)
            positions = mask.sum(1, keepdim=True) - 1
        captured = self._write(batch, outputs, states) if self._layers else [None] * len(batch)
        return [
            Completion(r.id, r.prompt_ids, outputs[i], logprobs[i], prompt_logprobs[i], str(reasons[i]), captured[i])
            for i, r in enumerate(batch)
        ]

    def _write(
        self, batch: list[Request], outputs: list[list[int]], states: list[list[torch.Tensor]]
    ) -> list[Captured]:
        assert self._dir is not None
        path = self._dir / f"hf-{self._tag}-{self._serial:06d}.safetensors"
        self._serial += 1
        samples = []
        for r, output, pieces in zip(batch, outputs, states, strict=True):
            tokens = torch.tensor([*r.prompt_ids, *output])
            samples.append(ShardSample(torch.cat(pieces)[: len(tokens) - 1], tokens, len(r.prompt_ids), 0))
        write_shard(path, self._layers, samples, [r.id for r in batch])
        return [Captured(path, i, len(s.states)) for i, s in enumerate(samples)]


def text_decoder(model: nn.Module, target: TargetInfo) -> Any:
    """The module that holds the target's decoder layers and its token embedding, wherever a wrapper puts it.

    Found by structure: a `layers` list of the target's depth beside `embed_tokens` of the target's vocabulary and
    width.
    """
    found = []
    for name, module in model.named_modules():
        layers, embedding = module._modules.get("layers"), module._modules.get("embed_tokens")
        if isinstance(layers, nn.ModuleList) and isinstance(embedding, nn.Embedding):
            shape = (embedding.num_embeddings, embedding.embedding_dim)
            if len(layers) == target.num_hidden_layers and shape == (target.vocab_size, target.hidden_size):
                found.append((name, module))
    if len(found) != 1:
        raise InputError(
            f"{target.architecture}: expected one text decoder of {target.num_hidden_layers} layers "
            f"in the transformers model, found {[name for name, _ in found]}",
            fix="use engine.kind: vllm for this target",
        )
    return found[0][1]


def _load(target: TargetInfo, engine: EnginePart, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = json.loads((target.path / "config.json").read_text(encoding="utf-8"))
    kind: Any = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    attention = engine.attention_backend or ("eager" if device.type == "cpu" else "sdpa")
    dtype = "auto" if engine.dtype == "auto" else _DTYPES[engine.dtype]
    try:
        with own_bars_only():
            # Wrong shapes are let through here, so that `_refuse_random` can name all of them at once.
            model, loaded = kind.from_pretrained(
                target.path,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as e:
        raise InputError(
            f"transformers cannot load {target.path} ({target.architecture}): {e}",
            fix="use engine.kind: vllm for this target",
        ) from None
    _refuse_random(target, loaded)
    for name, module in model.named_modules():
        if name.endswith(
            (".q_a_layernorm", ".kv_a_layernorm")
        ):  # transformers says 1e-6 here, serving engines the config's
            module.variance_epsilon = target.rms_norm_eps
    return model.to(device).eval()


def _refuse_random(target: TargetInfo, loaded: dict[str, Any]) -> None:
    """transformers fills what it cannot load with random numbers and goes on. A tied head is not among these."""
    wrong = [f"{name} (missing)" for name in sorted(loaded["missing_keys"])]
    wrong += [
        f"{name} ({list(stored)}, {list(expected)} expected)"
        for name, stored, expected in sorted(loaded["mismatched_keys"])
    ]
    wrong += [" ".join(str(message).split()) for message in loaded["error_msgs"]]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise InputError(
            f"{target.path}: the weights do not fill {len(wrong)} tensor(s) of transformers' {target.architecture}: "
            f"{', '.join(wrong[:5])}{more}",
            fix="complete the checkpoint, correct its config.json, or use engine.kind: vllm if transformers is wrong",
        )


def _generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    return None if seed is None else torch.Generator(device).manual_seed(seed)


def _sample(logits: torch.Tensor, sampling: SamplingPart, generator: torch.Generator | None) -> int:
    """One token out of logits [V]: temperature, then top-k, then top-p."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p  # the first token always stays
        logits = logits.masked_fill(beyond.new_zeros(len(logits)).scatter(0, order, beyond), -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
