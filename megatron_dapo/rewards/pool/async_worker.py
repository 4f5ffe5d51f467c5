"""The verifier process for a user's `async def`: works on all tasks it was sent at the same time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from megatron_dapo.rewards.pool.worker import BATCH_WAIT_S, answer, arguments_of, describe_call
from megatron_dapo.rewards.result import VerifierResult
from megatron_dapo.rewards.verifiers.verifier import Verifier, results_of

Send = Callable[[Mapping[str, Any]], None]


def serve_many(verifier: Verifier, requests: BinaryIO, send: Send, timeout_s: float, batch_size: int = 0) -> None:
    """Serve tasks until the parent closes the pipe. `send` writes a reply; each answer may take `timeout_s` seconds.

    With a `batch_size`, the verifier's function takes a list of up to that many samples.
    """
    asyncio.run(_serve(verifier, requests, send, timeout_s, batch_size))


async def _serve(verifier: Verifier, requests: BinaryIO, send: Send, timeout_s: float, batch_size: int) -> None:
    """Start every task as soon as it is read, and reply in task order, until the parent closes the pipe."""
    loop = asyncio.get_running_loop()
    started: asyncio.Queue[asyncio.Future[dict[str, Any]]] = asyncio.Queue()

    async def reply() -> None:
        while True:
            send(await (await started.get()))

    waiting: list[tuple[Mapping[str, Any], asyncio.Future[dict[str, Any]]]] = []  # samples of the next batch

    def begin_batch() -> None:
        if waiting:
            batch, waiting[:] = list(waiting), []
            running.add(task := loop.create_task(_answer_batch_later(verifier, batch, timeout_s)))
            task.add_done_callback(running.discard)

    running: set[asyncio.Task[None]] = set()  # the loop only holds weak references to its tasks
    replying = loop.create_task(reply())
    # Use a separate thread, because the user's function may occupy all the default ones.
    with ThreadPoolExecutor(1) as reader:
        while line := await loop.run_in_executor(reader, requests.readline):
            task = json.loads(line)
            if batch_size and task["operation"] == "score":
                waiting.append((task, loop.create_future()))
                started.put_nowait(waiting[-1][1])
                if len(waiting) == batch_size:
                    begin_batch()
                elif len(waiting) == 1:
                    loop.call_later(BATCH_WAIT_S, begin_batch)
            else:
                started.put_nowait(loop.create_task(_answer_later(verifier, task, timeout_s)))
            if replying.done():
                replying.result()  # raises: the pipe is closed
    replying.cancel()


async def _answer_later(verifier: Verifier, task: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return the reply to one task, as `answer` does; a late one is a `timeout` but does not cost a process."""
    if task["operation"] != "score":
        return answer(verifier, task)
    assert verifier.score_later is not None
    try:
        result = await asyncio.wait_for(verifier.score_later(*arguments_of(verifier, task)), timeout_s)
    except asyncio.TimeoutError:
        result = VerifierResult("timeout", detail={"error": f"no score in {timeout_s:g} s (reward.timeout_seconds)"})
    except Exception as error:
        result = VerifierResult("error", detail={"error": describe_call(error, verifier, [task])})
    return {"id": task["id"], **vars(result), "leaving": False}


async def _answer_batch_later(
    verifier: Verifier, batch: Sequence[tuple[Mapping[str, Any], asyncio.Future[dict[str, Any]]]], timeout_s: float
) -> None:
    """Set the replies to a batch of tasks. An exception is the `error` of all of them, a late reply their `timeout`."""
    assert verifier.score_later is not None
    try:
        samples = [arguments_of(verifier, task)[0] for task, _ in batch]
        results = results_of(await asyncio.wait_for(verifier.score_later(samples), timeout_s), len(batch))
    except asyncio.TimeoutError:
        results = [VerifierResult("timeout", detail={"error": f"no scores of a batch in {timeout_s:g} s"})] * len(batch)
    except Exception as error:
        tasks = [task for task, _ in batch]
        results = [VerifierResult("error", detail={"error": describe_call(error, verifier, tasks)})] * len(batch)
    for (task, future), result in zip(batch, results, strict=True):
        future.set_result({"id": task["id"], **vars(result), "leaving": False})
