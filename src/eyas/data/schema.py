"""The columns of the sample files: what prepare writes and what harvest commits."""

from pathlib import Path

import pyarrow as pa

PREPARED = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("turns", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("tools", pa.string()),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_())),
    ]
)
"""One row for each conversation (kept ones that a template re-renders: one for each assistant turn, the same id).

id          hash of the conversation's content; the same in every run
turn        regenerate: 0; keep: 0, or the assistant turn that this row supervises
turns       regenerate: user turns to answer, in order; keep: 1
messages    JSON list of OpenAI-style messages; regenerate: without assistant turns
prompt_ids  regenerate: the prompt of the first user turn; keep: the whole conversation
loss_mask   keep: true at supervised tokens; regenerate: null
"""

HARVESTED = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("conversation", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("rows", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("looped", pa.int32()),
    ]
)
"""One row for each sample whose states were proven.

id             see `sample_id`
split          "train", "holdout", "dropped": an answer that the recipe does not want (data.cut_answers,
               data.repetitive_answers), or "unused": one that it does not ask for now (fewer prompts, say). Of a
               dropped answer the tokens are kept, so that it is not asked for again, and the states are not (shard "",
               index -1), unless it was harvested before the recipe said so; an unused one is kept whole.
token_ids      prompt and answer, the engine's own ids
loss_mask      as long as token_ids; regenerated: exactly the generated positions
logprobs       the engine's, one for each true entry of loss_mask, in order
finish_reason  the engine's; "kept" for kept conversations
shard, index   sample `index` of states/`shard`
rows           len(token_ids) - 1: states cover all but the last token
supervised     true entries of loss_mask
looped         tokens at the answer's end that are a loop (eyas.data.repetition), 0 if none; null for kept conversations
"""

DROPPED, UNUSED = "dropped", "unused"
LEFT_OUT = (DROPPED, UNUSED)
"""splits that nobody trains on"""
LENGTH = "length"
"""the finish reason of a cut answer"""


def sample_id(conversation: str, turn: int, answer: int = 0) -> str:
    """ "<conversation>/<turn>" for the first answer, "<conversation>/<turn>.<answer>" for further ones."""
    return f"{conversation}/{turn}.{answer}" if answer else f"{conversation}/{turn}"


def answer_number(id_: str) -> int:
    """0 for the first answer to a prompt."""
    return int(id_.rpartition("/")[2].partition(".")[2] or 0)


def part_files(samples: Path) -> list[Path]:
    """The committed harvest parts inside `samples/`, in name order."""
    return sorted(p for p in samples.glob("*.parquet") if p.name != "prepared.parquet" and not p.name.startswith("."))
