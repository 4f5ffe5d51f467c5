"""The header of a rollout batch: what every rank knows about all samples, as tensors that are broadcast.

Counts, advantages and packing plans come from it. Only the ranks that pack a sample have its numbers (tokens,
log-probs, routing); see `trainer.rollout`. Of a batch's S samples, in the order of their groups, it has

    sample_ids      UTF-8, separated by newlines
    group_index, prompt_length, window_start    [S] int32
    reward          [S] float64
    is_correct, is_finished (of the window)     [S] bool
    runs            [U, 4] int32: sample, number of tokens, 1 if in the loss else 0, age in policy versions
    routing         [S, 4] int32: rows, layers, experts per token, bytes per number; zeros: not replayed

A response is a sequence of runs; the tokens of a run have the same age and are either all in the loss or all not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_dapo.types import CriticContext, Group, ScoredSample, TrainSample, Window


def header_of(
    groups: Sequence[Group], training_version: int, *, filter_overlong: bool = False
) -> dict[str, torch.Tensor]:
    """Return the header of complete groups.

    The loss covers the tokens of a response's window. With `filter_overlong`, truncated responses keep their reward
    for their group's statistics but lose their loss mask, so no denominator counts their tokens.
    `training_version`: the policy version being trained, which gives each token's age.
    """
    pairs = [(index, group, sample) for index, group in enumerate(groups) for sample in group.samples]
    samples = [sample for _, _, sample in pairs]
    runs = [
        (number, *run)
        for number, sample in enumerate(samples)
        for run in _runs_of(sample, training_version, filter_overlong)
    ]
    arrays = {
        "sample_ids": np.frombuffer("\n".join(sample.sample_id for sample in samples).encode(), np.uint8).copy(),
        "group_index": np.array([index for index, _, _ in pairs], np.int32),
        "prompt_length": np.array([len(group.prompt.token_ids) for _, group, _ in pairs], np.int32),
        "reward": np.array([sample.reward for sample in samples], np.float64),
        "is_correct": np.array([sample.score.accuracy > 0 for sample in samples], bool),
        "window_start": np.array([sample.window.start for sample in samples], np.int32),
        "is_finished": np.array([sample.window.is_finished for sample in samples], bool),
        "runs": np.array(runs, np.int32).reshape(-1, 4),
        "routing": np.array([_routing_of(sample.completion.routing) for sample in samples], np.int32).reshape(-1, 4),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def samples_of(header: Mapping[str, torch.Tensor]) -> list[TrainSample]:
    """Return the samples as every rank knows them: tokens, log-probs and routing have a shape but no memory.

    They are on the meta device, so using them is an error.
    """
    arrays = {name: tensor.cpu().numpy() for name, tensor in header.items()}
    names = arrays["sample_ids"].tobytes().decode().split("\n") if arrays["sample_ids"].size else []
    runs = arrays["runs"]
    bounds = np.searchsorted(runs[:, 0], np.arange(len(names) + 1))
    rows = {name: array for name, array in arrays.items() if name not in ("sample_ids", "runs")}
    return [
        _sample(names[index], {name: array[index] for name, array in rows.items()}, runs[start:end, 1:])
        for index, (start, end) in enumerate(zip(bounds, bounds[1:]))
    ]


def _sample(sample_id: str, row: Mapping[str, Any], runs: np.ndarray) -> TrainSample:
    lengths, is_trained, ages = runs.T
    num_response, prompt_length = int(lengths.sum()), int(row["prompt_length"])
    window = Window(int(row["window_start"]), bool(row["is_finished"]))
    *shape, num_bytes = row["routing"].tolist()
    dtype = torch.uint8 if num_bytes == 1 else torch.int16
    return TrainSample(
        sample_id=sample_id,
        group_index=int(row["group_index"]),
        tokens=torch.empty(prompt_length + num_response, dtype=torch.int32, device="meta"),
        prompt_length=prompt_length,
        loss_mask=_per_token(lengths, is_trained),
        advantages=torch.zeros(1).expand(num_response),  # estimated by every rank
        rollout_logprobs=torch.empty(num_response, device="meta"),
        staleness=_per_token(lengths, ages) if ages.any() else None,
        critic_context=CriticContext(float(row["reward"]), bool(row["is_correct"]), window),
        routing=torch.empty(shape, dtype=dtype, device="meta") if num_bytes else None,
    )


def _runs_of(sample: ScoredSample, training_version: int, filter_overlong: bool) -> list[tuple[int, int, int]]:
    """Return (number of tokens, is trained, age) of each run of a response."""
    completion, first = sample.completion, sample.window.start  # earlier windows were trained in their own steps
    if filter_overlong and sample.window.is_finished and completion.is_truncated:
        first = completion.num_tokens
    parts = [
        (start, end, is_trained, training_version - run.version)
        for run in completion.versions
        for start, end, is_trained in (
            (run.start, min(run.end, first), 0),
            (max(run.start, first), run.end, 1),
        )
    ]
    return [(end - start, is_trained, age) for start, end, is_trained, age in parts if end > start]


def _routing_of(routing: np.ndarray | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if routing is None else (*routing.shape, routing.itemsize)


def _per_token(lengths: np.ndarray, values: np.ndarray) -> torch.Tensor:
    """Return [R] float32 with the value of each token's run; one number in memory if all are equal."""
    total = int(lengths.sum())
    if len(values) and (values == values[0]).all():
        return torch.full((1,), float(values[0])).expand(total)
    return torch.from_numpy(np.repeat(values.astype(np.float32), lengths))


def with_numbers(samples: Sequence[TrainSample], groups: Sequence[Group]) -> list[TrainSample]:
    """Return the samples of `groups`, in order, all with tokens and log-probs, even those that had none."""
    pairs = [(group, sample) for group in groups for sample in group.samples]
    return [replace(sample, **numbers_of(*pair)) for sample, pair in zip(samples, pairs, strict=True)]


def numbers_of(group: Group, sample: ScoredSample) -> dict[str, Any]:
    """Return the tokens of prompt and response, the response's log-probs, and the routing if it is replayed. The latter
    two share the completion's memory."""
    prompt, completion = np.asarray(group.prompt.token_ids, np.int32), sample.completion
    assert completion.num_tokens == len(completion.logprobs), (
        f"sample {sample.sample_id}: {completion.num_tokens} response tokens but {len(completion.logprobs)} log-probs"
    )
    return {
        "tokens": torch.from_numpy(np.concatenate((prompt, completion.token_ids))),
        "rollout_logprobs": torch.from_numpy(completion.logprobs),
        **({} if completion.routing is None else {"routing": torch.from_numpy(completion.routing)}),
    }
