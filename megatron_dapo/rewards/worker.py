"""The verifier process: reads tasks as JSON lines, writes one JSON line an answer. Started by `VerifierPool` only.

    parent -> worker   {"verifier": ..., "timeout_s": ..., limits}                            once
    worker -> parent   {"ready": version, "takes_sample": bool, "is_async": bool} or {"failed": message}   once
    parent -> worker   {"id": n, "operation": "score" | "validate" | "repetition", "response": ...,
                        "answer": ..., "sample": the other fields of a RewardSample or null}
    worker -> parent   {"id": n, "outcome": ..., "extracted": ..., "reward": ..., "detail": ..., "leaving": bool}

Replies come in the order of the tasks. An asynchronous function works on all tasks it was sent at a time.

Messages are JSON, never pickles. The process limits its own memory, files and processes before it loads the verifier, keeps the pipes
away from a user's `print` and `input`, and carries limits of time that the kernel enforces even if the parent is gone.
"""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import signal
from collections.abc import Mapping
from typing import Any, BinaryIO

from megatron_dapo.rewards.result import RewardSample, VerifierResult
from megatron_dapo.rewards.supervisor import start_supervised
from megatron_dapo.rewards.verifier import Verifier, load_verifier

MAX_MESSAGE_CHARACTERS = 500
_THREADS = 4  # that may work for one answer all the time until the last resort


def main() -> None:
    """Serve tasks until the parent closes the pipe."""
    # Slurm signals every process of a job: an answer cut off by that would be an error that the response did not make.
    # A handler and not SIG_IGN, which programs started by a user's function would inherit.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    requests, replies = _claim_pipes()
    settings = json.loads(requests.readline())
    start_supervised(settings["max_processes"])
    process_id = os.getpid()
    _limit_resources(settings["memory_limit_mb"], settings["file_limit_mb"])
    # Later than the parent's own deadline: it matters only if the parent has died.
    last_resort_s = 2 * settings["timeout_s"] + 5
    try:
        verifier = load_verifier(settings["verifier"])
    except BaseException as error:
        _send(replies, {"failed": describe(error)})
        return
    is_async = verifier.score_later is not None
    _send(replies, {"ready": verifier.version, "takes_sample": verifier.takes_sample, "is_async": is_async})
    if is_async:
        # Here, so that a worker of any other verifier starts without asyncio.
        from megatron_dapo.rewards.async_worker import serve_many

        serve_many(verifier, requests, lambda reply: _send(replies, reply), settings["timeout_s"])
        return
    for line in requests:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a user's function may have set a handler of its own
        signal.setitimer(signal.ITIMER_REAL, last_resort_s)
        _limit_cpu_time(last_resort_s)
        reply = answer(verifier, json.loads(line))
        if os.getpid() != process_id:
            os._exit(0)  # a fork of the user's function came back here: only the process itself may reply
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply)
        if reply["leaving"]:
            return


def answer(verifier: Verifier, task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to one task. An exception gives the outcome `error`; a MemoryError also ends this process."""
    leaving = False
    try:
        if task["operation"] == "validate":
            result = _validate(verifier, task["answer"])
        elif task["operation"] == "repetition":
            result = _measure_repetition(task["response"])
        else:
            result = verifier.score(*arguments_of(verifier, task))
    except BaseException as error:
        leaving = isinstance(error, MemoryError)
        result = VerifierResult("error", detail={"error": describe(error)})
    return {"id": task["id"], **vars(result), "leaving": leaving}


def arguments_of(verifier: Verifier, task: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the verifier's function is called with."""
    if not verifier.takes_sample:
        return task["response"], task["answer"]
    return (RewardSample(response=task["response"], answer=task["answer"], **task["sample"]),)


def _validate(verifier: Verifier, answer: str) -> VerifierResult:
    problem = verifier.gold_problem(answer)
    return VerifierResult("correct") if problem is None else VerifierResult("wrong", detail={"problem": problem})


def _measure_repetition(token_ids: str) -> VerifierResult:
    """Measure the repetition of token ids, int32 in base64."""
    # Here, so that a worker that only verifies starts without numpy.
    from megatron_dapo.rewards.repetition import repetition_numbers

    numbers = repetition_numbers(memoryview(base64.b64decode(token_ids)).cast("i"))
    return VerifierResult("correct", detail={"repetition": numbers})


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol off file descriptors 0 and 1, and point those to /dev/null."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return requests, replies


def _limit_resources(memory_limit_mb: int, file_limit_mb: int) -> None:
    """Set limits for this process and each of its children."""
    for limited, megabytes in ((resource.RLIMIT_AS, memory_limit_mb), (resource.RLIMIT_FSIZE, file_limit_mb)):
        wanted, hard = megabytes * 2**20, resource.getrlimit(limited)[1]
        # A limit that the site has set lower stands: only root may raise it.
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limited, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file for every answer that crashes


def _limit_cpu_time(seconds: float) -> None:
    """Let the kernel end this process, or a child of it that the supervisor lost, after so much more work of its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + _THREADS * seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _send(replies: BinaryIO, message: Mapping[str, Any]) -> None:
    replies.write(json.dumps(message, allow_nan=False).encode() + b"\n")
    replies.flush()


def describe(error: BaseException) -> str:
    message = "memory limit reached" if isinstance(error, MemoryError) else str(error)
    return f"{type(error).__name__}: {message}"[:MAX_MESSAGE_CHARACTERS]


if __name__ == "__main__":
    main()
