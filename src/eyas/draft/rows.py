"""Which rows a TTT forward must compute: a packed batch, and the plan of rows for each step.

Row t of a document holds token x[t+1], aux states g[t] and predicts the target's distribution at label row t (state
y[t+1], about token x[t+2]). At step k row t is trained on label row t + k. A later step's key is seen only by its own
row, so row t matters at step k exactly if label row t + j is supervised, inside the document, for some j >= k.
"""

from dataclasses import dataclass

import torch

ROW_BLOCK = 128
"""rows of one block of the GPU's attention mask"""


@dataclass(frozen=True)
class StepPlan:
    """Row numbers of every step; built on the CPU, so that the forward never waits for the device."""

    rows: tuple[torch.Tensor, ...]
    """T x [M_k]: rows computed at step k, all different, ascending; step k's are among step k-1's"""
    keep: tuple[torch.Tensor | None, ...]
    """T x [M_k]: where step k's rows lie in step k-1's; None where both are the same"""
    reads: tuple[torch.Tensor, ...]
    """T x [M_k]: row whose token step k's rows read, k further on (around the end of the pack, where it matters not)"""
    read: torch.Tensor
    """[R]: all rows in `reads`, ascending"""
    read_at: tuple[torch.Tensor, ...]
    """T x [M_k]: where reads[k] lie in `read`"""
    loss_at: tuple[torch.Tensor, ...]
    """T x [R_k]: where the rows with a loss lie in rows[k]"""
    label_at: tuple[torch.Tensor, ...]
    """T x [R_k]: each one's label row, as an index of `labels`, ascending"""
    labels: torch.Tensor
    """[L]: supervised label rows, ascending; the teacher is computed for these alone"""
    edges: tuple[list[int], ...]
    """T x [L + 1]: edges[k][i] = number of step k's loss rows whose label index is below i"""
    counts: torch.Tensor
    """[T] float32: R_k"""

    def tensors(self) -> list[torch.Tensor]:
        reads = [*self.reads, self.read, *self.read_at]
        some = [*self.rows, *self.keep, *reads, *self.loss_at, *self.label_at, self.labels, self.counts]
        return [x for x in some if x is not None]

    def to(self, device: torch.device) -> "StepPlan":
        moved: dict[int, torch.Tensor] = {}

        def move(x: torch.Tensor) -> torch.Tensor:
            # one copy for one tensor: the attention mask of a row set is recognized by identity
            return moved.setdefault(id(x), x.to(device, non_blocking=True))

        return StepPlan(
            tuple(move(x) for x in self.rows),
            tuple(None if x is None else move(x) for x in self.keep),
            tuple(move(x) for x in self.reads),
            move(self.read),
            tuple(move(x) for x in self.read_at),
            tuple(move(x) for x in self.loss_at),
            tuple(move(x) for x in self.label_at),
            move(self.labels),
            self.edges,
            move(self.counts),
        )


@dataclass(frozen=True)
class DraftBatch:
    """One pack of documents, N rows. Padding has document id -1."""

    input_ids: torch.Tensor
    """[1, N] int64: x[t+1]"""
    label_ids: torch.Tensor
    """[1, N] int64: x[t+2], the token that the target went on with"""
    aux_states: torch.Tensor
    """[1, N, aux * hidden]: g[t]"""
    last_states: torch.Tensor
    """[1, N, hidden]: y[t+1], before the target's final norm"""
    document_ids: torch.Tensor
    """[1, N] int64, ascending"""
    position_ids: torch.Tensor
    """[1, N] int64, from 1 in each document"""
    label_mask: torch.Tensor
    """[1, N] bool: label row t is supervised"""
    plan: StepPlan
    tokens: int
    """rows that are no padding"""

    @property
    def supervised(self) -> int:
        return self.plan.labels.numel()

    def tensors(self) -> list[torch.Tensor]:
        big = (self.input_ids, self.label_ids, self.aux_states, self.last_states)
        return [*big, self.document_ids, self.position_ids, self.label_mask]

    def to(self, device: torch.device) -> "DraftBatch":
        """A copy on `device`; asynchronous from page-locked memory."""
        moved = [x.to(device, non_blocking=True) for x in self.tensors()]
        return self._with(moved, self.plan.to(device))

    def pinned(self) -> "DraftBatch":
        """The same with its rows in page-locked memory, so that `to` overlaps with computation."""
        return self._with([x.pin_memory() for x in self.tensors()], self.plan)

    def _with(self, tensors: list[torch.Tensor], plan: StepPlan) -> "DraftBatch":
        ids, labels, aux, last, documents, positions, mask = tensors
        return DraftBatch(ids, labels, aux, last, documents, positions, mask, plan, self.tokens)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tells the allocator that `stream` uses the tensors, which another stream allocated."""
        for x in [*self.tensors(), *self.plan.tensors()]:
            x.record_stream(stream)


def plan_steps(document_ids: torch.Tensor, label_mask: torch.Tensor, steps: int, *, nested: bool) -> StepPlan:
    """The plan for document_ids [N] and label_mask [N] on the CPU.

    nested: each step computes only its own rows; else every step computes step 0's rows (a few more for each document,
    but one row set, hence one attention mask, for all steps), topped up to whole blocks with rows that do not matter.
    """
    n = document_ids.numel()
    active = torch.zeros(steps, n, dtype=torch.bool)
    for k in range(min(steps, n)):
        same = document_ids[k:] == document_ids[: n - k]
        active[k, : n - k] = label_mask[k:] & same & (document_ids[: n - k] >= 0)
    needed = active.flip(0).cummax(0).values.flip(0) if steps > 1 else active
    labels = active[0].nonzero().flatten()
    index = torch.full((n,), -1)
    index[labels] = torch.arange(labels.numel())
    first = needed[0].nonzero().flatten()
    if not nested:
        spare = (~needed[0]).nonzero().flatten()[: -first.numel() % ROW_BLOCK]
        first = torch.cat([first, spare]).sort().values
    rows = [needed[k].nonzero().flatten() if nested and k else first for k in range(steps)]
    keep: list[torch.Tensor | None] = [None]
    loss_at, label_at, edges = [], [], []
    for k in range(steps):
        if k:
            keep.append(None if rows[k].numel() == rows[k - 1].numel() else torch.searchsorted(rows[k - 1], rows[k]))
        trained = active[k].nonzero().flatten()
        loss_at.append(torch.searchsorted(rows[k], trained))
        label_at.append(index[trained + k])
        edges.append(torch.searchsorted(label_at[k], torch.arange(labels.numel() + 1)).tolist())
    for k in range(1, steps):
        if keep[k] is None:
            rows[k] = rows[k - 1]
    reads = [(x + k) % max(n, 1) for k, x in enumerate(rows)]
    read = torch.cat(reads).unique()
    return StepPlan(
        rows=tuple(rows),
        keep=tuple(keep),
        reads=tuple(reads),
        read=read,
        read_at=tuple(torch.searchsorted(read, x) for x in reads),
        loss_at=tuple(loss_at),
        label_at=tuple(label_at),
        labels=labels,
        edges=tuple(edges),
        counts=active.sum(1).float(),
    )
