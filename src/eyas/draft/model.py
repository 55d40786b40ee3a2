"""The drafter: speculators' EAGLE-3 model with a forward that computes, for each TTT step, only the rows that matter.

Weights, config and checkpoint are those of `Eagle3DraftModel`. See `eyas.draft.rows` for which rows matter.
Dimensions: N rows of the pack, M computed rows, H hidden, h / g query / key heads, d head size, T TTT steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from speculators.losses import LossConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from transformers.models.llama.modeling_llama import rotate_half

from eyas.draft.attention import DenseAttention, FlexAttention, KeyValue, PackAttention
from eyas.draft.loss import CHUNK_ELEMENTS, HeadLoss, head_loss
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


@dataclass(frozen=True)
class DraftOutput:
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

    @property
    def trains_head(self) -> bool:
        return bool(self.lm_head.weight.requires_grad)

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
        inputs = self._head_inputs(batch, noise)
        if denominators is None:
            denominators = plan.counts
        weights = decay ** torch.arange(len(plan.rows), device=denominators.device) / (denominators + COUNT_EPS)
        device = batch.input_ids.device
        autocast = torch.is_autocast_enabled(device.type)
        spec = HeadLoss(
            plan=plan,
            teacher=lambda rows: self.teacher_logits(batch.last_states[0, rows]),
            weights=weights,
            losses=losses,
            dtype=torch.get_autocast_dtype(device.type) if autocast else self.lm_head.weight.dtype,
            with_grad=torch.is_grad_enabled(),
            chunk=max(1, CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cuda"]) // self.draft_vocab_size),
        )
        loss, sums, correct = head_loss(inputs, self.lm_head.weight, spec)
        with torch.no_grad():
            counts = self._count(batch, sums, correct)
        return DraftOutput(loss, counts)

    @torch.no_grad()
    def teacher_logits(self, last: torch.Tensor) -> torch.Tensor:
        """last [n, H], the target's last layer before its final norm -> its logits [n, draft vocabulary]."""
        weight = self.verifier_lm_head.weight
        last = last.float()
        normed = self.verifier_norm(last - last.mean(-1, keepdim=True) if self.teacher_centers else last)
        if self.teacher_norm_bias is not None:
            normed = normed + self.teacher_norm_bias
        if torch.is_autocast_enabled(last.device.type):
            weight = weight.to(torch.get_autocast_dtype(last.device.type))
        logits = normed.to(weight.dtype) @ weight.t()
        if self.teacher_head_bias is not None:
            logits = logits + self.teacher_head_bias
        if self.teacher_scale != 1.0:
            logits = logits * self.teacher_scale
        if self.teacher_softcap is not None:
            logits = torch.tanh(logits / self.teacher_softcap) * self.teacher_softcap
        return logits

    def _zero(self) -> torch.Tensor:
        return torch.stack([p.sum() * 0.0 for p in self.parameters() if p.requires_grad]).sum()

    def _fuse(self, aux: torch.Tensor, noise: float) -> torch.Tensor:
        """aux [N, aux * H] -> g [N, H]"""
        if not torch.is_autocast_enabled(aux.device.type):
            aux = aux.to(self.fc.weight.dtype)
        if noise > 0 and self.training:
            aux = aux + (torch.rand_like(aux) - 0.5) * noise
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def _head_inputs(self, batch: DraftBatch, noise: float) -> list[torch.Tensor]:
        """T x [R_k, H]: each step's normed rows that have a loss."""
        plan, ids = batch.plan, batch.input_ids[0]
        attend = self._attention(batch.document_ids[0])
        h = self._fuse(batch.aux_states[0], noise)
        first: list[KeyValue] = []
        later: list[list[KeyValue]] = [[] for _ in self.layers]
        inputs: list[torch.Tensor] = []
        for k in range(len(plan.rows)):
            # the first argument only gives device and precision: float32, also under autocast
            cos, sin = (x[0] for x in self.rotary_emb(self.norm.weight, batch.position_ids + k))
            if k == 0:
                h = self._first_step(ids, h, plan, cos, sin, attend, first)
            else:
                h = self._later_step(k, ids, h, plan, cos, sin, attend, first, later)
            z = self.norm(h)
            if self.config.norm_output:
                h = z
            at = plan.loss_at[k]
            inputs.append(z if at.numel() == z.shape[0] else z[at])
        return inputs

    def _first_step(
        self,
        ids: torch.Tensor,
        h: torch.Tensor,
        plan: StepPlan,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: PackAttention,
        first: list[KeyValue],
    ) -> torch.Tensor:
        """Keys and values of all N rows at every layer (kept in `first`); the last layer's output of rows[0] alone."""
        for i, layer in enumerate(self.layers):
            u, residual = self._enter(i, layer, ids, h)
            first.append(_keys_values(layer.self_attn, u, cos, sin))
            if i < len(self.layers) - 1:
                rows = self._all_rows(ids)
                q = _queries(layer.self_attn, u, cos, sin)
            else:
                rows = plan.rows[0]
                if rows.numel() < ids.numel():
                    u, residual, cos, sin = u[rows], residual[rows], cos[rows], sin[rows]
                q = _queries(layer.self_attn, u, cos, sin)
            h = _leave(layer, residual, attend(q, rows, first[i], [], self._window(i)))
        return h

    def _later_step(
        self,
        k: int,
        ids: torch.Tensor,
        h: torch.Tensor,
        plan: StepPlan,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: PackAttention,
        first: list[KeyValue],
        later: list[list[KeyValue]],
    ) -> torch.Tensor:
        """h [M_(k-1), H] -> [M_k, H]; adds this step's own keys and values to `later`."""
        rows, keep = plan.rows[k], plan.keep[k]
        if keep is not None:
            h = h[keep]
            for pairs in later:
                pairs[:] = [(key[keep], value[keep]) for key, value in pairs]
        tokens = ids[(rows + k).clamp(max=ids.numel() - 1)]
        cos, sin = cos[rows], sin[rows]
        for i, layer in enumerate(self.layers):
            u, residual = self._enter(i, layer, tokens, h)
            later[i].append(_keys_values(layer.self_attn, u, cos, sin))
            q = _queries(layer.self_attn, u, cos, sin)
            h = _leave(layer, residual, attend(q, rows, first[i], later[i], self._window(i)))
        return h

    def _enter(self, i: int, layer: Any, ids: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention's input and the residual; the first layer reads the tokens' embeddings beside h."""
        if i:
            return layer.input_layernorm(h), h
        with torch.no_grad():
            embedded = self.embed_tokens(ids)
        normed = layer.hidden_norm(h)
        u = torch.cat([layer.input_layernorm(embedded), normed], -1)
        return u, normed if layer.norm_before_residual else h

    def _window(self, i: int) -> int | None:
        return self.sliding_window if i in self.sliding_window_indices else None

    def _attention(self, document_ids: torch.Tensor) -> PackAttention:
        return FlexAttention(document_ids) if document_ids.is_cuda else DenseAttention(document_ids)

    def _all_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(ids.numel(), device=ids.device)

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


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [M, heads, d], cos and sin [M, d]"""
    return (x * cos[:, None] + rotate_half(x) * sin[:, None]).to(x.dtype)


def _queries(attention: Any, u: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """u [M, width] -> [M, h, d]"""
    return _rope(attention.q_proj(u).view(u.shape[0], -1, attention.head_dim), cos, sin)


def _keys_values(attention: Any, u: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> KeyValue:
    """u [M, width] -> two of [M, g, d]"""
    shape = (u.shape[0], -1, attention.head_dim)
    return _rope(attention.k_proj(u).view(shape), cos, sin), attention.v_proj(u).view(shape)


def _leave(layer: Any, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """attended [M, h, d] -> the layer's output [M, H]"""
    h = residual + layer.self_attn.o_proj(attended.reshape(attended.shape[0], -1))
    return h + layer.mlp(layer.post_attention_layernorm(h))
