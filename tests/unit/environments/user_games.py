"""Environments of other libraries, as a user names them; loaded by workers of an interpreter that has the libraries."""

from __future__ import annotations

from megatron_dapo.environments.adapters import gymnasium_environment, textarena_game

Game2048 = textarena_game("2048-v0")
GuessTheNumber = textarena_game("GuessTheNumber-v0")
FrozenLake = gymnasium_environment("FrozenLake-v1", "Cross the lake.", is_slippery=True)
