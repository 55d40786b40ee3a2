"""The vllm engine: token ids in, token ids, log probabilities and captured states out, over one or several servers."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx

from eyas.engine.base import Completion, Request
from eyas.engine.spec_counters import SpecCounters, parse_counters
from eyas.engine.vllm_client import headers
from eyas.engine.vllm_run import generate
from eyas.engine.vllm_server import Endpoint, VllmServer, given_servers
from eyas.errors import EngineError
from eyas.recipe import EnginePart, SamplingPart
from eyas.target.info import TargetInfo

OUTAGE_SECONDS = 600.0
"""longest wait for a server of `engine.urls` that does not answer: its user may start it again"""
ENDING_SECONDS = 30.0
"""the same for a server of our own: the time in which its supervisor ends what is left of it, and says so"""


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
        return generate(
            self._endpoints, requests, sampling, self._concurrency, capture, extra, patience=patience, say=self._say
        )

    def spec_counters(self) -> SpecCounters:
        """Speculative decoding since the servers started, summed over them."""
        total = SpecCounters(0, 0, 0, ())
        for endpoint in self._endpoints:
            try:
                reply = httpx.get(f"{endpoint.url}/metrics", headers=headers(endpoint), timeout=30, trust_env=False)
                reply.raise_for_status()
            except httpx.HTTPError as e:
                endpoint.check()
                raise EngineError(f"{endpoint.url}/metrics cannot be read: {e}") from None
            total += parse_counters(reply.text)
        return total
