"""Games of textarena for one player."""

from __future__ import annotations

from typing import Any

from megatron_dapo.environments.adapters.global_random import GlobalRandom
from megatron_dapo.environments.remote.api import Environment, EpisodeTask, ModelTurn, Step

_POLICY = 0  # the player's number; the game speaks as -1


def textarena_game(name: str) -> type[Environment]:
    """Return an environment that plays the game `name`, such as "GuessTheNumber-v0".

    The model reads what the game says since its last move. The reward is the game's, at its end.
    """

    class TextArenaGame(Environment):
        def reset(self, task: EpisodeTask, seed: int) -> str:
            import textarena

            self._random = GlobalRandom(seed)
            with self._random():
                self._game: Any = textarena.make(f"{name.removesuffix('-raw')}-raw")
                self._game.reset(num_players=1, seed=seed)
                return self._said()

        def step(self, turn: ModelTurn) -> Step:
            with self._random():
                done, _ = self._game.step(action=turn.text)
                if not done:
                    return Step(self._said())
                rewards, _ = self._game.close()
            return Step(done=True, reward=float(rewards[_POLICY]))

        def _said(self) -> str:
            """Return the game's messages since the last call, without the model's own moves."""
            _, messages = self._game.get_observation()
            return "\n".join(str(message) for sender, message, *_ in messages if sender != _POLICY)

    return TextArenaGame
