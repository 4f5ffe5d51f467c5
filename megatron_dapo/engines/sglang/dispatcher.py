"""Carries generations to servers and their outcomes back: one background thread with an event loop.

The engine's own thread keeps all the books; this one only waits for HTTP. Every delivery has a number, and its outcome
comes back under that number, so an answer to a delivery that the engine has given up is recognized and dropped.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import httpx

from megatron_dapo.engines.sglang.client import EngineError, EngineTimeout, SglangClient
from megatron_dapo.engines.sglang.wire import Generation
from megatron_dapo.types import GenerationRequest


@dataclass(frozen=True)
class Delivery:
    """One try of one request on one server."""

    number: int
    client: SglangClient
    request: GenerationRequest

    @property
    def rid(self) -> str:
        """The full stop keeps one rid from being the beginning of another: SGLang aborts by the beginning."""
        return f"{self.request.request_id}#{self.number}."


@dataclass(frozen=True)
class Outcome:
    """What became of delivery `number`."""

    number: int
    result: Generation | EngineError


@dataclass(frozen=True)
class Probed:
    """What a look at a server's health gave: None is well."""

    client: SglangClient
    problem: EngineError | None


class HttpDispatcher:
    """Sends deliveries and hands out their outcomes in the order they arrive."""

    def __init__(self, vocab_size: int, max_connections: int):
        self._vocab_size = vocab_size
        self._max_connections = max_connections
        self._arrived: queue.SimpleQueue[Outcome | Probed] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by delivery, in the loop's thread
        self._background: set[asyncio.Task[None]] = set()  # keeps probes from being collected
        self._connections: dict[SglangClient, httpx.AsyncClient] = {}
        self._loop = asyncio.new_event_loop()
        # A daemon: a process that ends by an error does not wait for answers.
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-dispatcher", daemon=True)
        self._thread.start()

    def send(self, deliveries: Sequence[Delivery]) -> None:
        self._loop.call_soon_threadsafe(self._start, list(deliveries))

    def give_up(self, numbers: Sequence[int]) -> None:
        """Drop connections of deliveries whose answers are no longer wanted. An outcome may still be on its way."""
        self._loop.call_soon_threadsafe(self._cancel, list(numbers))

    def probe(self, client: SglangClient) -> None:
        """Look whether a server is well; the answer arrives as `Probed`."""
        self._loop.call_soon_threadsafe(lambda: self._keep(self._probe(client)))

    def forget(self, client: SglangClient) -> None:
        """Close the connections to a server."""
        self._loop.call_soon_threadsafe(lambda: self._keep(self._close(client)))

    def receive(self, wait_s: float) -> list[Outcome | Probed]:
        """What has arrived; waits up to `wait_s` for the first."""
        arrived: list[Outcome | Probed] = []
        try:
            arrived.append(self._arrived.get(timeout=wait_s) if wait_s > 0 else self._arrived.get_nowait())
            while True:
                arrived.append(self._arrived.get_nowait())
        except queue.Empty:
            return arrived

    def close(self) -> None:
        """Drop everything and end the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    # In the loop's thread

    def _start(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self._tasks[delivery.number] = self._loop.create_task(self._deliver(delivery))

    def _cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            if task := self._tasks.pop(number, None):
                task.cancel()

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _http(self, client: SglangClient) -> httpx.AsyncClient:
        if client not in self._connections:
            self._connections[client] = client.open_async(self._max_connections)
        return self._connections[client]

    async def _deliver(self, delivery: Delivery) -> None:
        result: Generation | EngineError
        client, deadline = delivery.client, delivery.client.timeouts.generate_s
        try:
            answer = client.generate(self._http(client), delivery.request, delivery.rid, vocab_size=self._vocab_size)
            result = await asyncio.wait_for(answer, deadline + 1)
        except asyncio.TimeoutError:
            result = EngineTimeout(client.name, "POST /generate", f"no whole answer within {deadline:g} s")
        except EngineError as error:
            result = error
        except Exception as error:  # a mistake of ours must surface in poll, not die in this thread
            result = EngineError(client.name, "POST /generate", f"{type(error).__name__}: {error}")
        self._tasks.pop(delivery.number, None)
        self._arrived.put(Outcome(delivery.number, result))

    async def _probe(self, client: SglangClient) -> None:
        problem: EngineError | None = None
        try:
            await client.probe(self._http(client))
        except EngineError as error:
            problem = error
        self._arrived.put(Probed(client, problem))

    async def _close(self, client: SglangClient) -> None:
        if connections := self._connections.pop(client, None):
            await connections.aclose()

    async def _shut_down(self) -> None:
        tasks = [*self._tasks.values(), *self._background]
        tasks = [task for task in tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in list(self._connections):
            await self._close(client)
