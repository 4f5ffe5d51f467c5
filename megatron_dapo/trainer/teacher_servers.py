"""Teachers that are stock SGLang servers: their log-probs of the sampled tokens, which rank 0 requests as groups are complete.

A server of the policy's tokenizer scores prompt and response in one prefill; nothing is generated and nothing is tokenized.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from megatron_dapo.config.distillation_schema import DistillationConfig, TeacherConfig
from megatron_dapo.data.teacher_prompts import TeacherPrompts
from megatron_dapo.engines.sglang.client import EngineAnswerError, EngineError, EngineHttpError, SglangClient
from megatron_dapo.trainer.batch_header import numbers_of, sequences_of
from megatron_dapo.types import Group, ScoredSample

logger = logging.getLogger(__name__)

_IN_FLIGHT = 32  # requests to each server
_NUM_TRIES = 4
_NUM_PROBED = 64  # words whose texts are compared at the start

_Sequence = tuple[Group, ScoredSample, int]  # see `batch_header.sequences_of`
Sequences = Sequence[_Sequence]
_Key = tuple[str, str, int]  # teacher, sample, segment


class TeacherServers:
    """The servers of a run's teachers, on rank 0."""

    def __init__(self, section: DistillationConfig, prompts: TeacherPrompts) -> None:
        self._prompts = prompts
        self._clients = [(teacher, SglangClient(teacher.url, None, name=f"teacher {teacher.name}")) for teacher in section.servers]
        self._executors = {teacher.name: ThreadPoolExecutor(_IN_FLIGHT) for teacher in section.servers}
        self._begun: dict[_Key, Future[np.ndarray]] = {}  # requests for groups that are in no batch yet
        self.taught: dict[str, tuple[float, int]] = {}  # sum of log pi - log pi_teacher and tokens of the last batch, by name

    def close(self) -> None:
        """Drop what was not asked yet."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def begin(self, group: Group) -> None:
        """Ask about the responses of a complete group, while others are still generated."""
        for sequence in sequences_of([group]):
            for teacher, client in self._clients:
                if _teaches(teacher, group):
                    self._begun[_key(teacher, sequence)] = self._ask(teacher, client, sequence)
        # A group may be dropped as too old, and is then in no batch.
        keys = [_key(teacher, sequence) for teacher, _ in self._clients for sequence in sequences_of([group])]
        weakref.finalize(group, _forget, self._begun, keys)

    def check_tokens(self, tokenizer: Any) -> None:
        """Raise ValueError if a server's words are not the tokenizer's. EngineError if a server does not answer."""
        # Not the highest id, which SGLang shows as 0 if the model's vocabulary ends with it.
        last = len(tokenizer) - 2
        words = sorted({round(index * last / (_NUM_PROBED - 1)) for index in range(_NUM_PROBED)})
        ours = [tokenizer.decode([word]) for word in words]
        for teacher, client in self._clients:
            try:
                theirs = client.token_texts(words)
            except EngineHttpError as error:
                raise ValueError(
                    f"distillation.teachers: {teacher.name} at {client.url} does not take the policy's token ids: {error}"
                ) from None
            if different := [word for word, one, other in zip(words, ours, theirs, strict=True) if one != other]:
                raise ValueError(
                    f"distillation.teachers: {teacher.name} at {client.url} has another tokenizer than the policy: "
                    f"{len(different)} of {len(words)} ids stand for other words, such as {different[0]}; serve a model with the "
                    "policy's tokenizer"
                )

    def gains(self, sequences: Sequences) -> dict[int, np.ndarray]:
        """Return the weighted sum of log pi_teacher - log pi, [R] float32, of each sequence that a server teaches, by its index.

        Raises EngineError if a server does not answer after several tries.
        """
        found: dict[int, np.ndarray] = {}
        self.taught = {}
        for teacher, client in self._clients:
            own = [index for index, (group, _, _) in enumerate(sequences) if _teaches(teacher, group)]
            gains = [future.result() for future in [self._asked_of(teacher, client, sequences[index]) for index in own]]
            for index, gain in zip(own, gains, strict=True):
                found[index] = found.get(index, 0.0) + np.float32(teacher.weight) * gain
            total = sum(float(gain.sum(dtype=np.float64)) for gain in gains)
            self.taught[teacher.name] = (-total, sum(gain.size for gain in gains))
        return found

    def _asked_of(self, teacher: TeacherConfig, client: SglangClient, sequence: _Sequence) -> Future[np.ndarray]:
        """Return what `begin` asked, or ask now, as for a group of a checkpoint."""
        key = _key(teacher, sequence)
        return self._begun.pop(key) if key in self._begun else self._ask(teacher, client, sequence)

    def _ask(self, teacher: TeacherConfig, client: SglangClient, sequence: _Sequence) -> Future[np.ndarray]:
        return self._executors[teacher.name].submit(self._gain, teacher, client, sequence)

    def _gain(self, teacher: TeacherConfig, client: SglangClient, sequence: _Sequence) -> np.ndarray:
        """Return log pi_teacher - log pi of a sequence's response tokens, [R] float32; 0 for those that were not sampled."""
        group, sample, segment = sequence
        numbers = numbers_of(group, sample, segment)
        tokens, rollout = numbers["tokens"].tolist(), numbers["rollout_logprobs"].numpy()
        if teacher.prompt:
            tokens = [*self._prompts.of(teacher, group.prompt), *tokens[len(tokens) - len(rollout) :]]
        gain = np.array(_asked(client, tokens)[len(tokens) - 1 - len(rollout) :], np.float32) - rollout
        for run in sample.completion.stream(segment).runs:
            if not run.is_sampled:
                gain[run.start : run.end] = 0.0
        return gain


def _teaches(teacher: TeacherConfig, group: Group) -> bool:
    return not teacher.sources or group.prompt.source_name in teacher.sources


def _key(teacher: TeacherConfig, sequence: _Sequence) -> _Key:
    _, sample, segment = sequence
    return teacher.name, sample.sample_id, segment


def _forget(begun: dict[_Key, Future[np.ndarray]], keys: Sequence[_Key]) -> None:
    for key in keys:
        begun.pop(key, None)


def _asked(client: SglangClient, tokens: list[int]) -> list[float]:
    for attempt in range(1, _NUM_TRIES + 1):
        try:
            return client.prompt_logprobs(tokens)
        except (EngineAnswerError, EngineHttpError):
            raise  # it would answer the same again
        except EngineError as error:
            if attempt == _NUM_TRIES:
                raise
            logger.warning("%s: asked again (%d of %d): %s", client.name, attempt, _NUM_TRIES - 1, error)
    raise AssertionError("the last try returns or raises")
