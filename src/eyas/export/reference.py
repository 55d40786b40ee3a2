"""What the exported files compute, in plain torch: an independent forward that follows vLLM's EAGLE-3 proposer.

It reads config.json and model.safetensors of drafter/vllm and nothing else; no modelling code of speculators or
transformers, so that a fault of theirs, or of the export, shows as a difference.

Followed: vllm/v1/spec_decode/llm_base_proposer.py (`propose`) and vllm/model_executor/models/llama_eagle3.py (0.32):
 - row t holds token x[t+1] and the target's states of position t, at position id t; it proposes x[t+2].
 - a later draft step takes the token just proposed, the draft's own hidden state of the step before (before the final
   norm; after it with norm_output), and the next position id.
 - keys and values of draft steps live for one proposal only: once tokens are accepted, vLLM computes their rows again
   from the target's states. So a step sees the rows up to its own, computed from the target, and its own chain.

Shapes: n rows, r asked rows, H query heads, G key/value heads, d head size, D hidden size, A auxiliary layers.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

from eyas.errors import EyasError
from eyas.files import read_json

SCORES_AT_ONCE = 1 << 26
"""attention scores held at once, in floats; more rows are done in pieces"""


@dataclass(frozen=True)
class Prefix:
    """The rows of one sequence, computed from the target's states."""

    keys: list[Tensor]
    """per layer [n, G, d], rotated"""
    values: list[Tensor]
    """per layer [n, G, d]"""
    hidden: Tensor
    """[n, D]: what a next draft step is fed with"""
    logits_input: Tensor
    """[n, D]: after the final norm"""
    positions: Tensor
    """[n]"""


class ReferenceDrafter:
    """The drafter of one exported directory, in float32 on `embedding`'s device.

    embedding [target vocab, D]: the target's, as the engine shares it with the drafter.
    """

    def __init__(self, path: Path, embedding: Tensor) -> None:
        self.config: dict[str, Any] = read_json(path / "config.json")
        device = embedding.device
        loaded = load_file(path / "model.safetensors")
        self._w = {n: t.to(device, torch.float32) for n, t in loaded.items() if t.is_floating_point()}
        self._d2t: Tensor | None = loaded["d2t"].to(device) if "d2t" in loaded else None
        self._embedding = embedding
        c = self.config
        if tuple(embedding.shape) != (c["vocab_size"], c["hidden_size"]):
            raise EyasError(
                f"{path}/config.json says vocab_size {c['vocab_size']} and hidden_size {c['hidden_size']}, "
                f"the target's embedding is {list(embedding.shape)}"
            )
        self._heads, self._groups, self._size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self._layers = ["midlayer", *(f"layers.{i}" for i in range(1, c["num_hidden_layers"]))]
        frequencies, self._rope_scale = rope_frequencies(c["rope_parameters"], self._size)
        self._frequencies = frequencies.to(device)

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor, aux_states: Tensor, positions: Tensor) -> Prefix:
        """Rows of one sequence: token_ids [n] (row t: x[t+1]), aux_states [n, A * D], positions [n] (row t: t)."""
        n = token_ids.numel()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        x = self._combine(aux_states.to(self._embedding.device, torch.float32))
        for i, name in enumerate(self._layers):
            x, inputs = self._attention_input(i, name, x, token_ids)
            q, k, v = self._qkv(name, inputs, positions)
            keys.append(k)
            values.append(v)
            piece = max(1, SCORES_AT_ONCE // (self._heads * n))
            mixed = [
                self._attend(q[a : a + piece], k, v, torch.arange(a, min(a + piece, n), device=x.device), [], [])
                for a in range(0, n, piece)
            ]
            x = self._after_attention(name, x, torch.cat(mixed))
        normed = self._norm(x, "norm")
        fed = normed if self.config["norm_output"] else x
        return Prefix(keys, values, fed, normed, positions)

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """[..., D] after the final norm -> [..., draft vocab]."""
        return linear(normed, self._w["lm_head.weight"])

    @torch.inference_mode()
    def draft(self, prefix: Prefix, rows: Tensor, tokens: int) -> Tensor:
        """Greedy proposals [r, tokens] as target ids, one chain for each of `rows` [r], independent of each other."""
        piece = max(1, SCORES_AT_ONCE // (self._heads * max(prefix.positions.numel(), 1)))
        if rows.numel() > piece:
            return torch.cat([self.draft(prefix, part, tokens) for part in rows.split(piece)])
        proposed = [self._choose(prefix.logits_input[rows])]
        x, positions = prefix.hidden[rows], prefix.positions[rows]
        chain: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self._layers]
        for _ in range(tokens - 1):
            positions = positions + 1
            for i, name in enumerate(self._layers):
                x, inputs = self._attention_input(i, name, x, proposed[-1])
                q, k, v = self._qkv(name, inputs, positions)
                chain[i][0].append(k)
                chain[i][1].append(v)
                x = self._after_attention(name, x, self._attend(q, prefix.keys[i], prefix.values[i], rows, *chain[i]))
            normed = self._norm(x, "norm")
            proposed.append(self._choose(normed))
            x = normed if self.config["norm_output"] else x
        return torch.stack(proposed, 1)

    def _combine(self, aux: Tensor) -> Tensor:
        if self.config["norm_before_fc"]:
            aux = self._norm(aux, "input_norm")
        if self.config["fc_norm"]:
            parts = aux.chunk(self.config["num_aux_hidden_states"], -1)
            aux = torch.cat([self._norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
        return linear(aux, self._w["fc.weight"])

    def _attention_input(self, index: int, name: str, x: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(residual, input of q, k and v): the first layer also takes the token's embedding."""
        if index > 0:
            return x, self._norm(x, f"{name}.input_layernorm")
        embedded = self._norm(self._embedding[token_ids].float(), f"{name}.input_layernorm")
        hidden = self._norm(x, f"{name}.hidden_norm")
        return (hidden if self.config["norm_before_residual"] else x), torch.cat([embedded, hidden], -1)

    def _qkv(self, name: str, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            linear(x, self._w[f"{name}.self_attn.{p}_proj.weight"]).unflatten(-1, (heads, self._size))
            for p, heads in (("q", self._heads), ("k", self._groups), ("v", self._groups))
        )
        return self._rotate(q, positions), self._rotate(k, positions), v

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, heads, d]; the first 2 * frequencies channels turn, in halves; the others pass."""
        half = self._frequencies.numel()
        angle = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angle.cos() * self._rope_scale, angle.sin() * self._rope_scale
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, chain_k: list[Tensor], chain_v: list[Tensor]
    ) -> Tensor:
        """q [r, H, d]; each sees keys 0..rows[i] of k [n, G, d], and the i-th entry of every chain tensor [r, G, d]."""
        grouped = q.unflatten(1, (self._groups, -1)) * self._size**-0.5
        scores = torch.einsum("rgmd,ngd->rgmn", grouped, k)
        later = torch.arange(k.shape[0], device=k.device)[None, :] > rows[:, None]
        scores = scores.masked_fill(later[:, None, None, :], -math.inf)
        own = [torch.einsum("rgmd,rgd->rgm", grouped, c)[..., None] for c in chain_k]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        mixed = torch.einsum("rgmn,ngd->rgmd", weights[..., : k.shape[0]], v)
        for i, c in enumerate(chain_v):
            mixed = mixed + weights[..., k.shape[0] + i, None] * c[:, :, None, :]
        return mixed.flatten(1)

    def _after_attention(self, name: str, residual: Tensor, mixed: Tensor) -> Tensor:
        x = residual + linear(mixed, self._w[f"{name}.self_attn.o_proj.weight"])
        y = self._norm(x, f"{name}.post_attention_layernorm")
        gate, up = (linear(y, self._w[f"{name}.mlp.{p}_proj.weight"]) for p in ("gate", "up"))
        return x + linear(silu(gate) * up, self._w[f"{name}.mlp.down_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * self._w[f"{name}.weight"]

    def _choose(self, normed: Tensor) -> Tensor:
        ids = self.logits(normed).argmax(-1)
        return ids if self._d2t is None else ids + self._d2t[ids]


def rope_frequencies(rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """(frequencies [rotated channels / 2], factor of cos and sin) of `rope_parameters`.

    Formulas: linear, Chen et al. 2023; yarn, Peng et al. 2023, with DeepSeek's mscale; llama3, the Llama 3.1 release.
    """
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    base = float(rope["rope_theta"])
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = rope["rope_type"]
    if kind == "default":
        return plain, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return plain / factor, 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        turns = original * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * (keep + (1 - keep) / factor), 1.0
    if kind == "yarn":

        def channel(turns: float) -> float:
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = channel(rope.get("beta_fast") or 32), channel(rope.get("beta_slow") or 1)
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        stretched = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        return plain * (1 - stretched) + plain / factor * stretched, _yarn_scale(rope, factor)
    raise EyasError(f"rope_type {kind} is not one that the exported format can hold")


def _yarn_scale(rope: dict[str, Any], factor: float) -> float:
    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    given, mscale, all_dim = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if given is not None:
        return float(given)
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
