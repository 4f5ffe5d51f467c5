"""Environments of gymnasium, with observations and actions as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megatron_dapo.environments.remote.api import Environment, EpisodeTask, ModelTurn, Step


def gymnasium_environment(
    name: str,
    instruction: str = "",
    show: Callable[[Any], str] = str,
    parse: Callable[[str], Any] | None = None,
    **options: Any,
) -> type[Environment]:
    """Return an environment that plays gymnasium's `name`, such as "FrozenLake-v1".

    Args:
        instruction: text before the first observation.
        show: observation -> text.
        parse: text of a turn -> action; ValueError if it is none, which the model is told. Default: the last whole number
            of the text for a `Discrete` space, the text itself for a `Text` space.
        options: of gymnasium.make.
    """

    class GymnasiumEnvironment(Environment):
        def reset(self, task: EpisodeTask, seed: int) -> str:
            import gymnasium

            self._env: Any = gymnasium.make(name, **options)
            observation, _ = self._env.reset(seed=seed)
            return "\n".join(filter(None, (instruction, show(observation))))

        def step(self, turn: ModelTurn) -> Step:
            try:
                action = parse(turn.text) if parse is not None else self._parsed(turn.text)
                if not self._env.action_space.contains(action):
                    raise ValueError(f"{action!r} is not possible")
            except ValueError as error:
                return Step(f"That is no action: {error}. Actions: {self._env.action_space}.")
            observation, reward, terminated, truncated, _ = self._env.step(action)
            done = bool(terminated or truncated)
            return Step(() if done else show(observation), done=done, reward=float(reward))

        def close(self) -> None:
            if hasattr(self, "_env"):
                self._env.close()

        def _parsed(self, text: str) -> Any:
            if type(self._env.action_space).__name__ == "Text":
                return text
            numbers = re.findall(r"-?\d+", text)
            if not numbers:
                raise ValueError("it has no number")
            return int(numbers[-1])

    return GymnasiumEnvironment
