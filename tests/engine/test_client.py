"""The asynchronous client against a tiny HTTP server on loopback."""

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eyas.engine import vllm, vllm_client, vllm_run
from eyas.engine.base import Completion, Request
from eyas.engine.spec_counters import SpecCounters, parse_counters
from eyas.engine.vllm_server import GivenServer, given_servers
from eyas.errors import EngineError, InputError
from eyas.recipe import EnginePart, SamplingPart

GREEDY = SamplingPart()  # type: ignore[call-arg]
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


def echo(body: dict[str, Any]) -> tuple[int, Any]:
    n = body["max_tokens"]
    choice = {
        "prompt_token_ids": body["prompt"],
        "token_ids": [7] * n,
        "logprobs": {"token_logprobs": [-0.5] * n},
        "finish_reason": "length",
    }
    return 200, {"choices": [choice]}


class Fake:
    """Answers POST /v1/completions with `answer`; remembers what was asked."""

    def __init__(self, port: int = 0) -> None:
        self.answer: Answer = echo
        self.models: tuple[int, Any] = (200, {"data": [{"id": "m"}]})
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.connections: list[tuple[str, int]] = []
        self.now = self.most = 0
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(*fake.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.bodies.append(body)
                    fake.keys.add(self.headers["Authorization"])
                    fake.connections.append(self.client_address)
                    fake.now += 1
                    fake.most = max(fake.most, fake.now)
                try:
                    self.reply(*fake.answer(body))
                finally:
                    with fake.lock:
                        fake.now -= 1

            def reply(self, status: int, value: Any) -> None:
                text = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *args: object) -> None:
                return  # a client that went away

        self.server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def fake() -> Iterator[Fake]:
    f = Fake()
    yield f
    f.server.shutdown()
    f.server.server_close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        vllm_client.tenacity, "wait_exponential_jitter", lambda **kwargs: vllm_client.tenacity.wait_fixed(0.01)
    )


def asked(n: int) -> Iterator[Request]:
    for i in range(n):
        yield Request(f"r{i}", [1, 2, i], max_tokens=1 + i % 3)


def ask(
    urls: list[str], requests: Iterator[Request], concurrency: int = 4, capture: bool = False
) -> Iterator[Completion]:
    return vllm_run.generate([GivenServer(u, "k") for u in urls], requests, GREEDY, concurrency, capture)


def test_every_request_is_answered_once_with_bounded_concurrency_and_the_key(fake: Fake) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.01)
        return echo(body)

    fake.answer = slow
    got = {c.id: c for c in ask([fake.url], asked(40))}
    assert set(got) == {f"r{i}" for i in range(40)}
    assert got["r5"].output_ids == [7, 7, 7]
    assert fake.most <= 4
    assert fake.keys == {"Bearer k"}
    assert fake.bodies[0]["model"] == "m"
    assert (fake.bodies[0]["temperature"], fake.bodies[0]["seed"], fake.bodies[0]["logprobs"]) == (0.0, 0, 0)


def test_timed_requests_keep_no_states_and_share_no_prefix(fake: Fake, tmp_path: Path) -> None:
    engine = EnginePart(urls=[fake.url])  # type: ignore[call-arg]
    made: Any = None  # a server that is given needs no target
    client = vllm.VllmEngine(engine, made, [1, 2], tmp_path, log_file=tmp_path / "log", max_model_len=8)
    for _ in range(2):
        list(client.generate(asked(2), GREEDY, timed=True))
    assert not any("kv_transfer_params" in body for body in fake.bodies)
    salts = [body["cache_salt"] for body in fake.bodies]
    assert salts[0] == salts[1] != salts[2] == salts[3]


def test_requests_are_read_lazily_and_closing_early_ends_everything(fake: Fake) -> None:
    read = []

    def requests() -> Iterator[Request]:
        for r in asked(100_000):
            read.append(r.id)
            yield r

    answers = ask([fake.url], requests(), concurrency=2)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert len(read) < 100
    assert not [t for t in threading.enumerate() if t.name == "eyas-vllm-client"]


def test_an_error_of_the_requests_iterator_reaches_the_caller(fake: Fake) -> None:
    def requests() -> Iterator[Request]:
        yield from asked(2)
        raise InputError("row 3 is broken")

    with pytest.raises(InputError, match="row 3"):
        list(ask([fake.url], requests()))


def test_a_given_server_that_is_away_for_a_while_pauses_the_job(fake: Fake) -> None:
    drops = list(range(12))

    def away(body: dict[str, Any]) -> tuple[int, Any]:
        if drops:
            drops.pop()
            raise ConnectionError  # the connection ends without a reply
        return echo(body)

    fake.answer = away
    said: list[str] = []
    given = [GivenServer(fake.url, "k")]
    got = list(vllm_run.generate(given, asked(6), GREEDY, 1, False, patience=30, say=said.append))
    assert {c.id for c in got} == {f"r{i}" for i in range(6)}
    assert len(said) == 2
    assert said[0].startswith(f"{fake.url} does not answer (")
    assert said[1] == f"{fake.url} answers again"


def test_a_server_that_was_told_to_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no new connections and keeps the open ones without answering; then another one is there."""
    monkeypatch.setattr(vllm_client, "KNOCK_SECONDS", 0.1)
    first = Fake()
    port, asked_first, forever = first.server.server_address[1], threading.Event(), threading.Event()

    def never(body: dict[str, Any]) -> tuple[int, Any]:
        asked_first.set()
        forever.wait(30)
        raise ConnectionError

    first.answer = never

    def restart() -> None:
        asked_first.wait(30)
        first.server.shutdown()
        first.server.server_close()
        time.sleep(0.8)
        later.append(Fake(port))

    later: list[Fake] = []
    operator = threading.Thread(target=restart)
    operator.start()
    given = [GivenServer(first.url, "k")]
    try:
        got = list(vllm_run.generate(given, asked(6), GREEDY, 2, False, patience=30))
        assert {c.id for c in got} == {f"r{i}" for i in range(6)}
    finally:
        forever.set()
        operator.join()
        later[0].server.shutdown()
        later[0].server.server_close()


def test_one_lost_connection_is_nothing_to_speak_of(fake: Fake) -> None:
    drops = [1]

    def away(body: dict[str, Any]) -> tuple[int, Any]:
        if drops:
            drops.pop()
            raise ConnectionError
        return echo(body)

    fake.answer = away
    said: list[str] = []
    given = [GivenServer(fake.url, "k")]
    assert len(list(vllm_run.generate(given, asked(4), GREEDY, 1, False, patience=30, say=said.append))) == 4
    assert said == []
    assert len(fake.bodies) == 5


@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_a_connection_that_rested_is_not_used_again(fake: Fake, monkeypatch: pytest.MonkeyPatch, pause: float) -> None:
    """The server may close it at the moment at which the next request is sent."""
    monkeypatch.setattr(vllm_client, "IDLE_SECONDS", 0.2)

    def requests() -> Iterator[Request]:
        for r in asked(2):
            yield r
            time.sleep(pause)

    assert len(list(ask([fake.url], requests(), concurrency=1))) == 2
    assert (fake.connections[0] == fake.connections[1]) is (pause == 0)


def test_several_servers_share_the_load(fake: Fake) -> None:
    other = Fake()
    try:
        assert len(list(ask([fake.url, other.url], asked(30)))) == 30
        assert min(len(fake.bodies), len(other.bodies)) >= 5
    finally:
        other.server.shutdown()
        other.server.server_close()


def test_5xx_is_tried_again(fake: Fake) -> None:
    failures = [503, 500]

    def flaky(body: dict[str, Any]) -> tuple[int, Any]:
        return (failures.pop(), "busy") if failures else echo(body)

    fake.answer = flaky
    assert len(list(ask([fake.url], asked(1)))) == 1
    assert len(fake.bodies) == 3


def test_5xx_for_ever_is_an_error(fake: Fake) -> None:
    fake.answer = lambda body: (500, "out of order")
    with pytest.raises(EngineError, match=r"request r0: .* failed 5 times, last: HTTP 500: out of order"):
        list(ask([fake.url], asked(1)))


def test_4xx_is_not_tried_again_and_names_the_request_and_the_servers_words(fake: Fake) -> None:
    fake.answer = lambda body: (400, {"error": {"message": "prompt is too long"}})
    with pytest.raises(EngineError, match=r"request r0 was refused .*HTTP 400.*prompt is too long"):
        list(ask([fake.url], asked(1)))
    assert len(fake.bodies) == 1


def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(EngineError, match="failed 5 times"):
        list(ask(["http://127.0.0.1:9"], asked(1)))


KEY_FIX = "name that file in engine.api_key_file"
ADDRESS_FIX = "fix: correct engine.urls"


@pytest.mark.parametrize(
    ("models", "said", "fix"),
    [
        ((401, {"error": "Unauthorized"}), r"\(HTTP 401\): Unauthorized\n", KEY_FIX),
        ((403, "no entry"), r"\(HTTP 403\): no entry\n", KEY_FIX),
        ((404, {"detail": "Not Found"}), r"\(HTTP 404\): Not Found\n", ADDRESS_FIX),
        ((301, "moved"), r"\(HTTP 301\): moved\n", ADDRESS_FIX),
        ((200, "<html>"), "did not answer with JSON: '<html>'\n", ADDRESS_FIX),
        ((200, {"data": []}), "is no server of a model\n", ADDRESS_FIX),
        ((200, [1]), "is no server of a model\n", ADDRESS_FIX),
    ],
)
def test_a_wrong_server_is_bad_input_with_the_key_to_correct(
    fake: Fake, models: tuple[int, Any], said: str, fix: str
) -> None:
    fake.models = models
    with pytest.raises(InputError, match=said) as e:
        list(ask([fake.url], asked(1)))
    assert e.value.exit_code == 2
    assert fix in str(e.value)
    assert fake.url in e.value.message


def test_a_wrong_port_or_scheme_is_bad_input(fake: Fake) -> None:
    for url in ("http://127.0.0.1:9", fake.url.replace("http", "https")):
        with pytest.raises(InputError, match=f"{url} failed 5 times(.|\n)*{ADDRESS_FIX}"):
            list(ask([url], asked(1)))


def test_a_key_that_is_refused_later_is_no_bad_input(fake: Fake) -> None:
    """The server was started again, with another key."""
    fake.answer = lambda body: (401, {"error": "Unauthorized"})
    with pytest.raises(EngineError, match=f"request r0 was refused(.|\n)*{KEY_FIX}") as e:
        list(ask([fake.url], asked(1)))
    assert e.value.exit_code == 1


def test_a_dead_server_of_ours_is_noticed_while_requests_wait(fake: Fake) -> None:
    class Dead(GivenServer):
        def check(self) -> None:
            raise EngineError("the vLLM server ended; its log ends with: boom")

    def never(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(2)
        return echo(body)

    fake.answer = never
    start = time.monotonic()
    with pytest.raises(EngineError, match="boom"):
        list(vllm_run.generate([Dead(fake.url, None)], asked(1), GREEDY, 1, False))
    assert time.monotonic() - start < 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": [1, 2]}, "not the 3 that were sent"),
        ({"token_ids": None}, "no token ids"),
        ({"logprobs": None}, "expected 1 log probabilities"),
        ({"logprobs": {"token_logprobs": [0.5]}}, "expected 1 log probabilities"),
        ({"token_ids": [7, 7], "logprobs": {"token_logprobs": [-1, -1]}}, "expected 1 to 1 tokens, found 2"),
    ],
)
def test_nonsense_is_refused_by_name(fake: Fake, change: dict[str, Any], message: str) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        status, reply = echo(body)
        reply["choices"][0] |= change
        return status, reply

    fake.answer = answer
    with pytest.raises(EngineError, match=f"request r0: .*{message}"):
        list(ask([fake.url], asked(1)))


def test_a_server_that_does_not_capture_is_refused(fake: Fake) -> None:
    fix = "start it with the launch line that `eyas plan RECIPE` prints"
    with pytest.raises(InputError, match=f"request r0: the server kept no hidden states(.|\n)*{fix}"):
        list(ask([fake.url], asked(1), capture=True))


def with_shard(path: Path) -> Answer:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        status, reply = echo(body)
        rows = len(body["prompt"]) + body["max_tokens"] - 1
        reply["kv_transfer_params"] = {"capture": {"path": str(path), "index": 0, "rows": rows}}
        return status, reply

    return answer


def test_completions_wait_for_their_shard(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    fake.answer = with_shard(path)
    threading.Timer(0.3, path.touch).start()
    start = time.monotonic()
    assert len(list(ask([fake.url], asked(20), capture=True))) == 20
    assert time.monotonic() - start >= 0.25


def test_a_shard_that_could_not_be_written_is_an_error(fake: Fake, tmp_path: Path) -> None:
    fake.answer = with_shard(tmp_path / "s.safetensors")
    (tmp_path / "s.safetensors.error").write_text("disk full")
    with pytest.raises(EngineError, match="disk full"):
        list(ask([fake.url], asked(1), capture=True))


def test_shards_that_are_awaited_when_another_one_fails_are_forgotten(
    fake: Fake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python complains on stderr of tasks that nobody ended."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return with_shard(tmp_path / f"{body['prompt'][-1]}.safetensors")(body)

    fake.answer = answer
    (tmp_path / "3.safetensors.error").write_text("disk full")
    with pytest.raises(EngineError, match="disk full"):
        list(ask([fake.url], asked(4), concurrency=1, capture=True))
    gc.collect()
    assert not caplog.records


def test_a_shard_that_never_comes_is_an_error(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_run, "SHARD_SECONDS", 0.1)
    fake.answer = with_shard(tmp_path / "s.safetensors")
    with pytest.raises(EngineError, match="did not appear"):
        list(ask([fake.url], asked(1), capture=True))


def test_given_servers_take_their_key_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    part = EnginePart(urls=["http://a:1/v1", "http://b:2/"], api_key_file=str(tmp_path / "key"))  # type: ignore[call-arg]
    assert [(s.url, s.key) for s in given_servers(part)] == [("http://a:1", "secret"), ("http://b:2", "secret")]
    (tmp_path / "empty").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "words").write_text("schlüssel und mehr")
    for name in ("none", "empty", "bytes", "words", "."):
        with pytest.raises(InputError, match=f"engine.api_key_file: .*{name}"):
            given_servers(part.model_copy(update={"api_key_file": str(tmp_path / name)}))


METRICS = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="2"} 1.0
vllm:num_requests_running{engine="0",model_name="target"} 0.0
"""


def test_counters_of_speculative_decoding() -> None:
    counters = parse_counters(METRICS)
    assert counters == SpecCounters(10, 30, 12, (7, 4, 1))
    assert counters - SpecCounters(4, 12, 5, (3, 2, 0)) == SpecCounters(6, 18, 7, (4, 2, 1))
    assert parse_counters("") == SpecCounters(0, 0, 0, ())
    assert counters - parse_counters("") == counters
