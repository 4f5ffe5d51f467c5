"""Environments of episodes: what a user writes, and the worker processes in which it runs.

Imports only the standard library, because a user's file imports this package in any interpreter.
"""

from megatron_dapo.environments.remote.api import AsyncClient as AsyncClient
from megatron_dapo.environments.remote.api import CallResult as CallResult
from megatron_dapo.environments.remote.api import Client as Client
from megatron_dapo.environments.remote.api import Environment as Environment
from megatron_dapo.environments.remote.api import EpisodeTask as EpisodeTask
from megatron_dapo.environments.remote.api import Lost as Lost
from megatron_dapo.environments.remote.api import ModelCall as ModelCall
from megatron_dapo.environments.remote.api import ModelTurn as ModelTurn
from megatron_dapo.environments.remote.api import Reward as Reward
from megatron_dapo.environments.remote.api import Step as Step
from megatron_dapo.environments.remote.api import ToolEnvironment as ToolEnvironment
from megatron_dapo.environments.remote.api import tool as tool
from megatron_dapo.environments.remote.api import user as user
