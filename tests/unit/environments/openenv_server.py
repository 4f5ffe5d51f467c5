"""An OpenEnv server of a game of subtraction, for an interpreter with the package `openenv-core`. Prints its port."""

import random
import socket
import sys
import types

# OpenEnv imports it for MCP environments, which this is not; its dependencies contradict those of `mcp`.
for name in ("fastmcp", "fastmcp.client", "fastmcp.client.client"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["fastmcp"].Client = sys.modules["fastmcp"].FastMCP = object
sys.modules["fastmcp.client.client"].CallToolResult = object

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Take(Action):
    take: int


class Left(Observation):
    left: int


class Countdown(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._random, self._left, self._num_steps = random.Random(0), 0, 0

    def reset(self, seed=None, episode_id=None, **options):
        self._random, self._num_steps = random.Random(seed), 0
        self._left = self._random.randint(5, 30)
        return Left(left=self._left)

    def step(self, action, timeout_s=None, **options):
        self._num_steps += 1
        if not 1 <= action.take <= 3:
            return Left(left=self._left, reward=-1.0)
        self._left = max(self._left - action.take - self._random.randint(0, 3), 0)
        return Left(left=self._left, done=self._left == 0, reward=1.0 / self._num_steps)

    @property
    def state(self):
        return State(step_count=self._num_steps)


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    app = create_fastapi_app(Countdown, Take, Left, max_concurrent_envs=64)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])
