"""The vllm engine: token ids in, token ids, log probabilities and captured states out, over one or several servers.

A thread with an event loop sends the requests; the caller sees an ordinary iterator. `requests` is read lazily, by
that thread.
"""

import asyncio
import contextlib
import math
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import tenacity

from eyas.engine.base import Captured, Completion, Request
from eyas.engine.spec_counters import SpecCounters, parse_counters
from eyas.engine.vllm_server import LAUNCH_LINE, Endpoint, GivenServer, GivenServerError, VllmServer, given_servers
from eyas.errors import EngineError
from eyas.recipe import EnginePart, SamplingPart
from eyas.target.info import TargetInfo

SHARD_SECONDS = 120.0
"""longest wait for a shard after its reply (servers close shards after a few seconds)"""
REPLY_SECONDS = 3600.0
_ATTEMPTS = 5
OUTAGE_SECONDS = 600.0
"""longest wait for a server of `engine.urls` that does not answer: its user may start it again"""
ENDING_SECONDS = 30.0
"""the same for a server of our own: the time in which its supervisor ends what is left of it, and says so"""
_OUTSTANDING = 8
"""requests begun but not yet handed to the caller, as a multiple of the concurrency"""
_POLL_SECONDS = 0.02
IDLE_SECONDS = 2.0
"""longest rest of a connection that is used again: vLLM closes one after 5 s, perhaps while a request is on its way"""


class VllmEngine:
    """An engine (eyas.engine.base.Engine). Without `engine.urls` it starts a server of its own and stops it at exit."""

    def __init__(
        self,
        engine: EnginePart,
        target: TargetInfo,
        layers: list[int] | None,
        states_dir: Path | None,
        *,
        log_file: Path,
        max_model_len: int,
        drafter: Path | None = None,
        speculative_tokens: int | None = None,
        draft_attention_backend: str | None = None,
        progress_say: Callable[[str], None] | None = None,
    ) -> None:
        self._concurrency = engine.concurrency
        self._capture = layers is not None
        self._say = progress_say or (lambda line: None)
        self.server: VllmServer | None = None
        if engine.urls:
            self._endpoints: list[Endpoint] = [*given_servers(engine)]
        else:
            self.server = VllmServer(
                engine,
                target,
                layers,
                states_dir,
                log_file,
                drafter,
                speculative_tokens,
                max_model_len=max_model_len,
                draft_attention_backend=draft_attention_backend,
                say=progress_say,
            )
            self._endpoints = [self.server]

    def __enter__(self) -> "VllmEngine":
        if self.server is not None:
            self.server.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.server is not None:
            self.server.__exit__(*exc)

    def generate(
        self, requests: Iterable[Request], sampling: SamplingPart, *, timed: bool = False
    ) -> Iterator[Completion]:
        """See eyas.engine.base.Engine. Closing the iterator early, or an exception, cancels what is in flight.

        timed: of these requests only the rate is wanted: their states are not kept, and what was computed for earlier
        requests does not serve them.
        Raises EngineError when a server refuses a request, dies, answers with other tokens than it was
        sent, or does not deliver the states.
        """
        patience = OUTAGE_SECONDS if self.server is None else ENDING_SECONDS
        capture = self._capture and not timed
        extra = {"cache_salt": secrets.token_hex(8)} if timed else None
        return _generate(
            self._endpoints, requests, sampling, self._concurrency, capture, extra, patience=patience, say=self._say
        )

    def spec_counters(self) -> SpecCounters:
        """Speculative decoding since the servers started, summed over them."""
        total = SpecCounters(0, 0, 0, ())
        for endpoint in self._endpoints:
            try:
                reply = httpx.get(f"{endpoint.url}/metrics", headers=_headers(endpoint), timeout=30, trust_env=False)
                reply.raise_for_status()
            except httpx.HTTPError as e:
                endpoint.check()
                raise EngineError(f"{endpoint.url}/metrics cannot be read: {e}") from None
            total += parse_counters(reply.text)
        return total


def _generate(
    endpoints: list[Endpoint],
    requests: Iterable[Request],
    sampling: SamplingPart,
    concurrency: int,
    capture: bool,
    extra: dict[str, Any] | None = None,
    patience: float = 0.0,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Completion]:
    """extra: further fields of every request's body (benchmarks: ignore_eos); patience: seconds to wait for a server
    that does not answer."""
    out: queue.SimpleQueue[Completion | BaseException | None] = queue.SimpleQueue()
    run = _Run(endpoints, iter(requests), sampling, concurrency, capture, extra or {}, out, patience, say)
    thread = threading.Thread(target=run.main, name="eyas-vllm-client", daemon=True)
    thread.start()
    try:
        while (item := out.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
            run.handed_over()
    finally:
        run.cancel()
        thread.join()


class _Run:
    """One call of `generate`, inside its thread."""

    def __init__(
        self,
        endpoints: list[Endpoint],
        requests: Iterator[Request],
        sampling: SamplingPart,
        concurrency: int,
        capture: bool,
        extra: dict[str, Any],
        out: "queue.SimpleQueue[Completion | BaseException | None]",
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        self._requests, self._sampling, self._capture, self._out = requests, sampling, capture, out
        self._concurrency = concurrency
        self._endpoints = [_Client(e, sampling, capture, extra, patience, say) for e in endpoints]
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(_OUTSTANDING * concurrency)
        self._main: asyncio.Task[None] | None = None
        self._shards: dict[Path, asyncio.Task[None]] = {}
        self._cancelled = False

    def main(self) -> None:
        end: BaseException | None = None
        try:
            self._loop.run_until_complete(self._until_done())
        except asyncio.CancelledError:
            pass
        except BaseException as e:  # noqa: BLE001 - raised again in the caller's thread
            end = _first(e)
        finally:
            self._loop.run_until_complete(self._forget_shards())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._out.put(end)

    def cancel(self) -> None:
        """From the caller's thread; harmless when the run is over."""

        def stop() -> None:
            self._cancelled = True
            if self._main is not None:
                self._main.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(stop)

    def handed_over(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._room.release)

    async def _until_done(self) -> None:
        self._main = asyncio.current_task()
        if self._cancelled:
            return
        async with contextlib.AsyncExitStack() as stack:
            for client in self._endpoints:
                await stack.enter_async_context(client.opened())
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                async with asyncio.TaskGroup() as work:
                    for _ in range(self._concurrency):
                        work.create_task(self._work(work))
                watch.cancel()

    async def _forget_shards(self) -> None:
        """Those that are still awaited when the run ends early."""
        for task in self._shards.values():
            task.cancel()
        await asyncio.gather(*self._shards.values(), return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            for client in self._endpoints:
                client.endpoint.check()
            await asyncio.sleep(0.5)

    async def _work(self, group: asyncio.TaskGroup) -> None:
        while True:
            await self._room.acquire()
            request = next(self._requests, None)
            if request is None:
                self._room.release()
                return
            client = min(self._endpoints, key=lambda c: c.in_flight)
            completion = await client.complete(request)
            group.create_task(self._hand_over(completion))  # the states may come later: do not wait for them here

    async def _hand_over(self, completion: Completion) -> None:
        if completion.captured is not None:
            path = completion.captured.shard
            if path not in self._shards:
                self._shards[path] = asyncio.create_task(_wait_for(path))
            await asyncio.shield(self._shards[path])
        self._out.put(completion)


class _Client:
    """One server: its connection pool, and how it is asked."""

    def __init__(
        self,
        endpoint: Endpoint,
        sampling: SamplingPart,
        capture: bool,
        extra: dict[str, Any],
        patience: float,
        say: Callable[[str], None],
    ) -> None:
        self.endpoint = endpoint
        self.in_flight = 0
        self._sampling, self._capture, self._extra = sampling, capture, extra
        self._opened = contextlib.AsyncExitStack()
        self._idle: list[httpx.AsyncClient] = []
        self._certificates = httpx.create_ssl_context(trust_env=False)  # made once: it takes 10 ms
        self._model = ""
        self._patience, self._say = patience, say
        self._away_since: float | None = None
        self._told = False

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as self._opened:
            reply = await self._send("GET", "/v1/models", None, "the list of models")
            try:
                self._model = str(reply["data"][0]["id"])
            except (LookupError, TypeError):
                raise self._refusal(f"{self.endpoint.url} is no server of a model", _ADDRESS) from None
            yield

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """One connection of its own for each request in flight, kept for the next one.

        httpx's pool would look at all its connections for every request: at 256 that costs more than the request.
        """
        if self._idle:
            http = self._idle.pop()
        else:
            http = await self._opened.enter_async_context(
                httpx.AsyncClient(
                    base_url=self.endpoint.url,
                    headers=_headers(self.endpoint),
                    limits=httpx.Limits(max_connections=1, keepalive_expiry=IDLE_SECONDS),
                    timeout=httpx.Timeout(REPLY_SECONDS, connect=30.0),
                    trust_env=False,
                    verify=self._certificates,
                )
            )
        try:
            yield http
        finally:
            self._idle.append(http)

    async def complete(self, request: Request) -> Completion:
        self.in_flight += 1
        try:
            reply = await self._send("POST", "/v1/completions", self._body(request), f"request {request.id}")
        finally:
            self.in_flight -= 1
        return _completion(request, reply, self._capture)

    def _body(self, request: Request) -> dict[str, Any]:
        s = self._sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt_ids,
            "max_tokens": request.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": s.seed if request.seed is None else request.seed,
            "logprobs": 0,  # the sampled token's own, and no other
            "return_token_ids": True,
        }
        if request.prompt_logprobs:
            body["prompt_logprobs"] = 0
        if self._capture:
            body["kv_transfer_params"] = {"capture": True}
        return body | self._extra

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, what: str) -> Any:
        """One exchange; connection errors, time-outs and 5xx are tried again, with growing pauses."""
        tries = 0

        def hopeless(state: tenacity.RetryCallState) -> bool:
            since = self._away_since if isinstance(_error(state), _Away) else None
            waiting = since is not None and time.monotonic() - since < self._patience
            return state.attempt_number >= _ATTEMPTS and not waiting

        def announce(state: tenacity.RetryCallState) -> None:
            error = _error(state)
            away = isinstance(error, _Away) and self._away_since is not None
            if away and state.attempt_number > 1 and not self._told:
                self._told = True
                self._say(f"{self.endpoint.url} does not answer ({error}); waiting, at most {self._patience:.0f} s")

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_Transient),
            stop=hopeless,
            wait=tenacity.wait_exponential_jitter(initial=0.5, max=20),
            before_sleep=announce,
            reraise=True,
        )
        try:
            async for attempt in retrying:
                tries = attempt.retry_state.attempt_number
                with attempt:
                    answer = await self._once(method, path, body, what)
                    self._away_since = None
                    if self._told:
                        self._told = False
                        self._say(f"{self.endpoint.url} answers again")
                    return answer
        except _Transient as e:
            message = f"{what}: {self.endpoint.url} failed {tries} times, last: {e}"
            if not isinstance(e, _Away):
                raise EngineError(message) from None
            raise self._refusal(message, _AGAIN if self._model else _ADDRESS) from None
        raise AssertionError("unreachable")

    def _refusal(self, message: str, fix: str) -> EngineError:
        """A given server that never answered well is the recipe's fault; one that did is out of order now."""
        if not isinstance(self.endpoint, GivenServer):
            return EngineError(message)
        return EngineError(message, fix=fix) if self._model else GivenServerError(message, fix=fix)

    async def _once(self, method: str, path: str, body: dict[str, Any] | None, what: str) -> Any:
        try:
            async with self._connection() as http:
                reply = await http.request(method, path, json=body)
        except httpx.TransportError as e:
            self.endpoint.check()  # a dead server is not tried again
            if self._model and self._patience > 0 and self._away_since is None:  # it has answered before
                self._away_since = time.monotonic()
            raise _Away(f"{type(e).__name__} {e}".strip()) from None
        if reply.status_code >= 500:
            raise _Transient(f"HTTP {reply.status_code}: {_server_message(reply)}")
        if reply.status_code >= 300:
            told = f"{what} was refused by {self.endpoint.url} (HTTP {reply.status_code}): {_server_message(reply)}"
            fix = _ADDRESS if method == "GET" else f"the server must run with {LAUNCH_LINE}"
            raise self._refusal(told, _KEY if reply.status_code in (401, 403) else fix)
        try:
            return reply.json()
        except ValueError:
            told = f"{what}: {self.endpoint.url} did not answer with JSON: {reply.text[:200]!r}"
            raise self._refusal(told, _ADDRESS) from None


_ADDRESS = f"correct engine.urls: scheme, host and port of a server that runs; {LAUNCH_LINE} starts one"
_AGAIN = "start it again, then give the same command: it continues where it stopped"
_KEY = (
    "put the key that the server was started with (VLLM_API_KEY, --api-key) into a file, "
    "and name that file in engine.api_key_file"
)


class _Transient(Exception):
    """Worth another try."""


class _Away(_Transient):
    """No answer at all: the server may be gone."""


def _headers(endpoint: Endpoint) -> dict[str, str]:
    return {} if endpoint.key is None else {"Authorization": f"Bearer {endpoint.key}"}


def _error(state: tenacity.RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()


def _server_message(reply: httpx.Response) -> str:
    """The server's own words: vLLM has {"error": {"message": ...}}, its key check {"error": ...}, its router
    {"detail": ...}."""
    try:
        told = reply.json()
    except ValueError:
        return reply.text[:500]
    for key in ("error", "message", "detail"):
        told = told.get(key, told) if isinstance(told, dict) else told
    return told if isinstance(told, str) else reply.text[:500]


def _completion(request: Request, reply: dict[str, Any], capture: bool) -> Completion:
    """Checks a reply against what was asked. Raises EngineError naming the request."""

    def wrong(what: str) -> EngineError:
        return EngineError(f"request {request.id}: {what}")

    try:
        choice = reply["choices"][0]
    except (LookupError, TypeError):
        raise wrong(f"expected an answer, found {reply!r:.200}") from None
    prompt, output = choice.get("prompt_token_ids"), choice.get("token_ids")
    if prompt is None or output is None:
        raise wrong("the server returned no token ids (return_token_ids); it must be vLLM 0.26 or newer")
    if prompt != request.prompt_ids:
        raise wrong(
            f"the engine consumed {len(prompt)} prompt tokens that are not the {len(request.prompt_ids)} that were sent"
        )
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if logprobs is None or len(logprobs) != len(output) or not all(_is_logprob(x) for x in logprobs):
        raise wrong(f"expected {len(output)} log probabilities, found {logprobs!r:.200}")
    if not 0 < len(output) <= request.max_tokens:
        raise wrong(f"expected 1 to {request.max_tokens} tokens, found {len(output)}")
    of_prompt = None
    if request.prompt_logprobs:
        entries = choice.get("prompt_logprobs") or []
        if len(entries) != len(prompt):
            raise wrong(f"expected {len(prompt)} prompt log probabilities, found {len(entries)}")
        of_prompt = [float(entry[str(token)]["logprob"]) for token, entry in zip(prompt[1:], entries[1:], strict=True)]
    captured = None
    if capture:
        told = (reply.get("kv_transfer_params") or {}).get("capture")
        if told is None:
            none = wrong(f"the server kept no hidden states (finish reason {choice['finish_reason']})")
            if choice["finish_reason"] == "abort":
                raise none
            raise GivenServerError(none.message, fix=f"start it with {LAUNCH_LINE}")  # ours always keeps them
        captured = Captured(Path(told["path"]), told["index"], told["rows"])
        if captured.rows != len(prompt) + len(output) - 1:
            raise wrong(f"{captured.rows} rows of hidden states for {len(prompt)} + {len(output)} tokens")
    return Completion(request.id, prompt, output, logprobs, of_prompt, choice["finish_reason"], captured)


def _is_logprob(x: object) -> bool:
    return isinstance(x, float | int) and math.isfinite(x) and x <= 0


async def _wait_for(path: Path) -> None:
    """Until a shard is there. Raises EngineError when its .error file is, or neither after SHARD_SECONDS."""
    error = path.with_name(path.name + ".error")
    end = asyncio.get_running_loop().time() + SHARD_SECONDS
    while not path.exists():
        if error.exists():
            raise EngineError(f"hidden states were not written: {error.read_text(encoding='utf-8')}")
        if asyncio.get_running_loop().time() > end:
            raise EngineError(
                f"the shard {path} did not appear within {SHARD_SECONDS:.0f} s",
                fix="if its server was started again meanwhile, give the same command again: it continues. Else let "
                "servers of engine.urls reach that directory under the same path as this machine does",
            )
        await asyncio.sleep(_POLL_SECONDS)


def _first(e: BaseException) -> BaseException:
    """The first real error inside the groups that task groups raise."""
    while isinstance(e, BaseExceptionGroup):
        e = next((x for x in e.exceptions if not isinstance(x, asyncio.CancelledError)), e.exceptions[0])
    return e
