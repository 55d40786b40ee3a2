"""The drafter: speculators' EAGLE-3 model with a forward that computes, for each TTT step, only the rows that matter.

Weights, config and checkpoint are those of `Eagle3DraftModel`. See `eyas.draft.rows` for which rows matter.
Dimensions: N rows of the pack, M computed rows, H hidden, h / g query / key heads, d head size, T TTT steps.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from speculators.losses import LossConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel

from eyas.draft.attention import DenseAttention, FlexAttention, KeyValue, PackAttention
from eyas.draft.loss import HeadLoss, chunk_rows, head_loss
from eyas.draft.pieces import LayerWeights, Norm, TokenWeights, cast, enter, fuse, halves, leave, project_tokens, take
from eyas.draft.rows import DraftBatch, StepPlan
from eyas.errors import InputError

COUNT_EPS = 1e-5
"""added to each step's row count, as in speculators"""


@dataclass(frozen=True)
class StepCounts:
    """Raw sums for each TTT step, all [T] float32: add them over packs and ranks, then divide."""

    loss: torch.Tensor
    """sum of row losses, before the step decay"""
    rows: torch.Tensor
    """rows with a loss"""
    agree: torch.Tensor
    """rows where draft and teacher have the same argmax within the draft vocabulary"""
    accepted: torch.Tensor
    """rows accepted at this and all earlier steps; a token outside the draft vocabulary is never accepted"""
    reached: torch.Tensor
    """rows accepted at all earlier steps, whose label at this step is supervised"""

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return StepCounts.unstack(self.stack() + other.stack())

    def stack(self) -> torch.Tensor:
        """[5, T]"""
        return torch.stack([self.loss, self.rows, self.agree, self.accepted, self.reached])

    @staticmethod
    def unstack(stacked: torch.Tensor) -> "StepCounts":
        return StepCounts(*stacked.unbind(0))


class DraftOutput(NamedTuple):  # not a dataclass: FSDP looks for tensors with a gradient in the output
    loss: torch.Tensor
    """scalar: sum over k of decay ** k * mean row loss of step k"""
    counts: StepCounts


class Eagle3Drafter(Eagle3DraftModel):
    """`Eagle3DraftModel` for training: `forward` takes a DraftBatch with its StepPlan.

    Freshly built, embedding and heads are NaN (`eyas.draft.init` fills them). Only Llama layers are supported.
    """

    def __init__(self, config: Eagle3SpeculatorConfig) -> None:
        layer: Any = config.transformer_layer_config
        if layer.model_type != "llama":
            raise InputError(f"a draft layer of type {layer.model_type!r} cannot be trained, only 'llama'")
        if layer.attention_bias or layer.mlp_bias or layer.hidden_act != "silu":
            raise InputError("a draft layer with biases or another activation than silu cannot be trained")
        super().__init__(config)
        self.teacher_scale = 1.0
        """factor of the teacher's logits, before the soft cap"""
        self.teacher_softcap: float | None = None
        self.teacher_centers = False
        """the target's final norm subtracts the mean first (a layer norm)"""
        self.teacher_norm_bias: torch.Tensor | None
        self.teacher_head_bias: torch.Tensor | None
        self.register_buffer("teacher_norm_bias", None, persistent=False)
        self.register_buffer("teacher_head_bias", None, persistent=False)

    def forward(
        self,
        batch: DraftBatch,
        losses: LossConfig,
        *,
        decay: float = 1.0,
        denominators: torch.Tensor | None = None,
        noise: float = 0.0,
    ) -> DraftOutput:
        """The loss and counts of one pack, for as many TTT steps as its plan has.

        denominators [T]: by what each step's loss sum is divided; default: its rows in this pack. noise: width of the
        uniform noise added to the aux states. A pack without supervised rows gives a zero loss that every trained
        weight takes part in.
        """
        plan = batch.plan
        if plan.labels.numel() == 0:
            zeros = torch.zeros(5, len(plan.rows), device=batch.input_ids.device)
            return DraftOutput(self._zero(), StepCounts.unstack(zeros))
        if denominators is None:
            denominators = plan.counts
        weights = decay ** torch.arange(len(plan.rows), device=denominators.device) / (denominators + COUNT_EPS)
        kind = batch.input_ids.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.fc.weight.dtype
        with torch.autocast(kind, enabled=False):
            inputs = self._head_inputs(batch, noise, dtype)
            spec = HeadLoss(
                plan=plan,
                teacher=lambda rows: self.teacher_logits(batch.last_states[0, rows], dtype),
                weights=weights,
                losses=losses,
                dtype=dtype,
                with_grad=torch.is_grad_enabled(),
                chunk=chunk_rows(kind, self.draft_vocab_size),
            )
            loss, sums, correct = head_loss(inputs, self.lm_head.weight, spec)
        with torch.no_grad():
            counts = self._count(batch, sums, correct)
        return DraftOutput(loss, counts)

    @torch.no_grad()
    def teacher_logits(self, last: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """last [n, H], the target's last layer before its final norm -> its logits [n, draft vocabulary]."""
        weight = self.verifier_lm_head.weight.to(dtype)
        last = last.float()
        normed = self.verifier_norm(last - last.mean(-1, keepdim=True) if self.teacher_centers else last)
        if self.teacher_norm_bias is not None:
            normed = normed + self.teacher_norm_bias
        logits = normed.to(dtype) @ weight.t()
        if self.teacher_head_bias is not None:
            logits = logits + self.teacher_head_bias
        if self.teacher_scale != 1.0:
            logits = logits * self.teacher_scale
        if self.teacher_softcap is not None:
            logits = torch.tanh(logits / self.teacher_softcap) * self.teacher_softcap
        return logits

    def _zero(self) -> torch.Tensor:
        return torch.stack([p.sum() * 0.0 for p in self.parameters() if p.requires_grad]).sum()

    def hold_frozen_in(self, dtype: torch.dtype) -> None:
        """Keeps each frozen matrix (embedding, heads) in `dtype` if that changes none of its values."""
        for module in (self.embed_tokens, self.verifier_lm_head, self.lm_head):
            weight = module.weight
            if not weight.requires_grad and torch.equal(weight.to(dtype).to(weight.dtype), weight):
                weight.data = weight.data.to(dtype)

    def _fuse(self, aux: torch.Tensor, noise: float, dtype: torch.dtype) -> torch.Tensor:
        """aux [N, aux * H] -> g [N, H]"""
        if noise > 0 and self.training:
            aux = aux.to(dtype)
            aux = aux + (torch.rand_like(aux) - 0.5) * noise
        whole = None if self.input_norm is None else _norm(self.input_norm)
        parts = [] if self.fc_norm is None else [_norm(x) for x in self.fc_norm]
        return fuse(aux, whole=whole, parts=parts, weight=cast(self.fc.weight, dtype))

    def _head_inputs(self, batch: DraftBatch, noise: float, dtype: torch.dtype) -> list[torch.Tensor]:
        """T x [R_k, H]: each step's normed rows that have a loss. Matrix products in `dtype`."""
        plan, ids = batch.plan, batch.input_ids[0]
        attend = self._attention(batch.document_ids[0])
        weights, token_weights = _layer_weights(self.layers, dtype)
        tokens = self._tokens(ids, plan, token_weights)
        h = self._fuse(batch.aux_states[0], noise, dtype)
        first: list[KeyValue] = []
        later: list[list[KeyValue]] = [[] for _ in weights]
        inputs: list[torch.Tensor] = []
        for k in range(len(plan.rows)):
            # the first argument only gives device and precision
            cos, sin = (x[0] for x in self.rotary_emb(self.norm.weight, batch.position_ids + k))
            if k == 0:
                h, z = self._first_step(h, plan, cos, sin, attend, first, weights, tokens)
            else:
                h, z = self._later_step(k, h, plan, cos, sin, attend, first, later, weights, tokens)
            at = plan.loss_at[k]
            inputs.append(z if at.numel() == z.shape[0] else take(z, at))
        return inputs

    def _tokens(self, ids: torch.Tensor, plan: StepPlan, weights: TokenWeights) -> "_Tokens":
        embeddings = self.embed_tokens.weight.detach()
        if len(self.layers) > 1 or plan.read.numel() == ids.numel():
            q, k, v = project_tokens(ids, weights=weights, embeddings=embeddings)
            q_at = plan.reads
        else:
            _, k, v = project_tokens(ids, weights=weights, embeddings=embeddings, queries=False)
            q, _, _ = project_tokens(ids[plan.read], weights=weights, embeddings=embeddings, keys=False)
            q_at = plan.read_at
        assert q is not None and k is not None and v is not None  # noqa: PT018
        return _Tokens(q, k, v, q_at, plan.reads)

    def _first_step(
        self,
        h: torch.Tensor,
        plan: StepPlan,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: PackAttention,
        first: list[KeyValue],
        layers: list[LayerWeights],
        tokens: "_Tokens",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all N rows at every layer (kept in `first`); the last layer's output of rows[0] alone."""
        z = h
        for i, weights in enumerate(layers):
            q_part, k_part, v_part = (tokens.q, tokens.k, tokens.v) if i == 0 else (None, None, None)
            rows = self._all_rows(h) if i < len(layers) - 1 else plan.rows[0]
            if rows.numel() == h.shape[0]:
                q, k, v, residual = enter(h, cos, sin, q_part, k_part, v_part, weights=weights)
            else:
                _, k, v, _ = enter(h, cos, sin, None, k_part, v_part, weights=weights, queries=False)
                mine = None if q_part is None else take(q_part, tokens.q_at[0])
                some = (take(h, rows), cos[rows], sin[rows], mine)
                q, _, _, residual = enter(*some, None, None, weights=weights, keys=False)
            assert q is not None and k is not None and v is not None and residual is not None  # noqa: PT018
            first.append((k, v))
            h, z = self._leave(i, attend(q, rows, first[i], [], self._window(i)), residual, weights)
        return h, z

    def _later_step(
        self,
        k: int,
        h: torch.Tensor,
        plan: StepPlan,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: PackAttention,
        first: list[KeyValue],
        later: list[list[KeyValue]],
        layers: list[LayerWeights],
        tokens: "_Tokens",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """h [M_(k-1), H] -> two of [M_k, H]; adds this step's own keys and values to `later`."""
        rows, keep = plan.rows[k], plan.keep[k]
        if keep is not None:
            h = take(h, keep)
            for pairs in later:
                pairs[:] = [(take(key, keep), take(value, keep)) for key, value in pairs]
        cos, sin, z = cos[rows], sin[rows], h
        for i, weights in enumerate(layers):
            parts = tokens.at(k) if i == 0 else (None, None, None)
            q, key, value, residual = enter(h, cos, sin, *parts, weights=weights)
            assert q is not None and key is not None and value is not None and residual is not None  # noqa: PT018
            later[i].append((key, value))
            h, z = self._leave(i, attend(q, rows, first[i], later[i], self._window(i)), residual, weights)
        return h, z

    def _leave(
        self, i: int, attended: torch.Tensor, residual: torch.Tensor, weights: LayerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = _norm(self.norm) if i == len(self.layers) - 1 else None
        flat = attended.reshape(attended.shape[0], -1)
        return leave(flat, residual, weights=weights, norm=norm, norm_output=self.config.norm_output)

    def _window(self, i: int) -> int | None:
        return self.sliding_window if i in self.sliding_window_indices else None

    def _attention(self, document_ids: torch.Tensor) -> PackAttention:
        return FlexAttention(document_ids) if document_ids.is_cuda else DenseAttention(document_ids)

    def _all_rows(self, h: torch.Tensor) -> torch.Tensor:
        return torch.arange(h.shape[0], device=h.device)

    def _count(self, batch: DraftBatch, sums: torch.Tensor, correct: torch.Tensor) -> StepCounts:
        plan, n = batch.plan, batch.input_ids.numel()
        known = torch.ones(n, dtype=torch.bool, device=correct.device)
        if self.t2d is not None:
            known = self.t2d[batch.label_ids[0]]
        chain = torch.zeros(n, dtype=torch.bool, device=correct.device)
        chain[plan.labels] = True
        agree, accepted, reached = [], [], []
        start = 0
        for rows, at in zip(plan.rows, plan.loss_at, strict=True):
            mine, trained = correct[start : start + at.numel()], rows[at]
            start += at.numel()
            agree.append(mine.sum())
            reached.append(chain[trained].sum())
            ok = torch.zeros_like(chain)
            ok[trained] = mine & known[trained + len(agree) - 1]
            chain = chain & ok
            accepted.append(chain.sum())
        stacked = (torch.stack(x).float() for x in (agree, accepted, reached))
        return StepCounts(sums, plan.counts, *stacked)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


@dataclass(frozen=True)
class _Tokens:
    """The embeddings' shares of queries [R, h * d], keys and values [N, g * d], and where the steps' rows find them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_at: tuple[torch.Tensor, ...]
    kv_at: tuple[torch.Tensor, ...]

    def at(self, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """step k's, three of [M_k, heads * d]"""
        return take(self.q, self.q_at[k]), take(self.k, self.kv_at[k]), take(self.v, self.kv_at[k])


def _layer_weights(layers: Any, dtype: torch.dtype) -> tuple[list[LayerWeights], TokenWeights]:
    """Cast once for all steps; the gradient reaches the float32 weights."""
    every: list[LayerWeights] = []
    of_tokens: TokenWeights | None = None
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        norm, before = _norm(layer.input_layernorm), False
        qkv = [x.weight for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
        if of_tokens is None:  # the first layer reads [embedding, hidden state]
            pairs = [halves(x, scale=norm.weight, dtype=dtype) for x in qkv]
            of_tokens, qkv = TokenWeights(norm.eps, *(x for x, _ in pairs)), [x for _, x in pairs]
            norm, before = _norm(layer.hidden_norm), layer.norm_before_residual
        else:
            qkv = [cast(x, dtype) for x in qkv]
        every.append(
            LayerWeights(
                norm=norm,
                norm_before_residual=before,
                head_dim=attention.head_dim,
                q=qkv[0],
                k=qkv[1],
                v=qkv[2],
                o=cast(attention.o_proj.weight, dtype),
                mlp_norm=_norm(layer.post_attention_layernorm),
                gate=cast(mlp.gate_proj.weight, dtype),
                up=cast(mlp.up_proj.weight, dtype),
                down=cast(mlp.down_proj.weight, dtype),
            )
        )
    assert of_tokens is not None
    return every, of_tokens
