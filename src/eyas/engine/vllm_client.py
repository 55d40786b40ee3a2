"""One vLLM server as a client sees it: its connections, how it is asked, and what is tried again."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import tenacity

from eyas.engine import vllm_reply
from eyas.engine.base import Completion, Request
from eyas.engine.vllm_server import LAUNCH_LINE, Endpoint, GivenServer, GivenServerError
from eyas.errors import EngineError
from eyas.recipe import SamplingPart

REPLY_SECONDS = 3600.0
_ATTEMPTS = 5
IDLE_SECONDS = 2.0
"""longest rest of a connection that is used again: vLLM closes one after 5 s, perhaps while a request is on its way"""
KNOCK_SECONDS = 5.0
"""how often a server that owes answers is asked for a new connection"""
_ADDRESS = f"correct engine.urls: scheme, host and port of a server that runs; {LAUNCH_LINE} starts one"
_AGAIN = "start it again, then give the same command: it continues where it stopped"
_KEY = (
    "put the key that the server was started with (VLLM_API_KEY, --api-key) into a file, "
    "and name that file in engine.api_key_file"
)


class Client:
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
        self._owed: set[asyncio.Task[httpx.Response]] = set()

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
                    headers=headers(self.endpoint),
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
        return vllm_reply.completion(request, reply, self._capture)

    async def knock(self) -> None:
        """Until it is cancelled: gives up the requests that a server owes which takes no new connections. One that was
        told to end stops its engine, and waits for ever for connections that it will not answer."""
        url = httpx.URL(self.endpoint.url)
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        refused = 0
        while True:
            await asyncio.sleep(KNOCK_SECONDS)
            if not self._owed:
                continue
            try:
                async with asyncio.timeout(KNOCK_SECONDS):
                    _, writer = await asyncio.open_connection(url.host, port)
                writer.close()
                refused = 0
            except ConnectionRefusedError:
                refused += 1
            except OSError:  # also when it was too busy to answer in time
                continue
            if refused > 1:
                for task in self._owed:
                    task.cancel()

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

    async def _answer(self, asking: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
        """Raises httpx.ConnectError when `knock` gave it up."""
        task = asyncio.create_task(asking)
        self._owed.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                raise
            raise httpx.ConnectError("it takes no new connections, and left a request without an answer") from None
        finally:
            self._owed.discard(task)

    async def _once(self, method: str, path: str, body: dict[str, Any] | None, what: str) -> Any:
        try:
            async with self._connection() as http:
                reply = await self._answer(http.request(method, path, json=body))
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


class _Transient(Exception):
    """Worth another try."""


class _Away(_Transient):
    """No answer at all: the server may be gone."""


def headers(endpoint: Endpoint) -> dict[str, str]:
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
