"""Environments of GEM (`gem-llm`)."""

from __future__ import annotations

from typing import Any

from megatron_dapo.environments.adapters.global_random import GlobalRandom
from megatron_dapo.environments.remote.api import Environment, EpisodeTask, ModelTurn, Step


def gem_environment(name: str, **options: Any) -> type[Environment]:
    """Return an environment that plays GEM's `name`, such as "game:Wordle-v0-easy".

    A message is an observation followed by its suffix, as GEM's wrappers show it. `options` are those of gem.make.
    """

    class GemEnvironment(Environment):
        def reset(self, task: EpisodeTask, seed: int) -> str:
            import gem

            self._random = GlobalRandom(seed)
            with self._random():
                self._env: Any = gem.make(name, **options)
                # GEM seeds numpy, whose seeds have 32 bits.
                return _text(*self._env.reset(seed=seed % 2**32))

        def step(self, turn: ModelTurn) -> Step:
            with self._random():
                observation, reward, terminated, truncated, info = self._env.step(turn.text)
            done = bool(terminated or truncated)
            return Step(() if done else _text(observation, info), done=done, reward=float(reward))

    return GemEnvironment


def _text(observation: str, info: dict[str, Any]) -> str:
    return "\n".join(filter(None, (observation, info.get("suffix"))))
