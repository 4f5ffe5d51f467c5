"""The verifier process of a user's `async def`: it works on every task that it has been sent at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from megatron_dapo.rewards.result import VerifierResult
from megatron_dapo.rewards.verifier import Verifier
from megatron_dapo.rewards.worker import answer, arguments_of, describe

Send = Callable[[Mapping[str, Any]], None]


def serve_many(verifier: Verifier, requests: BinaryIO, send: Send, timeout_s: float) -> None:
    """Serve tasks until the parent closes the pipe. `send` writes a reply; each answer may take `timeout_s` seconds."""
    asyncio.run(_serve(verifier, requests, send, timeout_s))


async def _serve(verifier: Verifier, requests: BinaryIO, send: Send, timeout_s: float) -> None:
    """Work on every task from when it is read, and reply in the order of the tasks, until the parent closes the pipe."""
    loop = asyncio.get_running_loop()
    started: asyncio.Queue[asyncio.Future[dict[str, Any]]] = asyncio.Queue()

    async def reply() -> None:
        while True:
            send(await (await started.get()))

    replying = loop.create_task(reply())
    # A thread of its own: the default ones may all be taken by the user's function.
    with ThreadPoolExecutor(1) as reader:
        while line := await loop.run_in_executor(reader, requests.readline):
            started.put_nowait(loop.create_task(_answer_later(verifier, json.loads(line), timeout_s)))
            if replying.done():
                replying.result()  # raises: the pipe is closed
    replying.cancel()


async def _answer_later(verifier: Verifier, task: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return the reply to one task, as `answer` does; a late one is a `timeout` that costs no process."""
    if task["operation"] != "score":
        return answer(verifier, task)
    assert verifier.score_later is not None
    try:
        result = await asyncio.wait_for(verifier.score_later(*arguments_of(verifier, task)), timeout_s)
    except asyncio.TimeoutError:
        result = VerifierResult("timeout", detail={"error": f"no score in {timeout_s:g} s"})
    except Exception as error:
        result = VerifierResult("error", detail={"error": describe(error)})
    return {"id": task["id"], **vars(result), "leaving": False}
