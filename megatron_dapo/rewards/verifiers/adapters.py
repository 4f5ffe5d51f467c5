"""Reward functions written for other libraries, recognized by the names of their parameters.

| library | signature | called with |
|---|---|---|
| TRL | `(prompts, completions, **columns)`, or any with `completions` | lists of messages; the row's other columns as lists |
| verl | `(data_source, solution_str, ground_truth, extra_info=None)` | texts; the row's other columns as a dictionary |

A function of TRL returns one number for each completion, one of verl a number or a dictionary with `score`, of which
`acc` and `pred` are read too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_dapo.rewards.result import RewardResult, RewardSample

def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `sample` or `samples` that calls one of TRL or verl; any other function as it is.

    Raises ValueError for a signature that can only be meant otherwise.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in
        return function
    names = list(parameters)
    if "completions" in names:
        return _of_trl(function, parameters)
    if "solution_str" in names:
        return _of_verl(function, parameters)
    if names[:2] == ["answer", "response"]:
        raise ValueError("its parameters are (answer, response): the response comes first, write it as (response, answer)")
    if names[:2] == ["args", "sample"]:
        raise ValueError("its parameters are (args, sample), as slime has them: write it as (sample)")
    return function


def _of_trl(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def arguments(samples: Sequence[RewardSample]) -> dict[str, Any]:
        columns = {name for sample in samples for name in sample.extra_info}
        values: dict[str, Any] = {name: [sample.extra_info.get(name) for sample in samples] for name in columns}
        values["answer"] = [sample.answer for sample in samples]
        values["data_source"] = [sample.data_source for sample in samples]
        values["prompts"] = [list(map(dict, sample.messages)) for sample in samples]
        values["completions"] = [[{"role": "assistant", "content": sample.response}] for sample in samples]
        if "completion_ids" in parameters:
            values["completion_ids"] = [list(sample.token_ids) for sample in samples]
        return values if takes_all else {name: value for name, value in values.items() if name in parameters}

    if inspect.iscoroutinefunction(function):

        async def score_later(samples: Sequence[RewardSample]) -> Any:
            return await function(**arguments(samples))

        return score_later

    def score(samples: Sequence[RewardSample]) -> Any:
        return function(**arguments(samples))

    return score


def _of_verl(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Callable[..., Any]:
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def arguments(sample: RewardSample) -> dict[str, Any]:
        values = {
            "data_source": sample.data_source,
            "solution_str": sample.response,
            "ground_truth": sample.answer,
            "extra_info": dict(sample.extra_info),
        }
        return values if takes_all else {name: value for name, value in values.items() if name in parameters}

    if inspect.iscoroutinefunction(function):

        async def score_later(sample: RewardSample) -> Any:
            return _of_verls_result(await function(**arguments(sample)))

        return score_later

    def score(sample: RewardSample) -> Any:
        return _of_verls_result(function(**arguments(sample)))

    return score


def _of_verls_result(result: Any) -> Any:
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    is_correct, extracted = result.get("acc"), result.get("pred")
    return RewardResult(
        score=float(result["score"]),
        extracted=None if extracted is None else str(extracted),
        is_correct=None if is_correct is None else bool(is_correct),
    )
