"""The target's own output distribution from its last hidden state: final norm, head, scale and soft cap."""

from collections.abc import Iterator

import torch

from eyas.target.info import TargetInfo
from eyas.target.weights import load_final_norm, load_head, load_weight


class Teacher(torch.nn.Module):
    """logits(h) = softcap(scale * (head(norm(h)) + bias)), in float32, as the target computes it.

    `rows` (int64 [m], token ids) keeps only these rows of the head, e.g. the draft vocabulary's.
    """

    norm_weight: torch.Tensor
    head_weight: torch.Tensor
    norm_bias: torch.Tensor | None
    head_bias: torch.Tensor | None

    def __init__(self, info: TargetInfo, rows: torch.Tensor | None = None) -> None:
        super().__init__()
        weight = load_final_norm(info)
        self.register_buffer("norm_weight", 1.0 + weight if info.norm_plus_one else weight)
        self.register_buffer("head_weight", load_head(info, rows))
        norm_bias = None if info.final_norm_bias is None else load_weight(info.final_norm_bias)
        self.register_buffer("norm_bias", norm_bias)
        head_bias = None if info.head_bias is None else load_weight(info.head_bias, rows)
        self.register_buffer("head_bias", head_bias)
        self.layer_norm = info.norm_kind == "layer"
        self.eps = info.rms_norm_eps
        self.scale = info.logit_scale
        self.softcap = info.logit_softcap

    def norm(self, last_state: torch.Tensor) -> torch.Tensor:
        """The final norm, [n, hidden] -> [n, hidden] float32."""
        h = last_state.to(self.norm_weight.device).float()
        if self.layer_norm:
            h = h - h.mean(-1, keepdim=True)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm_weight
        return h if self.norm_bias is None else h + self.norm_bias

    @torch.no_grad()
    def chunks(self, last_state: torch.Tensor, rows: int = 256) -> Iterator[torch.Tensor]:
        """The same logits in blocks of at most `rows` positions, so that [n, vocab] never exists as a whole."""
        for block in last_state.split(rows):
            yield self.logits(block)

    @torch.no_grad()
    def log_probs(self, last_state: torch.Tensor, tokens: torch.Tensor, rows: int = 256) -> torch.Tensor:
        """Log probability of each token (indices into the head's rows) under its position's state, [n] float32."""
        tokens = tokens.to(self.head_weight.device)
        blocks = zip(self.chunks(last_state, rows), tokens.split(rows), strict=True)
        found = [torch.log_softmax(block, -1).gather(-1, t.unsqueeze(-1)).squeeze(-1) for block, t in blocks]
        return torch.cat(found) if found else torch.empty(0, device=self.head_weight.device)

    @torch.no_grad()
    def logits(self, last_state: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of the state before the final norm -> [n, vocab], or [n, m] with `rows`; float32."""
        out = torch.nn.functional.linear(self.norm(last_state), self.head_weight, self.head_bias)
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap
