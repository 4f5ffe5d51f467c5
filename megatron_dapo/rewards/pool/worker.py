"""The verifier process: reads tasks as JSON lines and writes one JSON line per answer. Only `VerifierPool` starts it.

    parent -> worker   {"verifier": ..., "preset": ...,  "timeout_s": ..., limits}             once
    worker -> parent   {"ready": version, "takes_sample": bool, "is_async": bool, "is_batched": bool}
                       or {"failed": message}                                                  once
    parent -> worker   {"id": n, "operation": "score" | "validate" | "repetition", "response": ...,
                        "answer": ..., "sample": the other fields of a RewardSample or null}
    worker -> parent   {"id": n, "outcome": ..., "extracted": ..., "reward": ..., "detail": ..., "leaving": bool}

Replies come in the order of the tasks. An asynchronous function works on all tasks it was sent at the same time, a
function of `samples` on up to `batch_size` of them in one call.

Messages are JSON, never pickles. Before it loads the verifier, the process limits its memory, files and processes. It
keeps the pipes away from a user's `print` and `input`, and has time limits that the kernel enforces even if the parent
is gone.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import resource
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any

from megatron_dapo.rewards.result import RewardSample, VerifierResult
from megatron_dapo.rewards.verifiers.verifier import Verifier, fix_of, load_verifier, results_of
from megatron_dapo.workers.pipes import MAX_MESSAGE_CHARACTERS, claim_pipes, describe, limit_resources, send
from megatron_dapo.workers.supervisor import start_supervised

OUT_OF_MEMORY = 71  # exit code of a worker in which a whole batch met a MemoryError
BATCH_WAIT_S = 0.01
_ROW_CHARACTERS = 60  # The message of a failed call cuts prompt and answer to this length.
_PACKAGE = str(Path(__file__).resolve().parents[2])
_THREADS = 4  # threads that may work on one answer all the time until the last resort


def main() -> None:
    """Serve tasks until the parent closes the pipe."""
    # Slurm signals every process of a job; an answer cut off by that would be an error not caused by the response.
    # Use a handler, not SIG_IGN, which programs started by a user's function would inherit.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    requests, replies = claim_pipes()
    settings = json.loads(requests.readline())
    start_supervised(settings["max_processes"])
    process_id = os.getpid()
    limit_resources(settings["memory_limit_mb"], settings["file_limit_mb"])
    # Later than the parent's own deadline: it matters only if the parent has died.
    last_resort_s = 2 * settings["timeout_s"] + 5
    try:
        verifier = load_verifier(settings["verifier"], settings)
    except BaseException as error:
        send(replies, {"failed": describe(error)})
        return
    is_async = verifier.score_later is not None
    kinds = {"takes_sample": verifier.takes_sample, "is_async": is_async, "is_batched": verifier.is_batched}
    send(replies, {"ready": verifier.version, **kinds})
    if is_async:
        # Imported here, so that workers of other verifiers start without asyncio.
        from megatron_dapo.rewards.pool.async_worker import serve_many

        size = settings["batch_size"] if verifier.is_batched else 0
        serve_many(
            verifier, io.BufferedReader(requests), lambda reply: send(replies, reply), settings["timeout_s"], size
        )
        return
    for tasks in _batches(requests, settings["batch_size"] if verifier.is_batched else 1):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a user's function may have set another handler
        signal.setitimer(signal.ITIMER_REAL, last_resort_s)
        _limit_cpu_time(last_resort_s)
        answers = [answer(verifier, tasks[0])] if len(tasks) == 1 else answer_batch(verifier, tasks)
        if os.getpid() != process_id:
            os._exit(0)  # a fork of the user's function came back here: only the process itself may reply
        signal.setitimer(signal.ITIMER_REAL, 0)
        for reply in answers:
            send(replies, reply)
            if reply["leaving"]:
                return


def _batches(requests: io.FileIO, size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield tasks: those to score in batches of up to `size` that arrive within BATCH_WAIT_S, others one at a time."""
    waiting: list[dict[str, Any]] = []
    unread, is_open = b"", True
    while is_open or waiting:
        while is_open and not (waiting and (waiting[0]["operation"] != "score" or len(waiting) >= size)):
            if waiting and not select.select([requests], [], [], BATCH_WAIT_S)[0]:
                break
            chunk = os.read(requests.fileno(), 2**20)
            is_open = bool(chunk)
            *lines, unread = (unread + chunk).split(b"\n")
            waiting += map(json.loads, lines)
        num = min(1, len(waiting))
        while num < min(size, len(waiting)) and waiting[0]["operation"] == waiting[num]["operation"] == "score":
            num += 1
        batch, waiting = waiting[:num], waiting[num:]
        if batch:
            yield batch


def answer(verifier: Verifier, task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to one task. An exception gives the outcome `error`; a MemoryError also ends this process."""
    leaving = False
    try:
        if task["operation"] == "validate":
            result = _validate(verifier, task["answer"])
        elif task["operation"] == "repetition":
            result = _measure_repetition(task["response"])
        else:
            arguments = arguments_of(verifier, task)
            is_batched = verifier.is_batched
            result = results_of(verifier.score(list(arguments)), 1)[0] if is_batched else verifier.score(*arguments)
    except BaseException as error:
        leaving = isinstance(error, MemoryError)
        result = VerifierResult("error", detail={"error": describe_call(error, verifier, [task])})
    return {"id": task["id"], **vars(result), "leaving": leaving}


def answer_batch(verifier: Verifier, tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the replies to several tasks of one call. An exception is the `error` of all of them."""
    try:
        results = results_of(verifier.score([arguments_of(verifier, task)[0] for task in tasks]), len(tasks))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # one of them may be to blame: the pool has them scored one by one
    except BaseException as error:
        results = [VerifierResult("error", detail={"error": describe_call(error, verifier, tasks)})] * len(tasks)
    return [{"id": task["id"], **vars(result), "leaving": False} for task, result in zip(tasks, results, strict=True)]


def arguments_of(verifier: Verifier, task: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the argument for the verifier's function or, for a function of batches, one element of its list."""
    if not verifier.takes_sample:
        return task["response"], task["answer"]
    fields = dict(task["sample"])
    if (encoded := fields.pop("token_ids", None)) is not None:
        fields["requested_token_ids"] = tuple(memoryview(base64.b64decode(encoded)).cast("i"))
    return (RewardSample(response=task["response"], answer=task["answer"], **fields),)


def _validate(verifier: Verifier, answer: str) -> VerifierResult:
    problem = verifier.gold_problem(answer)
    return VerifierResult("correct") if problem is None else VerifierResult("wrong", detail={"problem": problem})


def _measure_repetition(token_ids: str) -> VerifierResult:
    """Measure the repetition of token ids, int32 in base64."""
    # Imported here, so that a worker that only verifies starts without numpy.
    from megatron_dapo.rewards.pool.repetition import repetition_numbers

    numbers = repetition_numbers(memoryview(base64.b64decode(token_ids)).cast("i"))
    return VerifierResult("correct", detail={"repetition": numbers})


def _limit_cpu_time(seconds: float) -> None:
    """Let the kernel end this process, or a child of it that the supervisor lost, after so much more work of its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + _THREADS * seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def describe_call(error: BaseException, verifier: Verifier, tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return what a call has raised; of a user's function also its name, the line of its file, the row and what mends it."""
    text = describe(error)
    if ":" not in verifier.name or isinstance(error, MemoryError):
        return text
    place, _, function = verifier.name.rpartition(":")
    line = _line_of_user(error.__traceback__)
    parts = [f"{text} in {function} ({PurePath(place).name}{f', line {line}' if line else ''})", _row_of(tasks)]
    if fix := fix_of(error) or _fix_of_column(error, tasks):
        parts.append(fix)
    return "; ".join(parts)[:MAX_MESSAGE_CHARACTERS]


def _line_of_user(traceback: TracebackType | None) -> int:
    """Return the last line of the user's file that a traceback passes, 0 if it passes none."""
    file, line = "", 0
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and file in ("", name):
            file, line = name, traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def _row_of(tasks: Sequence[Mapping[str, Any]]) -> str:
    task = tasks[0]
    messages = (task.get("sample") or {}).get("messages") or [{"content": ""}]
    prompt = " ".join(messages[-1]["content"].split())[-_ROW_CHARACTERS:]
    row = (f"prompt ...{prompt!r}, " if prompt else "") + f"answer {task['answer'][:_ROW_CHARACTERS]!r}"
    return f"row: {row}" if len(tasks) == 1 else f"a batch of {len(tasks)} rows, the first with {row}"


def _fix_of_column(error: BaseException, tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return the columns of the first row that lacks the one that a function has read; "" if none lacks it."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    rows = [task["sample"]["extra_info"] for task in tasks if task.get("sample")]
    if not isinstance(name, str) or not (lacking := [row for row in rows if name not in row]):
        return ""
    return f"sample.extra_info of this row has {', '.join(sorted(lacking[0])) or 'nothing'}: use .get({name!r}), or add the column"


if __name__ == "__main__":
    main()
