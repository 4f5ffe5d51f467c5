"""Evaluation on any engine: sample n responses per problem, score them, estimate.

The result depends only on the protocol and the model. Every response has a separate seed, derived from the protocol's
seed, the problem and the sample number, so neither the order of the problems nor the engine's batching matters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dapo.engines.base import RolloutEngine
from megatron_dapo.evaluation.estimators import ProblemRecord, estimate_metrics, response_rates
from megatron_dapo.evaluation.protocol import EvaluationProtocol, EvaluationResult
from megatron_dapo.rewards.pool.pool import Scorer, score_request
from megatron_dapo.types import Completion, GenerationRequest, Prompt, Score, ScoredSample, num_distinct

Decode = Callable[[Any], str]  # token ids -> text, special tokens left out
CheckStop = Callable[[], None]  # called between polls; what it raises ends the evaluation
KeepSamples = Callable[[Sequence["Problem"], Sequence[Sequence[ScoredSample]]], None]


@dataclass(frozen=True)
class Problem:
    """A prompt to evaluate, and the number of rows of the file that hold it."""

    prompt: Prompt
    num_rows: int


@dataclass(frozen=True)
class EvaluationProgress:
    """Progress of an evaluation, reported after every poll that finished a response."""

    num_finished: int
    num_total: int
    num_tokens: int  # response tokens of the finished ones


ReportProgress = Callable[[EvaluationProgress], None]


def unique_problems(prompts: Sequence[Prompt]) -> tuple[Problem, ...]:
    """Return the distinct problems (token ids, answer, an episode's task), in the order of first appearance.

    Published evaluation files repeat each problem: AIME's holds 30 problems 32 times. Raises ValueError if two
    different problems have one prompt_id.
    """
    first: dict[tuple[Any, ...], Prompt] = {}
    rows: dict[tuple[Any, ...], int] = {}
    for prompt in prompts:
        key = (prompt.token_ids, prompt.answer, json.dumps(prompt.task, sort_keys=True, default=str))
        first.setdefault(key, prompt)
        rows[key] = rows.get(key, 0) + 1
    if not first:
        raise ValueError("an evaluation needs at least one prompt")
    ids = [prompt.prompt_id for prompt in first.values()]
    repeated = {name for name in ids if ids.count(name) > 1} if len(set(ids)) < len(ids) else set()
    if repeated:
        raise ValueError(
            f"{len(repeated)} prompt_ids stand for different problems, e.g. {min(repeated)!r}; make them unique"
        )
    return tuple(Problem(prompt, rows[key]) for key, prompt in first.items())


def evaluation_seed(seed: int, prompt_id: str, sample: int) -> int:
    """Return the 63-bit seed of one response, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{prompt_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch's generators take signed 64-bit seeds


def build_requests(problems: Sequence[Problem], protocol: EvaluationProtocol) -> dict[str, GenerationRequest]:
    """Return the requests by id, all samples of the first problem first."""
    requests = {}
    for number, problem in enumerate(problems):
        for sample in range(protocol.num_samples):
            name = request_name(number, sample)
            seed = evaluation_seed(protocol.seed, problem.prompt.prompt_id, sample)
            requests[name] = GenerationRequest(
                name, problem.prompt.token_ids, protocol.sampling, seed, task=problem.prompt.task
            )
    return requests


def request_name(problem_number: int, sample: int) -> str:
    """Return the id of a response within one evaluation."""
    return f"evaluation/{problem_number}/{sample}"


def generate(
    requests: Mapping[str, GenerationRequest],
    engine: RolloutEngine,
    progress: ReportProgress = lambda report: None,
    max_in_flight: int = 1024,
    check_stop: CheckStop = lambda: None,
) -> dict[str, Completion]:
    """Drive the engine until every request has its completion, at most `max_in_flight` of them submitted at a time.

    Raises RuntimeError if the engine returns a response that was not requested, stops short or aborts, and what
    `check_stop` raises, which is called before every poll. On any error the unfinished requests are aborted, so that the engine can be used again.
    """
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight {max_in_flight} must be at least 1")
    if engine.num_unfinished:
        raise ValueError(
            f"the engine still has {engine.num_unfinished} unfinished requests; abort or finish them before evaluating"
        )
    waiting = list(reversed(list(requests.values())))  # pop takes from the end
    done: dict[str, Completion] = {}
    num_tokens = 0
    try:
        while len(done) < len(requests):
            check_stop()
            room = min(max_in_flight - engine.num_unfinished, len(waiting))
            if room > 0:
                engine.submit([waiting.pop() for _ in range(room)])
            # An engine that had nothing to do and returned nothing will never return the missing responses.
            stalled = engine.num_unfinished == 0
            finished = engine.poll()
            if stalled and not finished:
                num_missing = len(requests) - len(done)
                raise RuntimeError(f"the engine is idle, but {num_missing} of {len(requests)} responses are missing")
            for completion in finished:
                _accept(completion, requests, done)
                num_tokens += completion.num_sampled
            if finished:
                progress(EvaluationProgress(len(done), len(requests), num_tokens))
    finally:
        if engine.num_unfinished:
            engine.abort()
    return done


def _accept(completion: Completion, requests: Mapping[str, GenerationRequest], done: dict[str, Completion]) -> None:
    name = completion.request_id
    if name not in requests or name in done:
        raise RuntimeError(f"the engine returned {name!r}, which is not an open request of this evaluation")
    if completion.finish_reason == "abort":
        raise RuntimeError(
            f"the engine aborted {name!r}; a score without it would be of another benchmark: evaluate again"
        )
    if completion.episode is not None and completion.episode.end == "lost":
        raise RuntimeError(
            f"the environment of {name!r} was lost: {completion.episode.lost}; a score without it would be of another "
            "benchmark: mend the environment and evaluate again"
        )
    done[name] = completion


def evaluate(
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    scorer: Scorer,
    decode: Decode,
    protocol: EvaluationProtocol,
    *,
    progress: ReportProgress = lambda report: None,
    max_in_flight: int = 1024,
    check_stop: CheckStop = lambda: None,
    keep: KeepSamples = lambda problems, samples: None,
) -> EvaluationResult:
    """Sample, score and estimate by `protocol`. `keep` gets the problems and, of each, the scored responses.

    `scorer` gets every response in one call; `decode` turns response token ids into the text it reads. A truncated
    response is never correct, whatever the scorer returns. The result's `num_problems` is the number of distinct
    problems in `prompts`. An error of `check_stop`, called before every poll of the engine, ends the evaluation.
    """
    options = {"progress": progress, "max_in_flight": max_in_flight, "check_stop": check_stop}
    problems, samples = sample_and_score(prompts, engine, scorer, decode, protocol, **options)
    keep(problems, samples)
    records = tuple(_record(problem, row) for problem, row in zip(problems, samples))
    rates = {**response_rates(records), "duplicate_rate": _duplicate_rate(samples)}
    return EvaluationResult(
        protocol=replace(protocol, num_problems=len(problems)),
        metrics=estimate_metrics(records),
        rates=rates,
        problems=records,
    )


def sample_and_score(
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    scorer: Scorer,
    decode: Decode,
    protocol: EvaluationProtocol,
    **options: Any,
) -> tuple[tuple[Problem, ...], list[list[ScoredSample]]]:
    """Return the distinct problems, and the scored responses to each; `options` are those of `generate`."""
    problems = unique_problems(prompts)
    requests = build_requests(problems, protocol)
    completions = generate(requests, engine, **options)
    texts = {name: decode(completion.last_turn) for name, completion in completions.items()}
    return problems, _score(problems, protocol.num_samples, completions, texts, scorer)


def _score(
    problems: Sequence[Problem],
    num_samples: int,
    completions: Mapping[str, Completion],
    texts: Mapping[str, str],
    scorer: Scorer,
) -> list[list[ScoredSample]]:
    """Return the scored samples, a row per problem."""
    names = [[request_name(number, sample) for sample in range(num_samples)] for number in range(len(problems))]
    scores = scorer.score_many(
        [
            score_request(name, problem.prompt, completions[name], texts[name], scorer)
            for problem, row in zip(problems, names)
            for name in row
        ]
    )
    missing = [name for name in texts if name not in scores]
    if missing:
        raise RuntimeError(f"the scorer left out {len(missing)} of {len(texts)} responses, e.g. {missing[0]!r}")
    return [[_sample(name, completions[name], texts[name], scores[name]) for name in row] for row in names]


def _sample(name: str, completion: Completion, text: str, score: Score) -> ScoredSample:
    if completion.is_truncated and score.accuracy > 0:
        score = replace(score, accuracy=0.0, outcome="truncated")
    return ScoredSample(name, completion, text, score, {"verifier": score.reward})


def _record(problem: Problem, row: Sequence[ScoredSample]) -> ProblemRecord:
    return ProblemRecord(
        problem_id=problem.prompt.prompt_id,
        answer=problem.prompt.answer,
        num_rows=problem.num_rows,
        accuracies=tuple(sample.score.accuracy for sample in row),
        extracted=tuple(sample.score.extracted for sample in row),
        outcomes=tuple(sample.score.outcome for sample in row),
        truncated=tuple(sample.completion.is_truncated for sample in row),
        response_tokens=tuple(sample.completion.num_sampled for sample in row),
        source=problem.prompt.source,
    )


def _duplicate_rate(samples: Sequence[Sequence[ScoredSample]]) -> float:
    """Return the share of responses equal to another one to the same problem. Near 1, the engine ignores the seeds."""
    total = sum(len(row) for row in samples)
    distinct = sum(num_distinct(sample.completion for sample in row) for row in samples)
    return (total - distinct) / total
