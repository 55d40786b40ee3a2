"""The drafter's sizes, and the target layers that it reads: plain arithmetic, so that a plan needs no torch."""

from dataclasses import dataclass

from eyas.errors import InputError
from eyas.recipe import DraftPart
from eyas.target.info import TargetInfo

MAX_MLA_HEAD_DIM = 256
CHUNK_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 22}
"""logits that exist at a time"""


@dataclass(frozen=True)
class NormOptions:
    """Under the names of Eagle3SpeculatorConfig's fields."""

    norm_before_residual: bool
    norm_before_fc: bool
    norm_output: bool
    fc_norm: bool


def norm_options(part: DraftPart) -> NormOptions:
    eagle31 = part.preset == "eagle3.1"
    return NormOptions(part.norm_before_residual, norm_before_fc=eagle31, norm_output=eagle31, fc_norm=False)


@dataclass(frozen=True)
class LayerSizes:
    """Of each draft layer; its width is the target's."""

    heads: int
    key_value_heads: int
    head_dim: int
    intermediate_size: int


def layer_sizes(target: TargetInfo, part: DraftPart) -> LayerSizes:
    """Heads, key/value heads, head size and MLP width are the recipe's, else the target's.

    For a target with latent attention (MLA) the head size is hidden / heads rounded up to a power of two, and every
    head has its own keys. Whether the sizes fit each other says `misfits`.
    """
    heads = part.attention_heads or target.num_attention_heads
    own_heads = heads != target.num_attention_heads
    kv = part.key_value_heads or (heads if own_heads or target.attention == "mla" else target.num_key_value_heads)
    head_dim = part.head_dim or _head_dim(target, heads, own_heads)
    return LayerSizes(heads, kv, head_dim, part.intermediate_size or target.intermediate_size)


def _head_dim(target: TargetInfo, heads: int, own_heads: bool) -> int:
    if target.attention != "mla":
        return target.hidden_size // heads if own_heads else target.head_dim
    size = 16
    while size < target.hidden_size // heads and size < MAX_MLA_HEAD_DIM:
        size *= 2
    return size


def weight_shapes(
    hidden: int, sizes: LayerSizes, norms: NormOptions, *, layers: int, aux: int, target_hidden: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the drafter's own weights ([out, in]) under speculators' names; not of head and embedding."""
    given, inner = target_hidden or hidden, sizes.intermediate_size
    queries, keys = sizes.heads * sizes.head_dim, sizes.key_value_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, aux * given),
        "norm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    for i in range(layers):
        width = 2 * hidden if i == 0 else hidden  # the first layer sees embedding and state side by side
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (queries, width),
            f"layers.{i}.self_attn.k_proj.weight": (keys, width),
            f"layers.{i}.self_attn.v_proj.weight": (keys, width),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    if norms.norm_before_fc:
        shapes["input_norm.weight"] = (aux * given,)
    if norms.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (given,) for i in range(aux)}
    return shapes


def aux_layers(target: TargetInfo, part: DraftPart) -> list[int]:
    """The target layers whose states the drafter reads (k: after k layers), ascending.

    Default: [2, n // 2, n - 3], the convention of vLLM and speculators. Raises InputError naming `draft.aux_layers`.
    """
    if (wrong := _aux_misfit(target, part)) is not None:
        raise wrong
    return chosen_aux_layers(target, part)


def chosen_aux_layers(target: TargetInfo, part: DraftPart) -> list[int]:
    """As `aux_layers`, unchecked."""
    n = target.num_hidden_layers
    return [2, n // 2, n - 3] if part.aux_layers is None else list(part.aux_layers)


def misfits(target: TargetInfo, part: DraftPart) -> list[InputError]:
    """Everything in the recipe's draft part that does not fit the target, each naming its key."""
    sizes = layer_sizes(target, part)
    aux = _aux_misfit(target, part)
    found = [] if aux is None else [aux]
    if part.vocab_size > target.vocab_size:
        found.append(
            InputError(
                f"draft.vocab_size is {part.vocab_size:,}, but the target has only {target.vocab_size:,} tokens",
                fix=f"set draft.vocab_size to at most {target.vocab_size}",
            )
        )
    if target.hidden_size % sizes.heads:
        found.append(
            InputError(
                f"draft.attention_heads: {sizes.heads} heads do not divide the hidden size {target.hidden_size}",
                fix="set draft.attention_heads to a divisor of it",
            )
        )
    if sizes.heads % sizes.key_value_heads:
        found.append(
            InputError(
                f"draft.key_value_heads: {sizes.key_value_heads} does not divide the {sizes.heads} attention heads",
                fix="set draft.key_value_heads to a divisor of draft.attention_heads",
            )
        )
    if sizes.head_dim % 2:
        found.append(
            InputError(
                f"draft.head_dim: heads of {sizes.head_dim} cannot be rotated in halves",
                fix="set draft.head_dim to an even number, e.g. 128",
            )
        )
    return found


def _aux_misfit(target: TargetInfo, part: DraftPart) -> InputError | None:
    n, chosen = target.num_hidden_layers, chosen_aux_layers(target, part)
    if chosen and chosen == sorted(set(chosen)) and chosen[0] >= 1 and chosen[-1] <= n - 1:
        return None
    if n < 2:
        return InputError(
            f"draft.aux_layers: the target is too small: it has {n} layer, and the drafter reads the states after a "
            "layer before the last",
            fix="choose a target of at least 2 layers",
        )
    whose = "the default " if part.aux_layers is None else ""
    return InputError(
        f"draft.aux_layers: {whose}{chosen} does not fit a target of {n} layers; expected different numbers "
        f"from 1 to {n - 1} in ascending order",
        fix="set draft.aux_layers, e.g. " + str(sorted({1, max(1, n // 2), max(1, n - 1)})),
    )
