"""Which tensors are the embedding, the head and the final norm: by key, shape and place in the module tree at once."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eyas.errors import InputError
from eyas.target.info import TensorRef
from eyas.target.packing import Hints, weight_ref
from eyas.target.safetensors_files import Checkpoint

EMBEDDINGS = (
    "embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embeddings", "embedding", "embed_in",
    "embedding.word_embeddings", "word_embedding", "tok_embedding",
)  # fmt: skip
HEADS = ("lm_head", "output", "output_layer", "embed_out", "head", "lm_head.linear", "language_model_head")
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "ln_out")
# These name another norm elsewhere: only where none of the others is there (LFM2, BioGPT).
RARE_NORMS = ("embedding_norm", "layer_norm")
# Parts of a key that name another tower, a speaker or a draft layer: none of them is the text model.
_OTHER = re.compile(
    r"(^|[._])(vision|visual|vit|image|audio|speech|talker|code2wav|code_predictor|mtp|eagle|draft)([._]|$)"
)
LAYER = re.compile(r"^(.*?)(layers|h|blocks|block|layer)\.(\d+)\.")


@dataclass(frozen=True)
class Roles:
    embedding: TensorRef
    head: TensorRef | None
    """None: the checkpoint has no head tensor"""
    final_norm: TensorRef
    final_norm_bias: TensorRef | None
    head_bias: TensorRef | None
    trunk: str
    """key prefix of the module that owns the decoder layers, e.g. `language_model.model.`"""


def find_roles(checkpoint: Checkpoint, *, hidden: int, layers: int, hints: Hints | None = None) -> Roles:
    """Finds the roles in a checkpoint of `layers` decoder layers of width `hidden`.

    The text trunk is the module that owns decoder layers 0..layers-1 and, in itself or an ancestor, an embedding of
    that width; the final norm lies in the trunk, the head in one of its ancestors. Raises InputError with the
    candidates when one role has none or several.
    """
    hints = hints or Hints()
    numbers = _layer_numbers(checkpoint)
    trunks = [prefix for prefix, found in numbers.items() if _owns(found, layers)]
    fits: list[tuple[str, list[TensorRef]]] = []

    def embeddings(trunk: str) -> list[TensorRef]:
        wide = lambda ref: len(ref.shape) == 2 and ref.shape[1] == hidden  # noqa: E731
        return _nearest(checkpoint, hints, _ancestors(trunk), EMBEDDINGS, wide)

    for trunk in trunks:
        if found := embeddings(trunk):
            fits.append((trunk, found))
    if len(fits) > 1:
        fits = [fit for fit in fits if not _OTHER.search(fit[0])] or fits
    if not fits:
        _refuse_fewer_layers(checkpoint, {p: n for p, n in numbers.items() if embeddings(p)}, layers)
        raise _nothing(
            "embedding", f"[vocabulary, {hidden}]", EMBEDDINGS, checkpoint, trunks, _shown_layers(numbers, layers)
        )
    if len(fits) > 1 or len(fits[0][1]) > 1:
        raise _several("embedding", [ref for _, refs in fits for ref in refs], checkpoint)
    trunk, (embedding,) = fits[0]
    places = _ancestors(trunk)[:2]
    norms = _nearest(checkpoint, hints, places, NORMS, lambda ref: ref.shape == (hidden,))
    norms = norms or _nearest(checkpoint, hints, places, RARE_NORMS, lambda ref: ref.shape == (hidden,))
    if not norms:
        raise _nothing("final norm", f"[{hidden}]", NORMS, checkpoint, [trunk])
    if len(norms) > 1:
        raise _several("final norm", norms, checkpoint)
    head = _find_head(checkpoint, hints, trunk, embedding)
    return Roles(
        embedding,
        head,
        norms[0],
        _bias(checkpoint, norms[0].name.rpartition(".")[0], hidden),
        _head_bias(checkpoint, trunk, head, embedding.shape[0]),
        trunk,
    )


def _find_head(checkpoint: Checkpoint, hints: Hints, trunk: str, embedding: TensorRef) -> TensorRef | None:
    rows, hidden = embedding.shape
    heads = [
        ref
        for owner in _ancestors(trunk)
        for ref in _weights(checkpoint, hints, owner, HEADS)
        if len(ref.shape) == 2 and ref.shape[1] == hidden and ref.name != embedding.name
    ]
    if len(heads) > 1:
        raise _several("head", heads, checkpoint)
    if not heads:
        _refuse_unread_head(checkpoint, trunk, hidden)
        return None
    if heads[0].shape[0] != rows:
        raise InputError(
            f"{checkpoint.path}: head {heads[0].name} has {heads[0].shape[0]} rows, embedding {embedding.name} {rows}",
            fix="both must have one row per token: check that the checkpoint is complete",
        )
    return heads[0]


def _nearest(
    checkpoint: Checkpoint,
    hints: Hints,
    owners: Iterable[str],
    names: tuple[str, ...],
    fits: Callable[[TensorRef], bool],
) -> list[TensorRef]:
    """The fitting weights of the first owner that has any."""
    for owner in owners:
        found = [ref for ref in _weights(checkpoint, hints, owner, names) if fits(ref)]
        if found:
            return found
    return []


def _weights(checkpoint: Checkpoint, hints: Hints, owner: str, names: Iterable[str]) -> list[TensorRef]:
    refs = (weight_ref(checkpoint, owner + name, hints) for name in names)
    return [ref for ref in refs if ref is not None]


def _layer_numbers(checkpoint: Checkpoint) -> dict[str, set[int]]:
    """The layers below each prefix that has any."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in checkpoint.file_of:
        match = LAYER.match(name)
        if match:
            numbers[match[1]].add(int(match[3]))
    return numbers


def _owns(numbers: set[int], layers: int) -> bool:
    """All of 0..layers-1 (more: next-token-prediction layers follow); `layers` may be a nonsense of any size."""
    return len(numbers) >= layers and sum(number < layers for number in numbers) == layers


def number_ranges(numbers: Iterable[int]) -> str:
    """`0 to 2, 4`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _ancestors(trunk: str) -> list[str]:
    """`a.b.` -> [`a.b.`, `a.`, ``]."""
    parts = trunk.split(".")[:-1]
    return ["".join(part + "." for part in parts[:k]) for k in range(len(parts), -1, -1)]


def _head_bias(checkpoint: Checkpoint, trunk: str, head: TensorRef | None, rows: int) -> TensorRef | None:
    """A head's bias; a tied head may have one too."""
    owners = [o + "lm_head" for o in _ancestors(trunk)] if head is None else [head.name.rpartition(".")[0]]
    found = [ref for owner in owners if (ref := _bias(checkpoint, owner, rows)) is not None]
    return found[0] if found else None


def _bias(checkpoint: Checkpoint, module: str, length: int) -> TensorRef | None:
    name = module + ".bias"
    if name not in checkpoint:
        return None
    ref = checkpoint.ref(name)
    if ref.shape != (length,):
        raise InputError(f"{checkpoint.path}: {name} has shape {list(ref.shape)}, [{length}] expected")
    return ref


def _last_parts(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.rpartition(".")[2] for name in names)


def _nothing(
    role: str, shape: str, names: tuple[str, ...], checkpoint: Checkpoint, trunks: list[str], layers: str = ""
) -> InputError:
    leaves = _last_parts(names)
    like = [
        name
        for name in checkpoint.file_of
        if not LAYER.match(name) and any(part in leaves for part in name.split(".")[-2:-1])
    ]
    shown = ", ".join(f"{name} {list(checkpoint.ref(name).shape)}" for name in sorted(like)[:8]) or "none"
    where = f"beside the decoder layers ({', '.join(map(repr, trunks))})" if trunks else f"beside {layers}"
    text = f"{checkpoint.path}: no {role} of shape {shape} {where}; tensors with such a name: {shown}"
    return InputError(text, fix="check that the checkpoint is complete and that config.json belongs to it")


def _refuse_fewer_layers(checkpoint: Checkpoint, found: dict[str, set[int]], layers: int) -> None:
    """Where an embedding fits, but the decoder layers beside it are not all there."""
    found = {prefix: numbers for prefix, numbers in found.items() if not _OTHER.search(prefix)} or found
    if not found:
        return
    trunk, numbers = max(found.items(), key=lambda item: len(item[1]))
    name = next(match[0] for key in checkpoint.file_of if (match := LAYER.match(key)) and match[1] == trunk)
    place = name.removesuffix(f"{name.split('.')[-2]}.")
    raise InputError(
        f"{checkpoint.path}: config.json says num_hidden_layers {layers}, the weights hold only layer "
        f"{number_ranges(numbers)} ({place}*)",
        fix="complete the checkpoint, or correct num_hidden_layers",
    )


def _shown_layers(numbers: dict[str, set[int]], layers: int) -> str:
    """What there is of decoder layers where no module owns all that config.json says."""
    there = [f"{prefix!r} has layer {number_ranges(found)}" for prefix, found in sorted(numbers.items())[:4]]
    return f"decoder layers 0 to {layers - 1}, which no module owns ({'; '.join(there) or 'none has any layer'})"


def _several(role: str, refs: list[TensorRef], checkpoint: Checkpoint) -> InputError:
    shown = ", ".join(f"{ref.name} {list(ref.shape)}" for ref in refs)
    return InputError(
        f"{checkpoint.path}: {len(refs)} tensors could be the {role}: {shown}",
        fix="remove the one that the model does not use from the checkpoint",
    )


def _refuse_unread_head(checkpoint: Checkpoint, trunk: str, hidden: int) -> None:
    """A head-like tensor that is none (wrong width, unknown packing) must not pass for a tied head."""
    modules = {owner + name for owner in _ancestors(trunk) for name in ("lm_head", "output_layer", "embed_out")}
    odd = sorted(
        name for name in checkpoint.file_of if name.rpartition(".")[0] in modules and not name.endswith(".bias")
    )
    if odd:
        shown = ", ".join(f"{name} {checkpoint.ref(name).dtype} {list(checkpoint.ref(name).shape)}" for name in odd)
        raise InputError(
            f"{checkpoint.path}: the head is stored in a way that eyas cannot read ({shown}); width {hidden} expected",
            fix="use a checkpoint whose head is plain, fp8, int4 (compressed-tensors, AWQ, GPTQ) or NVFP4",
        )
