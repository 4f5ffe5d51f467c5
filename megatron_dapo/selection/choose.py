"""Selects the responses that a data set keeps, and writes records of all responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dapo.algorithms.selection import KEPT, Candidates, Selection, choose, choose_at_random, shortlist
from megatron_dapo.config.rollout_schema import RejectionSamplingConfig
from megatron_dapo.selection.embed import Embed
from megatron_dapo.types import Prompt, ScoredSample

NOT_DRAWN = "not_drawn"  # the fate of correct responses that a random selection left out


@dataclass(frozen=True)
class Chosen:
    """One prompt, its responses, and those that are kept."""

    prompt: Prompt
    samples: Sequence[ScoredSample]
    diverse: Selection  # criteria: length, likeness and clusters
    kept: tuple[int, ...]  # indices that the configured selection keeps
    is_random: bool = False

    @property
    def candidates(self) -> Candidates:
        """Return the responses as the selection sees them."""
        return candidates_of(self.samples)

    @property
    def fates(self) -> list[str]:
        """Return the fate of each response: "kept", or the reason why it was not."""
        if not self.is_random:
            return self.diverse.fates
        correct = self.candidates.is_correct
        return [
            KEPT if i in self.kept else NOT_DRAWN if correct[i] else self.diverse.fates[i] for i in range(len(correct))
        ]


def candidates_of(samples: Sequence[ScoredSample]) -> Candidates:
    """Return the responses to one prompt as the selection sees them."""
    return Candidates(
        [sample.text for sample in samples],
        [sample.completion.num_sampled for sample in samples],
        [sample.score.accuracy > 0 for sample in samples],
    )


def choose_all(
    responses: Sequence[tuple[Prompt, Sequence[ScoredSample]]],
    section: RejectionSamplingConfig,
    max_tokens: int,
    embed: Embed,
    seed: int,
) -> list[Chosen]:
    """Select the responses to keep for every prompt. `max_tokens`: the longest length if the section sets none.

    All embeddings are computed in one call, so that they can be centered. `seed` only affects a random selection.
    """
    found = [(prompt, samples, candidates_of(samples)) for prompt, samples in responses]
    lists = [shortlist(candidates, section, max_tokens) for _, _, candidates in found]
    pairs = [(prompt, samples[i]) for (prompt, samples, _), one in zip(found, lists, strict=True) for i in one.kept]
    embeddings, start, chosen = embed(pairs), 0, []
    for (prompt, samples, candidates), one in zip(found, lists, strict=True):
        own = embeddings[start : start + len(one.kept)]
        start += len(one.kept)
        diverse = choose(one, own, candidates.pass_rate, section)
        kept, is_random = diverse.kept, section.selection == "random"
        if is_random:
            kept = choose_at_random(candidates, len(kept), f"{seed}/{prompt.prompt_id}")
        chosen.append(Chosen(prompt, samples, diverse, tuple(kept), is_random))
    return chosen


def examples_of(chosen: Sequence[Chosen]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the data set in `sft`'s format: prompt and response, and facts about them."""
    for one in chosen:
        for index in one.kept:
            sample = one.samples[index]
            yield {
                "prompt": [dict(message) for message in one.prompt.messages],
                "response": sample.text,
                "prompt_id": one.prompt.prompt_id,
                "data_source": one.prompt.data_source,
                "answer": one.prompt.answer,
                "pass_rate": one.candidates.pass_rate,
                "response_tokens": sample.completion.num_sampled,
                "sample": index,
                "cluster": one.diverse.clusters.get(index),
            }


def responses_of(chosen: Sequence[Chosen]) -> Iterator[dict[str, Any]]:
    """Yield every response with its fate."""
    for one in chosen:
        for index, (sample, fate) in enumerate(zip(one.samples, one.fates, strict=True)):
            yield {
                "prompt_id": one.prompt.prompt_id,
                "sample": index,
                "fate": fate,
                "outcome": sample.score.outcome,
                "cluster": one.diverse.clusters.get(index),
                "response_tokens": sample.completion.num_sampled,
                "response": sample.text,
            }
