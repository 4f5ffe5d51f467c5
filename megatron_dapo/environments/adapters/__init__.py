"""Environments of other libraries, which the workers' interpreter has installed: `Game = textarena_game("2048-v0")`."""

from megatron_dapo.environments.adapters.gymnasium import gymnasium_environment as gymnasium_environment
from megatron_dapo.environments.adapters.textarena import textarena_game as textarena_game
