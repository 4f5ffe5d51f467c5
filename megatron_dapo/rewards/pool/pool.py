"""A pool of killable verifier processes with a hard deadline per answer.

    score_many / submit                             any thread
            |  tasks, one queue a call
       dispatcher thread  -- round robin over calls, JSON lines -->  worker processes (`rewards.pool.worker`)
            |  <-- one JSON line per answer -- kill and replace on deadline, crash, memory
        Future of {key: Score}

Verifiers run model output through parsers and computer algebra: some inputs never return, exhaust memory or end the
process. Each answer therefore has a deadline that starts when its worker begins it, not while it is queued, and a
worker that misses it is killed by the kernel and replaced. `timeout` and `error` are separate outcomes: neither is
`wrong`. An answer whose worker was killed from outside (the kernel's out-of-memory killer) is scored again, three times
in all; then its score is lost, and its group is not trained.
Workers see a short allow-list of environment variables, so no secrets.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.pool.dispatcher import MODEL_STARTUP_SECONDS, STARTUP_SECONDS, Dispatcher
from megatron_dapo.rewards.pool.repetition import repetition_numbers
from megatron_dapo.rewards.pool.verifier_process import Job, ScoringTask
from megatron_dapo.rewards.verifiers.verifier import PRESETS, SET_PRESETS
from megatron_dapo.types import Completion, Outcome, Prompt, Repetition, Score
from megatron_dapo.workers.process import worker_environment

logger = logging.getLogger(__name__)


class ScoreRequest(NamedTuple):
    """One response to be scored."""

    key: Hashable  # its score's
    response: str
    answer: str  # gold
    is_truncated: bool
    sample: Mapping[str, Any] | None = None  # the other fields of a RewardSample, if the scorer has `takes_sample`


MODEL_ENVIRONMENT = ["CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE"]  # passed to reward_model


class Scorer(Protocol):
    """Anything that scores responses, usually a pool of verifier processes."""

    def score_many(self, items: Iterable[ScoreRequest]) -> Mapping[Hashable, Score]:
        """Return the scores by key. Blocks until all are there."""


def score_request(key: str, prompt: Prompt, completion: Completion, text: str, scorer: Scorer) -> ScoreRequest:
    """Return a response in the form that the scorer takes; `key` ends in "/" and the response's index in its group."""
    request = ScoreRequest(key, text, prompt.answer, completion.is_truncated)
    if getattr(scorer, "takes_episode", False):
        return request._replace(sample={"episode": completion.episode})
    if not getattr(scorer, "takes_sample", False):
        return request
    wants_tokens = getattr(scorer, "takes_token_ids", False)
    fields = {
        "token_ids": base64.b64encode(completion.sampled.token_ids.tobytes()).decode() if wants_tokens else None,
        "messages": [dict(message) for message in prompt.messages],
        "data_source": prompt.data_source,
        "extra_info": dict(prompt.extra),
        "finish_reason": completion.finish_reason,
        "group_index": int(key.rpartition("/")[2]),
    }
    return request._replace(sample=fields)


class VerifierPool:
    """Scores responses in reward.num_workers processes, each answer within reward.timeout_seconds.

    Args:
        verifier: its name, see `rewards.verifiers.verifier`; not necessarily that of `reward`, whose shadow or mixture may name it.
        reward: limits of the processes, settings of presets, and rewards of verifiers that do not set their own. A response that is
            truncated, times out or fails gets reward.incorrect, whatever the verifier.

    Raises ValueError if the verifier cannot be loaded. Close it, or use it as a context manager.
    """

    def __init__(self, verifier: str, reward: RewardConfig) -> None:
        # The process runs this package's code on a model of any size; its libraries map far more memory than they use.
        loads_model = verifier == "reward_model"
        # Each process gets the settings and the key of its preset only.
        preset = getattr(reward, verifier).model_dump(mode="json") if verifier in SET_PRESETS else {}
        variables = [*reward.environment, *filter(None, [preset.get("key_variable")])]
        if absent := [name for name in variables if name not in os.environ]:
            logger.warning(
                "%s: not set in this shell, so that verifier %s does not get it (reward.environment, key_variable)",
                ", ".join(dict.fromkeys(absent)),
                verifier,
            )
        variables += MODEL_ENVIRONMENT if loads_model else []
        self.verifier = verifier
        self._reward_correct, self._reward_incorrect = reward.correct, reward.incorrect
        self._tail = PRESETS.get(verifier)
        self._task_ids = itertools.count()
        self._dispatcher = Dispatcher(
            settings={
                "verifier": verifier,
                "timeout_s": reward.timeout_seconds,
                "memory_limit_mb": 0 if loads_model else reward.memory_limit_mb,
                "file_limit_mb": reward.file_limit_mb,
                "max_processes": reward.max_processes,
                "concurrency": reward.concurrency,
                "batch_size": reward.batch_size,
                "startup_s": MODEL_STARTUP_SECONDS if loads_model else STARTUP_SECONDS,
                "preset": preset,
            },
            environment=worker_environment(os.environ, variables),
            num_workers=reward.num_workers,
        )
        try:
            started = self._dispatcher.started.result()
        except BaseException:
            self.close()
            raise
        self.version = str(started["ready"])
        self.takes_sample = bool(started.get("takes_sample"))  # a user's function of one parameter
        self.takes_token_ids = self.takes_sample and reward.token_ids
        logger.debug("verifier %s", self.version)

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
        return self._enqueue(tasks, lambda key, reply: self._score_of_reply(reply, key in cut_off), {**order, **known})

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

    @property
    def counts(self) -> Mapping[str, int]:
        """Processes since the pool was opened: started, killed (a missed deadline), crashed (an unexpected exit)."""
        return self._dispatcher.counts

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
    ) -> ScoringTask:
        task_id = next(self._task_ids)
        message = {"id": task_id, "operation": operation, "response": response, "answer": answer}
        message |= {"sample": sample} if sample is not None and self.takes_sample else {}
        return ScoringTask(task_id, key, json.dumps(message).encode() + b"\n")

    def _enqueue(
        self,
        tasks: Sequence[ScoringTask],
        convert: Callable[[Hashable, Mapping[str, Any]], Any],
        results: dict[Hashable, Any],
    ) -> Future[dict[Hashable, Any]]:
        job = Job(deque(tasks), convert, results, num_open=len(tasks))
        job.future.set_running_or_notify_cancel()  # It cannot be cancelled from here on.
        for task in tasks:
            task.job = job
        if tasks:
            self._dispatcher.submit(job)
        else:
            job.future.set_result(results)
        return job.future

    def _score_of_reply(self, reply: Mapping[str, Any], is_truncated: bool) -> Score:
        is_correct = reply["outcome"] == "correct" and not is_truncated
        default = self._reward_correct if is_correct else self._reward_incorrect
        reward = default if reply["reward"] is None else float(reply["reward"])
        outcome: Outcome = (
            "truncated" if is_truncated and reply["outcome"] in ("correct", "wrong") else reply["outcome"]
        )
        return Score(float(is_correct), reward, outcome, reply["extracted"], reply["detail"])


def _problem_of_reply(reply: Mapping[str, Any]) -> str | None:
    if reply["outcome"] == "correct":
        return None
    detail = reply["detail"]
    return detail.get("problem") or detail.get("error") or f"verifier outcome {reply['outcome']}"
