"""HTTP dispatcher of generations: one background thread with an event loop carries requests out and outcomes back.

The engine's own thread keeps all the state; this one only waits for HTTP. Every attempt has a number, and its outcome
comes back under that number, so the engine recognizes and drops an answer to an attempt it has given up.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import aiohttp

from megatron_dapo.engines.sglang.client import EngineError, EngineTimeout, SglangClient
from megatron_dapo.engines.sglang.wire import Generation
from megatron_dapo.types import GenerationRequest, RoutingShape


# One try of a request on one server: its number, unique, and the key of its cache, see `SglangClient.generate`.
Attempt = tuple[int, SglangClient, GenerationRequest, str]


@dataclass(frozen=True)
class Outcome:
    """Result of attempt `number`."""

    number: int
    result: Generation | EngineError


@dataclass(frozen=True)
class Probed:
    """Result of a health probe; a problem of None means healthy."""

    client: SglangClient
    problem: EngineError | None


class HttpDispatcher:
    """Sends attempts and returns their outcomes in the order they arrive.

    An attempt fails once its server has answered nothing for the client's generate_s: a server with a small KV cache
    queues requests, and one that waits for its turn while others finish is not late.
    """

    def __init__(self, vocab_size: int, max_connections: int, routing: RoutingShape | None = None):
        """max_connections: to one server. vocab_size and routing: of the trained model."""
        self._vocab_size, self._routing = vocab_size, routing
        self._max_connections = max_connections
        self._arrived: queue.SimpleQueue[Outcome | Probed | None] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # attempt -> task, in the loop's thread
        self._background: set[asyncio.Task[None]] = set()  # keeps probes from being collected
        self._connections: dict[SglangClient, aiohttp.ClientSession] = {}
        self._answered_at: dict[SglangClient, float] = {}  # last answer of each server, on the loop's clock
        self._num_open: Counter[SglangClient] = Counter()  # attempts of each server
        self._busy_since: dict[SglangClient, float] = {}  # servers with attempts, on the loop's clock
        self._busy_s = 0.0  # finished busy periods of all servers
        self._loop = asyncio.new_event_loop()
        # A daemon: a process that ends by an error does not wait for answers.
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-dispatcher", daemon=True)
        self._thread.start()

    def send(self, attempts: Sequence[Attempt]) -> None:
        """Start the attempts."""
        self._loop.call_soon_threadsafe(self._start, list(attempts))

    def give_up(self, numbers: Sequence[int]) -> None:
        """Drop the connections of attempts whose answers are no longer wanted. An outcome may still be on its way."""
        self._loop.call_soon_threadsafe(self._cancel, list(numbers))

    def probe(self, client: SglangClient) -> None:
        """Ask a server for its health; the answer arrives as `Probed`."""
        self._loop.call_soon_threadsafe(lambda: self._keep(self._probe(client)))

    def forget(self, client: SglangClient) -> None:
        """Close the connections to a server."""
        self._loop.call_soon_threadsafe(lambda: self._keep(self._close(client)))

    def receive(self, wait_s: float) -> list[Outcome | Probed]:
        """Return what has arrived; wait up to `wait_s` seconds for the first, or until `wake`."""
        arrived: list[Outcome | Probed | None] = []
        try:
            arrived.append(self._arrived.get(timeout=wait_s) if wait_s > 0 else self._arrived.get_nowait())
            while True:
                arrived.append(self._arrived.get_nowait())
        except queue.Empty:
            return [one for one in arrived if one is not None]

    @property
    def busy_s(self) -> float:
        """Seconds in which a server had attempts to work on, summed over the servers. Any thread may read it."""
        now = self._loop.time()
        return self._busy_s + sum(now - since for since in list(self._busy_since.values()))

    def wake(self) -> None:
        """End a wait of `receive`, or the next one. Any thread may call it."""
        self._arrived.put(None)

    def close(self) -> None:
        """Drop everything and end the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    # In the loop's thread

    def _start(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self._tasks[attempt[0]] = self._loop.create_task(self._run(*attempt))

    def _cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            if task := self._tasks.pop(number, None):
                task.cancel()

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _http(self, client: SglangClient) -> aiohttp.ClientSession:
        if client not in self._connections:
            self._connections[client] = client.open_async(self._max_connections)
        return self._connections[client]

    async def _run(self, number: int, client: SglangClient, request: GenerationRequest, cache_key: str) -> None:
        result: Generation | EngineError
        self._count(client, 1)
        try:
            # SGLang aborts every rid that begins with the one given; the full stop keeps one from beginning another.
            result = await self._generate(client, request, f"{request.request_id}#{number}.", cache_key)
            self._answered_at[client] = self._loop.time()
        except EngineError as error:
            result = error
        except Exception as error:  # a mistake of ours must surface in poll, not die in this thread
            result = EngineError(client.name, "POST /generate", f"{type(error).__name__}: {error}")
        finally:
            self._count(client, -1)
        self._tasks.pop(number, None)
        self._arrived.put(Outcome(number, result))

    def _count(self, client: SglangClient, change: int) -> None:
        self._num_open[client] += change
        if self._num_open[client]:
            self._busy_since.setdefault(client, self._loop.time())
        else:
            del self._num_open[client]
            self._busy_s += self._loop.time() - self._busy_since.pop(client)

    async def _generate(
        self, client: SglangClient, request: GenerationRequest, rid: str, cache_key: str
    ) -> Generation:
        """Return the answer; EngineTimeout once the server has answered no request at all for generate_s."""
        sent_at, limit = self._loop.time(), client.timeouts.generate_s
        http, size, routing = self._http(client), self._vocab_size, self._routing
        answer = self._loop.create_task(
            client.generate(http, request, rid, vocab_size=size, routing=routing, cache_key=cache_key)
        )
        try:
            while not answer.done():
                idle = self._loop.time() - max(sent_at, self._answered_at.get(client, sent_at))
                if idle >= limit:
                    problem = f"no answer to any request for {idle:.1f} s (request_timeout_seconds {limit:g})"
                    raise EngineTimeout(client.name, "POST /generate", problem)
                await asyncio.wait({answer}, timeout=limit - idle)  # unlike wait_for, it cancels nothing
            return answer.result()
        finally:
            answer.cancel()  # does nothing to one that is there; one that is late loses its connection

    async def _probe(self, client: SglangClient) -> None:
        problem: EngineError | None = None
        try:
            await client.probe(self._http(client))
        except EngineError as error:
            problem = error
        self._arrived.put(Probed(client, problem))

    async def _close(self, client: SglangClient) -> None:
        self._answered_at.pop(client, None)
        if connections := self._connections.pop(client, None):
            await connections.close()

    async def _shut_down(self) -> None:
        tasks = [*self._tasks.values(), *self._background]
        tasks = [task for task in tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in list(self._connections):
            await self._close(client)
