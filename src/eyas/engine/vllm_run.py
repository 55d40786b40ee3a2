"""Many requests over one or several servers at once: a thread with an event loop sends them, and the caller sees an
ordinary iterator. `requests` is read lazily, by that thread."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from eyas.engine.base import Completion, Request
from eyas.engine.vllm_client import Client
from eyas.engine.vllm_server import Endpoint
from eyas.errors import EngineError
from eyas.recipe import SamplingPart

SHARD_SECONDS = 120.0
"""longest wait for a shard after its reply (servers close shards after a few seconds)"""
_OUTSTANDING = 8
"""requests begun but not yet handed to the caller, as a multiple of the concurrency"""
_POLL_SECONDS = 0.02
_MEND = (
    "mend what it says, then give the same command again: it continues (a server of engine.urls whose filing process "
    "ended must be started again first)"
)


def generate(
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
        self._endpoints = [Client(e, sampling, capture, extra, patience, say) for e in endpoints]
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
                watching = [group.create_task(self._watch())]
                watching += [group.create_task(client.knock()) for client in self._endpoints]
                async with asyncio.TaskGroup() as work:
                    for _ in range(self._concurrency):
                        work.create_task(self._work(work))
                for task in watching:
                    task.cancel()

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


async def _wait_for(path: Path) -> None:
    """Until a shard is there. Raises EngineError when its .error file is, or neither after SHARD_SECONDS."""
    error = path.with_name(path.name + ".error")
    end = asyncio.get_running_loop().time() + SHARD_SECONDS
    while not path.exists():
        if error.exists():
            why = error.read_text(encoding="utf-8")
            error.unlink(missing_ok=True)
            raise EngineError(f"hidden states were not written: {why}", fix=_MEND)
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
