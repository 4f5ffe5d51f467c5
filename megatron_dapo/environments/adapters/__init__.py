"""Environments of other libraries, which the workers' interpreter has installed: `Game = textarena_game("2048-v0")`."""

from megatron_dapo.environments.adapters.gem import gem_environment as gem_environment
from megatron_dapo.environments.adapters.gymnasium import gymnasium_environment as gymnasium_environment
from megatron_dapo.environments.adapters.mcp import mcp_environment as mcp_environment
from megatron_dapo.environments.adapters.openenv import openenv_environment as openenv_environment
from megatron_dapo.environments.adapters.skyrl_gym import skyrl_environment as skyrl_environment
from megatron_dapo.environments.adapters.textarena import textarena_game as textarena_game
