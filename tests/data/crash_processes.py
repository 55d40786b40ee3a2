"""Processes to be killed. This one imports everything once, then forks a harvest or a small server for each line.

    client TARGET RUN_DIR PROMPTS URL LOG      prepares and harvests over the server at URL
    server TARGET STATES_DIR PORT LOG          answers like a vLLM server with eyas's capture

It prints the child's process id for each line read, and ends its children when its standard input ends.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import tenacity
import torch

from eyas.data.harvest import harvest
from eyas.data.prepare import prepare
from eyas.engine import vllm, vllm_client
from eyas.engine.base import Request
from eyas.engine.vllm import VllmEngine
from eyas.errors import EyasError
from eyas.progress import Progress
from eyas.rundir import RunDir
from eyas.states.shard import ShardSample, write_shard
from eyas.target.resolve import resolve_target

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.tiny import LAYERS, TinyEngine, recipe

PER_SHARD, IDLE_SECONDS, ANSWER_SECONDS = 4, 0.05, 0.004
SHORT_PAUSE = 0.02


def client(target: Path, root: Path, prompts: Path, url: str) -> int:
    """0 and "done SAMPLES NEW", or the error's exit code and message, as `eyas harvest` has them."""
    vllm_client.tenacity.wait_exponential_jitter = lambda **kwargs: tenacity.wait_fixed(SHORT_PAUSE)  # type: ignore[misc,assignment]
    vllm.OUTAGE_SECONDS = 0.0
    run, quiet = RunDir(root), Progress(quiet=True)
    run.target_json.write_text("{}")  # the mark of a run directory, as every command leaves it
    what = recipe(root, target, [prompts], states="bf16")
    what = what.model_copy(update={"engine": what.engine.model_copy(update={"urls": [url], "concurrency": 6})})
    info = resolve_target(str(target))
    try:
        with run.locked():
            if not run.prepared.exists():
                prepare(what, info, run, quiet)
            engine = VllmEngine(what.engine, info, LAYERS, run.states, log_file=root / "none.log", max_model_len=400)
            counts = harvest(what, info, run, LAYERS, quiet, lambda: engine)
    except EyasError as e:
        print(type(e).__name__, e.message, flush=True)
        return e.exit_code
    print("done", counts["samples"], counts["new_samples"], flush=True)
    return 0


class SmallServer:
    """Answers one request at a time, replies before the shard is written, closes shards when full or idle."""

    def __init__(self, target: Path, states: Path) -> None:
        self.engine, self.states = TinyEngine(target, states), states
        self.lock = threading.Lock()
        self.serial = 0
        self.open: list[ShardSample] = []
        self.latest = 0.0
        threading.Thread(target=self._close_idle_ones, daemon=True).start()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            time.sleep(ANSWER_SECONDS)
            request = Request("", body["prompt"], body["max_tokens"])
            output, logprobs, _, states = self.engine._answer(request)
            tokens = torch.tensor(request.prompt_ids + output)
            told = {"path": str(self._path()), "index": len(self.open), "rows": len(tokens) - 1}
            self.open.append(ShardSample(states, tokens, len(request.prompt_ids), 0))
            self.latest = time.monotonic()
            if len(self.open) == PER_SHARD:
                threading.Thread(target=self._write, args=(self._path(), self.open), daemon=True).start()
                self._next()
        stopped = output[-1] == self.engine.model.config.eos_token_id
        choice = {
            "prompt_token_ids": body["prompt"],
            "token_ids": output,
            "logprobs": {"token_logprobs": [min(x, 0.0) for x in logprobs]},
            "finish_reason": "stop" if stopped else "length",
        }
        return {"choices": [choice], "kv_transfer_params": {"capture": told}}

    def _path(self) -> Path:
        return self.states / f"server-{os.getpid()}-{self.serial:06d}.safetensors"

    def _next(self) -> None:
        self.open, self.serial = [], self.serial + 1

    def _write(self, path: Path, samples: list[ShardSample]) -> None:
        write_shard(path, LAYERS, samples, ["r"] * len(samples))

    def _close_idle_ones(self) -> None:
        while True:
            time.sleep(IDLE_SECONDS)
            with self.lock:
                if self.open and time.monotonic() - self.latest > IDLE_SECONDS:
                    self._write(self._path(), self.open)
                    self._next()


def server(target: Path, states: Path, port: int) -> int:
    small = SmallServer(target, states)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            self.reply(small.complete(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def reply(self, value: Any) -> None:
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, *args: object) -> None:
            return  # a client that went away

    with Server(("127.0.0.1", port), Handler) as listening:
        print("ready", flush=True)
        listening.serve_forever()
    return 0


def fork(work: Callable[[], int], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = work()
    except BaseException:  # noqa: BLE001 - a forked child must not return into the parent's loop
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    children: list[int] = []
    print("imported", flush=True)
    for line in sys.stdin:
        kind, *args, log = line.rstrip("\n").split("\t")
        if kind == "client":
            target, root, prompts, url = args
            pid = fork(lambda: client(Path(target), Path(root), Path(prompts), url), log)  # noqa: B023
        elif kind == "server":
            target, states, port = args
            pid = fork(lambda: server(Path(target), Path(states), int(port)), log)  # noqa: B023
        else:  # "wait PID -": its exit status, negative for a signal
            status = os.waitstatus_to_exitcode(os.waitpid(int(args[0]), 0)[1])
            children.remove(int(args[0]))
            print(status, flush=True)
            continue
        children.append(pid)
        print(pid, flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
