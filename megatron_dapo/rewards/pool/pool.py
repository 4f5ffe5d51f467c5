"""A pool of killable verifier processes with a hard deadline per answer.

    score_many / submit                             any thread
            |  tasks, one queue a call
       dispatcher thread  -- round robin over calls, JSON lines -->  worker processes (`rewards.pool.worker`)
            |  <-- one JSON line per answer -- kill and replace on deadline, crash, memory
        Future of {key: Score}

Verifiers run model output through parsers and computer algebra: some inputs never return, exhaust memory or end the
process. Each answer therefore has a deadline that starts when its worker begins it, not while it is queued, and a
worker that misses it is killed by the kernel and replaced. `timeout` and `error` are separate outcomes: neither is
`wrong`. An answer whose worker was killed from outside (the kernel's out-of-memory killer) is scored again, once.
Workers see a short allow-list of environment variables, so no secrets.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_dapo.rewards.pool.dispatcher import MODEL_STARTUP_SECONDS, STARTUP_SECONDS, Dispatcher
from megatron_dapo.rewards.pool.repetition import repetition_numbers
from megatron_dapo.rewards.pool.verifier_process import Job, Task, worker_environment
from megatron_dapo.rewards.verifiers.verifier import PRESETS
from megatron_dapo.types import Completion, Outcome, Prompt, Repetition, Score


class ScoreRequest(NamedTuple):
    """One response to be scored."""

    key: Hashable  # its score's
    response: str
    answer: str  # gold
    is_truncated: bool
    sample: Mapping[str, Any] | None = None  # the other fields of a RewardSample, if the scorer has `takes_sample`


# math-verify with sympy needs about 100 MB of address space; importing torch in a user's function needs some 8 GB.
DEFAULT_MEMORY_LIMIT_MB = 1024


class Scorer(Protocol):
    """Anything that scores responses, usually a pool of verifier processes."""

    def score_many(self, items: Iterable[ScoreRequest]) -> Mapping[Hashable, Score]:
        """Return the scores by key. Blocks until all are there."""


def score_request(key: str, prompt: Prompt, completion: Completion, text: str, scorer: Scorer) -> ScoreRequest:
    """Return a response in the form that the scorer takes; `key` ends in "/" and the response's index in its group."""
    request = ScoreRequest(key, text, prompt.answer, completion.is_truncated)
    if not getattr(scorer, "takes_sample", False):
        return request
    wants_tokens = getattr(scorer, "takes_token_ids", False)
    fields = {
        "token_ids": base64.b64encode(completion.token_ids.tobytes()).decode() if wants_tokens else None,
        "messages": [dict(message) for message in prompt.messages],
        "data_source": prompt.data_source,
        "extra_info": dict(prompt.extra),
        "finish_reason": completion.finish_reason,
        "group_index": int(key.rpartition("/")[2]),
    }
    return request._replace(sample=fields)


@dataclass(frozen=True)
class PoolStatistics:
    """Counts since the pool was opened. `num_killed` counts missed deadlines, `num_crashed` unexpected exits."""

    outcomes: Mapping[str, int]
    num_killed: int
    num_crashed: int
    num_started: int


class VerifierPool:
    """Scores responses in `num_workers` processes, each answer within `timeout_s` seconds.

    Args:
        verifier: "dapo", "lenient" or "package.module:function" (see `rewards.verifiers.verifier`).
        timeout_s: seconds one answer may take before its process is killed.
        memory_limit_mb: address space of one process; raise it for a user's function that imports torch.
        file_limit_mb: size of a file that a process may write.
        max_processes: limit on a worker and all processes it has started; beyond it they are killed, an `error`.
        reward_correct, reward_incorrect: rewards of verifiers that do not set their own. A response that is
            truncated, times out or fails gets `reward_incorrect`, whatever the verifier.
        more_environment: names of variables that the processes get in addition to the allow-list.
        concurrency: answers at a time in each process of a user's `async def`.
        batch_size: maximum number of answers in one call of a function of `samples`.
        token_ids: send the tokens of responses to functions of samples.
        presets: settings of presets by their names, as plain values.

    Raises ValueError if the verifier cannot be loaded. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        verifier: str,
        num_workers: int = 2,
        timeout_s: float = 10.0,
        memory_limit_mb: int = DEFAULT_MEMORY_LIMIT_MB,
        file_limit_mb: int = 256,
        max_processes: int = 64,
        reward_correct: float = 1.0,
        reward_incorrect: float = -1.0,
        more_environment: Sequence[str] = (),
        concurrency: int = 64,
        batch_size: int = 16,
        token_ids: bool = False,
        presets: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        counts = num_workers, memory_limit_mb, file_limit_mb, max_processes, concurrency, batch_size
        if timeout_s <= 0 or min(counts) < 1:
            raise ValueError(
                "a verifier pool needs timeout_s > 0 and num_workers, memory_limit_mb, file_limit_mb, max_processes, concurrency and "
                f"batch_size >= 1; got {timeout_s}, {', '.join(map(str, counts))}"
            )
        # The process runs this package's code on a model of any size; its libraries map far more memory than they use.
        loads_model = verifier == "reward_model"
        self.verifier = verifier
        self._reward_correct, self._reward_incorrect = reward_correct, reward_incorrect
        self._tail = PRESETS.get(verifier)
        self._task_ids = itertools.count()
        self._lock = threading.Lock()  # guards _outcomes, which callers share
        self._outcomes: Counter[str] = Counter()
        self._dispatcher = Dispatcher(
            settings={
                "verifier": verifier,
                "timeout_s": timeout_s,
                "memory_limit_mb": 0 if loads_model else memory_limit_mb,
                "file_limit_mb": file_limit_mb,
                "max_processes": max_processes,
                "concurrency": concurrency,
                "batch_size": batch_size,
                "startup_s": MODEL_STARTUP_SECONDS if loads_model else STARTUP_SECONDS,
                "presets": {name: dict(values) for name, values in (presets or {}).items()},
            },
            environment=worker_environment(os.environ, more_environment),
            num_workers=num_workers,
        )
        try:
            started = self._dispatcher.started.result()
        except BaseException:
            self.close()
            raise
        self.version = str(started["ready"])
        self.takes_sample = bool(started.get("takes_sample"))  # a user's function of one parameter
        self.takes_token_ids = self.takes_sample and token_ids

    # ---- scoring

    def score_many(self, items: Iterable[ScoreRequest]) -> dict[Hashable, Score]:
        """Score every (key, response text, gold answer, is_truncated). Blocks; keys must be unique within a call."""
        return self.submit(items).result()

    def submit(self, items: Iterable[ScoreRequest]) -> Future[dict[Hashable, Score]]:
        """Start scoring and return at once. The future cannot be cancelled."""
        items = list(items)
        order = dict.fromkeys(key for key, *_ in items)
        if len(order) != len(items):
            raise ValueError(f"score_many: {len(items)} items have only {len(order)} different keys")
        # A response cut off by its length is never right, even if it contains the answer. Only a function of samples
        # may reward it freely.
        never_right = Score(accuracy=0.0, reward=self._reward_incorrect, outcome="truncated")
        cut_off = {key for key, _, _, is_truncated, *_ in items if is_truncated}
        known = {} if self.takes_sample else dict.fromkeys(cut_off, never_right)
        tasks = [
            self._task(key, "score", response if self._tail is None else response[-self._tail :], answer, *sample)
            for key, response, answer, _, *sample in items
            if key not in known
        ]
        scores = self._enqueue(
            tasks, lambda key, reply: self._score_of_reply(reply, key in cut_off), {**order, **known}
        )
        scores.add_done_callback(self._count)
        return scores

    def measure_repetition(self, token_ids: Mapping[str, np.ndarray]) -> dict[str, Repetition]:
        """Measure the repetition of responses, including truncated ones, in the workers. Blocks."""
        tasks = [
            self._task(key, "repetition", base64.b64encode(np.asarray(tokens, np.int32).tobytes()).decode(), "")
            for key, tokens in token_ids.items()
        ]
        found = self._enqueue(tasks, lambda _, reply: reply["detail"].get("repetition"), {}).result()
        # A worker that was killed has measured nothing.
        return {key: Repetition(*(found[key] or repetition_numbers(tokens))) for key, tokens in token_ids.items()}

    def validate_answers(self, answers: Iterable[str]) -> dict[str, str]:
        """Return the gold answers that no response could match, each with the reason."""
        tasks = [self._task(answer, "validate", "", answer) for answer in dict.fromkeys(answers)]
        problems = self._enqueue(tasks, lambda _, reply: _problem_of_reply(reply), {}).result()
        return {str(answer): problem for answer, problem in problems.items() if problem is not None}

    def statistics(self) -> PoolStatistics:
        """Return the counts so far."""
        with self._lock:
            outcomes = dict(self._outcomes)
        counts = self._dispatcher.counts
        return PoolStatistics(outcomes, counts["killed"], counts["crashed"], counts["started"])

    # ---- life

    def close(self) -> None:
        """Kill every worker. Calls still waiting get a RuntimeError."""
        self._dispatcher.stop()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- between callers and the dispatcher

    def _task(
        self, key: Hashable, operation: str, response: str, answer: str, sample: Mapping[str, Any] | None = None
    ) -> Task:
        task_id = next(self._task_ids)
        message = {"id": task_id, "operation": operation, "response": response, "answer": answer}
        message |= {"sample": sample} if sample is not None and self.takes_sample else {}
        return Task(task_id, key, json.dumps(message).encode() + b"\n")

    def _enqueue(
        self, tasks: Sequence[Task], convert: Callable[[Hashable, Mapping[str, Any]], Any], results: dict[Hashable, Any]
    ) -> Future[dict[Hashable, Any]]:
        job = Job(deque(tasks), convert, results, num_open=len(tasks))
        job.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        for task in tasks:
            task.job = job
        if tasks:
            self._dispatcher.submit(job)
        else:
            job.future.set_result(results)
        return job.future

    def _count(self, scores: Future[dict[Hashable, Score]]) -> None:
        if scores.exception() is None:
            with self._lock:
                self._outcomes.update(score.outcome for score in scores.result().values())

    def _score_of_reply(self, reply: Mapping[str, Any], is_truncated: bool) -> Score:
        is_correct = reply["outcome"] == "correct" and not is_truncated
        default = self._reward_correct if is_correct else self._reward_incorrect
        reward = default if reply["reward"] is None else float(reply["reward"])
        outcome: Outcome = "truncated" if is_truncated and reply["outcome"] in ("correct", "wrong") else reply["outcome"]
        return Score(float(is_correct), reward, outcome, reply["extracted"], reply["detail"])


def _problem_of_reply(reply: Mapping[str, Any]) -> str | None:
    if reply["outcome"] == "correct":
        return None
    detail = reply["detail"]
    return detail.get("problem") or detail.get("error") or f"verifier outcome {reply['outcome']}"
