"""Prompts of a reasoning-gym task that are generated anew for each epoch, and recovered by their ids after a resume.

The first epoch's prompts are part of the data set. A later epoch's are generated when it begins, with the id
TASK@EPOCH/HASH. The id says how to generate the prompt again, so a checkpoint only holds ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_dapo.data.dataset import load_sources
from megatron_dapo.data.sources import Source
from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.types import Prompt

_KEPT_EPOCHS = 2  # prompts that are queued again may be of the last one


class FreshPrompts:
    """The prompts of one source by epoch.

    Args:
        source: of made problems.
        template: renders them.
        max_prompt_tokens: longer ones are left out.
        begin_episodes: they are played with an environment.
    """

    def __init__(
        self, source: Source, template: PromptTemplate, max_prompt_tokens: int, begin_episodes: bool = False
    ) -> None:
        self._source = source
        self._template = template
        self._max_prompt_tokens = max_prompt_tokens
        self._begin_episodes = begin_episodes
        self._of_epoch = lru_cache(_KEPT_EPOCHS)(self._make)

    def ids(self, epoch: int) -> Sequence[str]:
        """Return the ids of an epoch's prompts, in generation order. ValueError if they cannot be generated."""
        return tuple(self._of_epoch(epoch))

    def has(self, prompt_id: str) -> bool:
        """Return True if an id is of a later epoch than the first one of this source."""
        name, at, rest = prompt_id.rpartition("@")
        return bool(at) and name == self._source.name and rest.partition("/")[0].isdigit()

    def prompt(self, prompt_id: str) -> Prompt:
        """Return the prompt of an id that `has` knows. ValueError if this installation makes other problems."""
        epoch = int(prompt_id.rpartition("@")[2].partition("/")[0])
        try:
            return self._of_epoch(epoch)[prompt_id]
        except KeyError:
            raise ValueError(
                f"prompt {prompt_id!r} is not among those that {self._source.made} makes for epoch {epoch}: resume with the "
                "reasoning-gym version and settings of the checkpoint"
            ) from None

    def _make(self, epoch: int) -> dict[str, Prompt]:
        assert self._source.made is not None, f"source {self._source.name!r} has files"
        source = replace(self._source, made=replace(self._source.made, epoch=epoch))
        prompts = load_sources(
            [source], self._template, self._max_prompt_tokens, begin_episodes=self._begin_episodes
        ).prompts
        named = (replace(one, prompt_id=f"{self._source.name}@{epoch}/{one.prompt_id}") for one in prompts)
        return {one.prompt_id: one for one in named}


class PromptBook(Mapping[str, Prompt]):
    """The data set's prompts by id, then the newly generated ones; only the former are counted and iterated."""

    def __init__(self, prompts: Mapping[str, Prompt], fresh: Sequence[FreshPrompts]) -> None:
        self._prompts = prompts
        self._fresh = fresh

    def __getitem__(self, prompt_id: str) -> Prompt:
        if prompt_id in self._prompts:
            return self._prompts[prompt_id]
        for source in self._fresh:
            if source.has(prompt_id):
                return source.prompt(prompt_id)
        raise KeyError(prompt_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)
