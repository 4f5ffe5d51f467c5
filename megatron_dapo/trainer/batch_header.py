"""The header of a rollout batch: what every rank knows about all samples, as tensors that are broadcast.

Counts, advantages and packing plans come from it. Only the ranks that pack a sample have its numbers (tokens,
log-probs, routing, supports); see `trainer.rollout`. A response is one sequence, an episode one for each of its streams, next to
each other. Of a batch's S sequences, in the order of their groups, it has

    sample_ids      UTF-8, separated by newlines
    source_names    UTF-8, separated by newlines
    group_index, segment, prompt_length, window_start, source    [S] int32; source is the index of a name
    reward          [S] float64
    reward_names    UTF-8, separated by newlines
    rewards         [S, names] float64: `ScoredSample.rewards`, 0 for one that a sample does not have
    is_correct, is_finished (of the window), is_served     [S] bool; is_served: a server teaches it
    runs            [U, 4] int32: sequence, number of tokens, state, age in policy versions. The state is 1 if the
                    tokens are in the loss, 0 if not, -1 if they are an environment's, whose age is 0
    turns           [V, 4] int32: sequence, start, end, order of the turns of episodes
    turn_rewards    [V] float64
    turn_contexts   [V] int64: equal for equal tokens before a turn
    routing         [S, 4] int32: rows, layers, experts per token, bytes per number; zeros: not replayed
    support         [S] int64: numbers in its supports; -1: none are recorded
    teacher_prompts [S] int64: numbers in its teachers' prompts; -1: all read the policy's

A response is a sequence of runs; the tokens of a run have the same age and state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from megatron_dapo.types import (
    Completion,
    CriticContext,
    Group,
    ScoredSample,
    Segment,
    TrainSample,
    TurnCredit,
    Window,
)


def sequences_of(groups: Sequence[Group]) -> list[tuple[Group, ScoredSample, int]]:
    """Return the group, sample and segment of each sequence of a batch; those of an episode are neighbors."""
    return [
        (group, sample, segment)
        for group in groups
        for sample in group.samples
        for segment in range(sample.completion.num_segments + 1)
    ]


def _prompt_of(group: Group, sample: ScoredSample, segment: int) -> tuple[int, ...]:
    prompt_ids = sample.completion.stream(segment).prompt_ids
    return group.prompt.token_ids if prompt_ids is None else prompt_ids


def _name_of(sample: ScoredSample, segment: int) -> str:
    return f"{sample.sample_id}#{segment}" if segment else sample.sample_id


def header_of(
    groups: Sequence[Group],
    training_version: int,
    *,
    filter_overlong: bool = False,
    rewards_turns: bool = False,
    of_teachers: Mapping[int, Mapping[str, np.ndarray]] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """Return the header of complete groups.

    The loss covers the tokens of a response's window. With `filter_overlong`, truncated responses keep their reward
    for their group's statistics but lose their loss mask, so no denominator counts their tokens.
    `training_version`: the policy version being trained, which gives each token's age. `rewards_turns`: the rewards of turns
    are parts of the samples'. `of_teachers`: see `RolloutBatch`.
    """
    sequences = sequences_of(groups)
    places = [index for index, group in enumerate(groups) for _ in sequences_of([group])]
    samples = [sample for _, sample, _ in sequences]
    names = "\n".join(_name_of(sample, segment) for _, sample, segment in sequences)
    reward_names = sorted({name for sample in samples for name in sample.rewards})
    starts = [sample.window.start_of(segment) for _, sample, segment in sequences]
    streams = [sample.completion.stream(segment) for _, sample, segment in sequences]
    fields = [of_teachers.get(index, {}) for index in range(len(sequences))]
    runs = [
        (number, *run)
        for number, ((_, sample, segment), start) in enumerate(zip(sequences, starts))
        for run in _runs_of(sample, segment, start, training_version, filter_overlong)
    ]
    turns = [
        (number, turn) for number, each in enumerate(sequences) for turn in turn_credits(*each, rewards_turns)
    ]
    sources = [group.prompt.source_name.replace("\n", " ") for group, _, _ in sequences]
    source_names = sorted(set(sources))
    arrays = {
        "source_names": np.frombuffer("\n".join(source_names).encode(), np.uint8).copy(),
        "source": np.array([source_names.index(source) for source in sources], np.int32),
        "sample_ids": np.frombuffer(names.encode(), np.uint8).copy(),
        "group_index": np.array(places, np.int32),
        "segment": np.array([segment for _, _, segment in sequences], np.int32),
        "prompt_length": np.array([len(_prompt_of(*each)) for each in sequences], np.int32),
        "reward": np.array([sample.reward for sample in samples], np.float64),
        "reward_names": np.frombuffer("\n".join(reward_names).encode(), np.uint8).copy(),
        "rewards": np.array(
            [[sample.rewards.get(name, 0.0) for name in reward_names] for sample in samples], np.float64
        ).reshape(len(samples), len(reward_names)),
        "is_correct": np.array([sample.score.accuracy > 0 for sample in samples], bool),
        "is_served": np.array(["teacher_gains" in found for found in fields], bool),
        "window_start": np.array(starts, np.int32),
        "is_finished": np.array([sample.window.is_finished for sample in samples], bool),
        "runs": np.array(runs, np.int32).reshape(-1, 4),
        "turns": np.array(
            [(number, turn.start, turn.end, turn.order) for number, turn in turns], np.int32
        ).reshape(-1, 4),
        "turn_rewards": np.array([turn.reward for _, turn in turns], np.float64),
        "turn_contexts": np.array([turn.context for _, turn in turns], np.int64),
        "routing": np.array([_routing_of(stream.routing) for stream in streams], np.int32).reshape(-1, 4),
        "support": _sizes([stream.support for stream in streams]),
        "teacher_prompts": _sizes([found.get("teacher_prompts") for found in fields]),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


_PER_SEQUENCE = (
    *("group_index", "segment", "prompt_length", "reward", "is_correct", "window_start", "is_finished", "is_served", "routing"),
    *("support", "source", "teacher_prompts"),
)


def turn_credits(group: Group, sample: ScoredSample, segment: int, rewards_turns: bool) -> Iterator[TurnCredit]:
    """Yield the turns of a sequence; none of a response that is no episode. Rewards are 0 without `rewards_turns`."""
    stream = sample.completion.stream(segment)
    turns = stream.episode.turns if isinstance(stream, Completion) and stream.episode is not None else ()
    if isinstance(stream, Segment):
        turns = stream.turns
    digest, position = hashlib.sha256(np.asarray(_prompt_of(group, sample, segment), np.int32).tobytes()), 0
    for turn in turns:
        digest.update(stream.token_ids[position : turn.start].tobytes())
        position = turn.start
        context = int.from_bytes(digest.digest()[:8], "little", signed=True)
        yield TurnCredit(turn.start, turn.end, turn.reward if rewards_turns else 0.0, context, turn.order)


def samples_of(header: Mapping[str, torch.Tensor]) -> list[TrainSample]:
    """Return the samples as every rank knows them: tokens, log-probs, routing and supports have a shape but no memory.

    They are on the meta device, so using them is an error.
    """
    arrays = {name: tensor.cpu().numpy() for name, tensor in header.items()}
    names, reward_names = (
        arrays[name].tobytes().decode().split("\n") if arrays[name].size else [] for name in ("sample_ids", "reward_names")
    )
    source_names = arrays["source_names"].tobytes().decode().split("\n")
    numbers = np.arange(len(names) + 1)
    runs, turns = arrays["runs"], arrays["turns"]
    bounds, turn_bounds = (np.searchsorted(table[:, 0], numbers) for table in (runs, turns))
    credits = [
        TurnCredit(start, end, reward, context, order)
        for (start, end, order), reward, context in zip(
            turns[:, 1:].tolist(), arrays["turn_rewards"].tolist(), arrays["turn_contexts"].tolist(), strict=True
        )
    ]
    rows = {name: arrays[name] for name in _PER_SEQUENCE}
    return [
        _sample(
            names[index],
            {name: array[index] for name, array in rows.items()},
            runs[bounds[index] : bounds[index + 1], 1:],
            tuple(credits[turn_bounds[index] : turn_bounds[index + 1]]),
            dict(zip(reward_names, arrays["rewards"][index].tolist(), strict=True)),
            source_names[arrays["source"][index]],
        )
        for index in range(len(names))
    ]


def _sample(
    sample_id: str,
    row: Mapping[str, Any],
    runs: np.ndarray,
    turns: tuple[TurnCredit, ...],
    rewards: Mapping[str, float],
    source: str,
) -> TrainSample:
    lengths, states, ages = runs.T
    num_response, prompt_length = int(lengths.sum()), int(row["prompt_length"])
    window = Window(int(row["window_start"]), bool(row["is_finished"]))
    *shape, num_bytes = row["routing"].tolist()
    dtype = torch.uint8 if num_bytes == 1 else torch.int16
    return TrainSample(
        sample_id=sample_id,
        group_index=int(row["group_index"]),
        tokens=torch.empty(prompt_length + num_response, dtype=torch.int32, device="meta"),
        prompt_length=prompt_length,
        loss_mask=_per_token(lengths, states == 1),
        advantages=torch.zeros(1).expand(num_response),  # estimated by every rank
        rollout_logprobs=torch.empty(num_response, device="meta"),
        staleness=_per_token(lengths, ages) if ages.any() else None,
        critic_context=CriticContext(float(row["reward"]), bool(row["is_correct"]), window, turns, rewards),
        routing=torch.empty(shape, dtype=dtype, device="meta") if num_bytes else None,
        support=_numbers_without_memory(row["support"]),
        observed=torch.from_numpy(np.repeat(states < 0, lengths)) if (states < 0).any() else None,
        segment=int(row["segment"]),
        source=source,
        teacher_gains=torch.empty(num_response, device="meta") if row["is_served"] else None,
        teacher_prompts=_numbers_without_memory(row["teacher_prompts"]),
    )


def _numbers_without_memory(size: int) -> torch.Tensor | None:
    return torch.empty(int(size), dtype=torch.int32, device="meta") if size >= 0 else None


def _runs_of(
    sample: ScoredSample, segment: int, first: int, training_version: int, filter_overlong: bool
) -> list[tuple[int, int, int]]:
    """Return (number of tokens, state, age) of each run of a sequence; tokens before `first` were trained earlier."""
    stream = sample.completion.stream(segment)
    kinds, num_tokens = stream.runs, len(stream.token_ids)
    if filter_overlong and sample.window.is_finished and sample.completion.is_truncated:
        first = num_tokens
    parts = [
        (max(run.start, kind.start, start), min(run.end, kind.end, end), state, training_version - run.version)
        for run in stream.versions
        for kind in kinds
        if kind.start < run.end and kind.end > run.start
        for start, end, state in ((0, first, 0), (first, num_tokens, int(kind.is_trained)))
        if kind.is_sampled
    ]
    covered = [(end - start, start, state, age) for start, end, state, age in parts if end > start]
    observed = [(kind.end - kind.start, kind.start, -1, 0) for kind in kinds if not kind.is_sampled]
    return [(length, state, age) for length, _, state, age in sorted(covered + observed, key=lambda part: part[1])]


def _sizes(records: Sequence[np.ndarray | None]) -> np.ndarray:
    return np.array([-1 if record is None else record.size for record in records], np.int64)


def _routing_of(routing: np.ndarray | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if routing is None else (*routing.shape, routing.itemsize)


def _per_token(lengths: np.ndarray, values: np.ndarray) -> torch.Tensor:
    """Return [R] float32 with the value of each token's run; one number in memory if all are equal."""
    total = int(lengths.sum())
    if len(values) and (values == values[0]).all():
        return torch.full((1,), float(values[0])).expand(total)
    return torch.from_numpy(np.repeat(values.astype(np.float32), lengths))


def with_numbers(
    samples: Sequence[TrainSample], groups: Sequence[Group], of_teachers: Mapping[int, Mapping[str, np.ndarray]]
) -> list[TrainSample]:
    """Return the samples of `groups`, in order, all with tokens and log-probs, even those that had none."""
    sequences = sequences_of(groups)
    return [replace(sample, **numbers_at(sequences, index, of_teachers)) for index, sample in enumerate(samples)]


def numbers_at(
    sequences: Sequence[tuple[Group, ScoredSample, int]], index: int, of_teachers: Mapping[int, Mapping[str, np.ndarray]]
) -> dict[str, Any]:
    """Return the numbers of one of a batch's sequences. `of_teachers`: see `RolloutBatch`."""
    found = {name: torch.from_numpy(array) for name, array in of_teachers.get(index, {}).items()}
    return {**numbers_of(*sequences[index]), **found}


def numbers_of(group: Group, sample: ScoredSample, segment: int = 0) -> dict[str, Any]:
    """Return the tokens of prompt and response, the response's log-probs, and routing and supports if they are recorded.
    All but the tokens share the completion's memory."""
    prompt, stream = np.asarray(_prompt_of(group, sample, segment), np.int32), sample.completion.stream(segment)
    assert len(stream.token_ids) == len(stream.logprobs), (
        f"sample {_name_of(sample, segment)}: {len(stream.token_ids)} response tokens but {len(stream.logprobs)} log-probs"
    )
    return {
        "tokens": torch.from_numpy(np.concatenate((prompt, stream.token_ids))),
        "rollout_logprobs": torch.from_numpy(stream.logprobs),
        **({} if stream.routing is None else {"routing": torch.from_numpy(stream.routing)}),
        **({} if stream.support is None else {"support": torch.from_numpy(stream.support)}),
    }
