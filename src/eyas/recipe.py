"""The recipe: the one schema of everything that a user can set, and how it is read and overridden."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from eyas.engine import server_options
from eyas.errors import InputError
from eyas.recipe_errors import Override, Source, explained, found
from eyas.recipe_yaml import read_yaml, strings

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
"""of YAML 1.2's core schema; YAML 1.1, which the reader speaks, takes 1e-4 for text"""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


def _is_url(value: str) -> str:
    try:
        url = httpx.URL(value)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("expected the address of a server, such as http://127.0.0.1:8000")
    return value


def _as_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


Number = Annotated[float, BeforeValidator(_as_number)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""NumPy takes no negative seed, to vLLM -1 is none, and torch's 64 bits also hold the step and the answer's number"""


class Part(BaseModel):
    """A section of the recipe: unknown keys are refused, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TargetPart(Part):
    path: str = Field(description="checkpoint directory, or a hub id")
    remote_code: bool = Field(False, description="allow the checkpoint's own Python code")


class PromptSource(Part):
    """One source of conversations.

    With `data.limit`, the sources' shares of the conversations are as their weights, until one has no more. Without a
    limit every conversation of every source is used, once, whatever the weights.
    """

    path: str = Field(min_length=1, description="file, directory or dataset id")
    weight: Number = Field(1.0, gt=0, allow_inf_nan=False, description="share of data.limit, beside the other sources'")


def _prompts_kind(value: Any) -> str:
    return "source" if isinstance(value, dict | PromptSource) else "path"


_PromptPath = Annotated[str, Field(min_length=1), Tag("path")]
Prompts = Annotated[_PromptPath | Annotated[PromptSource, Tag("source")], Discriminator(_prompts_kind)]


class DataPart(Part):
    prompts: Annotated[list[Prompts], BeforeValidator(_as_list)] = Field(
        min_length=1,
        description="files, directories or dataset ids, each a path or {path: ..., weight: 2.0}; relative paths start "
        "at the recipe's folder",
    )
    responses: Literal["regenerate", "keep"] = Field(
        "regenerate", description="regenerate: the target answers every prompt; keep: the file's own answers"
    )
    holdout: Number | int = Field(
        0.05, ge=0, description="conversations never trained on: a share below 1, or a count of 1 or more"
    )
    limit: int | None = Field(None, ge=2, description="use only this many conversations")
    max_length: int = Field(4096, ge=8, description="longest sample, in tokens of prompt and answer")
    broken_rows: Literal["refuse", "drop"] = Field(
        "refuse", description="rows that cannot even be parsed (a torn file?); drop: leave them out, counted"
    )
    samples_per_prompt: int = Field(
        1, ge=1, le=1024, description="answers to each prompt, with the seeds sampling.seed, sampling.seed + 1, ..."
    )
    cut_answers: Literal["keep", "drop"] = Field(
        "keep", description="answers that ended at engine.sampling.max_tokens or data.max_length"
    )
    repetitive_answers: Literal["keep", "drop"] = Field(
        "keep", description="answers that end in a loop (eyas.data.repetition), also those that were cut in it"
    )

    @field_validator("holdout")
    @classmethod
    def _share_or_count(cls, value: float | int) -> float | int:
        if isinstance(value, float) and value >= 1:
            raise ValueError("a share must be below 1, a count a whole number - e.g. data.holdout: 0.05, or 100")
        return value

    @property
    def sources(self) -> list[PromptSource]:
        return [p if isinstance(p, PromptSource) else PromptSource(path=p, weight=1.0) for p in self.prompts]


class SamplingPart(Part):
    temperature: Number = Field(0.0, ge=0.0, description="0 is greedy")
    top_p: Number = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=1)
    max_tokens: int = Field(2048, ge=2, description="longest answer, in tokens")
    seed: Seed | None = Field(0, description="the engine's sampling seed for each request")


class EnginePart(Part):
    kind: Literal["vllm", "hf"] = Field("vllm", description="vllm: a server; hf: transformers in this process")
    urls: Annotated[list[Annotated[str, AfterValidator(_is_url)]], BeforeValidator(_as_list)] = Field(
        default_factory=list, description="running servers to use; empty: eyas starts one on loopback"
    )
    api_key_file: str | None = Field(None, description="file that holds the key of the servers in `urls`")
    python: str | None = Field(None, description="the interpreter that has vLLM; default: this one")
    tensor_parallel: int = Field(1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: the checkpoint's")
    attention_backend: str | None = Field(None, description="e.g. CPU_MLA or FLASH_ATTN; default: vLLM's choice")
    concurrency: int = Field(64, ge=1, description="requests in flight")
    start_timeout: Number = Field(3600, gt=0, description="seconds until a started server must answer")
    args: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="further `vllm serve` options, e.g. {enforce-eager: true}"
    )
    sampling: SamplingPart = Field(default_factory=SamplingPart)  # type: ignore[arg-type]

    @property
    def options(self) -> dict[str, str | int | float | bool | None]:
        """`args` under the names that `vllm serve` prints: no leading dashes, dashes inside."""
        return {name.lstrip("-").replace("_", "-"): value for name, value in self.args.items()}


class StatesPart(Part):
    dtype: Literal["engine", "bf16", "f32"] = Field("bf16", description="stored precision; engine: as captured")
    window: int | None = Field(None, ge=1, description="not built yet: all states are kept, only null is accepted")


class DraftPart(Part):
    preset: Literal["eagle3", "eagle3.1"] = Field(
        "eagle3", description="eagle3.1 adds norm_before_fc and norm_output (vLLM only)"
    )
    vocab_size: int = Field(32000, ge=1)
    layers: int = Field(1, ge=1)
    norm_before_residual: bool = Field(
        True, description="the first layer's residual is the normed state; SGLang serves only false"
    )
    aux_layers: list[int] | None = Field(
        None, description="state after k layers, ascending; default: 2, middle, last but two"
    )
    intermediate_size: int | None = Field(None, ge=1, description="default: the target's")
    attention_heads: int | None = Field(None, ge=1, description="default: the target's")
    key_value_heads: int | None = Field(None, ge=1, description="default: the target's")
    head_dim: int | None = Field(None, ge=1, description="default: the target's")
    from_: str | None = Field(None, alias="from", description="an existing drafter to start from")


class TrainPart(Part):
    ttt_steps: int = Field(3, ge=1, le=16)
    epochs: int = Field(10, ge=1)
    tokens_per_batch: int = Field(8192, ge=16, description="tokens of one packed batch")
    accumulate: int = Field(1, ge=1, description="batches of each rank in one optimizer step")
    sharding: Literal["none", "fsdp"] = Field(
        "none", description="fsdp: each rank keeps a share of weights, gradients and moments; none: all of them"
    )
    lr: Number = Field(1.0e-4, gt=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Number = Field(0.03, ge=0, lt=1, description="share of the steps")
    weight_decay: Number = Field(0.0, ge=0)
    clip: Number = Field(1.0, gt=0, description="largest gradient norm")
    loss: Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"] = Field(
        "kl_div", description="speculators' losses; nla and lk_hybrid are the LK losses of arXiv 2602.23881"
    )
    step_decay: Number = Field(1.0, gt=0, le=1, description="weight of TTT step k is step_decay ** k")
    noise: Number = Field(0.0, ge=0, description="width of the uniform noise added to the aux states")
    train_head: bool = Field(False, description="train the draft head (else: the target's rows, frozen)")
    keep: int = Field(2, ge=1, description="checkpoints kept: the best and the last ones")
    save_every: int | None = Field(None, ge=1, description="steps between checkpoints; default: each epoch")
    eval_every: int | None = Field(None, ge=1, description="steps between evaluations; default: each epoch")
    compute: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU")
    seed: Seed = 0


FREE_TRAIN_SETTINGS = ("keep", "save_every", "eval_every")
"""they do not touch the weights: a run that continues may change them"""

ExportFormat = Literal["vllm", "speculators", "sglang"]


class ExportPart(Part):
    formats: list[ExportFormat] = Field(["vllm"], min_length=1, description="vllm is always written")


class VerifyPart(Part):
    speculative_tokens: int = Field(3, ge=1, le=16)
    prompts: int = Field(64, ge=1, description="seen and held-out prompts each, at most")
    timed_prompts: int = Field(
        16, ge=1, description="of them, each asked at once with and without the drafter to compare their tokens/s"
    )
    draft_attention_backend: str | None = Field(None, description="attention backend of the drafter")
    tolerance: Number = Field(0.05, gt=0, description="largest |served - predicted| acceptance length")


class Recipe(Part):
    run_dir: str = Field(min_length=1, description="where everything of this run goes")
    target: TargetPart
    data: DataPart
    engine: EnginePart = Field(default_factory=EnginePart)  # type: ignore[arg-type]
    states: StatesPart = Field(default_factory=StatesPart)  # type: ignore[arg-type]
    draft: DraftPart = Field(default_factory=DraftPart)  # type: ignore[arg-type]
    train: TrainPart = Field(default_factory=TrainPart)  # type: ignore[arg-type]
    export: ExportPart = Field(default_factory=ExportPart)  # type: ignore[arg-type]
    verify: VerifyPart = Field(default_factory=VerifyPart)  # type: ignore[arg-type]

    @property
    def server(self) -> EnginePart:
        """The engine part with the leave to run the checkpoint's own code, where the recipe gives it."""
        if not self.target.remote_code:
            return self.engine
        return self.engine.model_copy(update={"args": {**self.engine.args, "trust-remote-code": True}})

    @model_validator(mode="after")
    def _code_is_allowed_in_one_place(self) -> "Recipe":
        if "trust-remote-code" in self.engine.options:
            raise ValueError(
                "engine.args.trust-remote-code allows the checkpoint's code to the server alone - "
                "set target.remote_code instead, which covers every stage"
            )
        return self

    @model_validator(mode="after")
    def _the_servers_options_are_the_recipes_to_give(self) -> "Recipe":
        if (why := server_options.refused(self.engine.args)) is not None:
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _answers_fit(self) -> "Recipe":
        if self.data.responses == "regenerate" and self.engine.sampling.max_tokens >= self.data.max_length:
            raise ValueError(
                f"engine.sampling.max_tokens ({self.engine.sampling.max_tokens}) leaves no room for a prompt within "
                f"data.max_length ({self.data.max_length}) - lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _answers_are_given(self) -> "Recipe":
        data = self.data
        if data.responses == "keep":
            for key, plain in (("samples_per_prompt", 1), ("cut_answers", "keep"), ("repetitive_answers", "keep")):
                if (found := getattr(data, key)) != plain:
                    raise ValueError(
                        f"data.{key}: {found} is about answers that the target gives; data.responses: keep takes the "
                        f"file's own - leave it out, or set data.responses: regenerate"
                    )
        if data.samples_per_prompt > 1 and self.engine.sampling.temperature == 0:
            raise ValueError(
                f"data.samples_per_prompt: {data.samples_per_prompt} at engine.sampling.temperature: 0 gives the same "
                "answer every time - set a temperature above 0, or samples_per_prompt: 1"
            )
        return self


def load_recipe(path: Path, overrides: Iterable[str] = (), limit: int | None = None) -> Recipe:
    """Reads a recipe file and applies `key.sub=value` overrides (values are YAML), and `limit` to data.limit.

    Relative paths inside the recipe (target directory, prompt files, drafter, key file) start at the recipe's folder
    when they exist there, else at the working directory; `run_dir` always starts at the working directory.
    Raises InputError with the file and line or the option, the key, what was found and what was expected.
    """
    if not path.is_file():
        what = f"{path} is a directory, not a recipe file" if path.is_dir() else f"no recipe file {path}"
        raise InputError(what, fix="give the path of a YAML recipe; `recipes/` has ready ones")
    try:
        document = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as e:
        raise InputError(f"{path} is not UTF-8 text (byte {e.start:,})", fix="save it as UTF-8") from None
    if not isinstance(document.value, dict):
        raise InputError(
            f"{path} holds {found(document.value)}, not a mapping of recipe keys", fix="start from a file in `recipes/`"
        )
    raw = _spelled_out(document.value)
    given = [_override(raw, text) for text in overrides]
    if limit is not None:
        _set(raw, ("data", "limit"), limit, f"--limit {limit}")
        given.append(Override(f"--limit {limit}", ("data", "limit")))
    raw, source = _spelled_out(raw), Source(str(path), document, given)
    for loc, text in strings(raw):
        if "\0" in text:
            key = ".".join(map(str, loc)).replace("\0", "\\0")
            raise InputError(
                f"{source.place(loc)[0]}: {key} holds a null byte, which no path or name can", fix="take it out"
            )
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise explained(e, raw, Recipe, source) from None
    return _with_paths_resolved(recipe, path.resolve().parent)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every key written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json", by_alias=True), sort_keys=False)


def _spelled_out(raw: dict[Any, Any]) -> dict[Any, Any]:
    """With {path: ...} for a target that is one word, and {} for sections that are empty."""
    full = dict(raw)
    if isinstance(full.get("target"), str):
        full["target"] = {"path": full["target"]}
    for name in Recipe.model_fields.keys() - {"run_dir"}:
        if name in full and full[name] is None:
            full[name] = {}
    if isinstance(engine := full.get("engine"), dict):
        empty: dict[str, Any] = {name: {} for name in ("args", "sampling") if name in engine and engine[name] is None}
        full["engine"] = {**engine, **empty}
    return full


def _override(raw: dict[Any, Any], text: str) -> Override:
    key, sep, value = text.partition("=")
    if not sep or not key:
        raise InputError(f"--set {text!r} is not key=value", fix="write e.g. --set train.epochs=3")
    option = f"--set {text}"
    names = tuple(key.split("."))
    _set(raw, names, read_yaml(value, option).value, option)
    return Override(option, names)


def _set(raw: dict[Any, Any], names: tuple[str, ...], value: Any, option: str) -> None:
    node = raw
    for i, name in enumerate(names[:-1]):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise InputError(
                f"{option}: {'.'.join(names[: i + 1])} is not a section of the recipe",
                fix=f"set {'.'.join(names[: i + 1])} as a whole",
            )
    node[names[-1]] = value


def _with_paths_resolved(recipe: Recipe, base: Path) -> Recipe:
    def resolve(p: str) -> str:
        beside = base / p
        return str(beside.resolve()) if not Path(p).is_absolute() and beside.exists() else p

    def of(p: str | PromptSource) -> str | PromptSource:
        return resolve(p) if isinstance(p, str) else p.model_copy(update={"path": resolve(p.path)})

    draft, engine = recipe.draft, recipe.engine
    if draft.from_ is not None:
        draft = draft.model_copy(update={"from_": resolve(draft.from_)})
    if engine.api_key_file is not None:
        engine = engine.model_copy(update={"api_key_file": resolve(engine.api_key_file)})
    return recipe.model_copy(
        update={
            "target": recipe.target.model_copy(update={"path": resolve(recipe.target.path)}),
            "data": recipe.data.model_copy(update={"prompts": [of(p) for p in recipe.data.prompts]}),
            "engine": engine,
            "draft": draft,
        }
    )
