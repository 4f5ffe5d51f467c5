"""Environments of OpenEnv, played over the WebSocket of their server; the package itself is not needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from megatron_dapo.environments.remote.api import Environment, EpisodeTask, ModelTurn, Step

_CONNECT_S = 10.0


def openenv_environment(
    url: str,
    show: Callable[[Mapping[str, Any]], str] = json.dumps,
    action: Callable[[str], Mapping[str, Any]] = json.loads,
    **options: Any,
) -> type[Environment]:
    """Return an environment that plays a session of the OpenEnv server at `url`, such as "http://127.0.0.1:8000".

    Args:
        show: observation -> text.
        action: text of a turn -> action; ValueError if it is none, which the model is told.
        options: sent with `reset`, together with the seed and the data row's field `reset`, a dictionary.
    """
    socket_url = f"{url.rstrip('/').replace('http', 'ws', 1)}/ws"

    class OpenEnvEnvironment(Environment):
        def reset(self, task: EpisodeTask, seed: int) -> str:
            from websockets.sync.client import connect  # it answers pings from a thread, however long the model takes

            self._socket: Any = connect(socket_url, open_timeout=_CONNECT_S, max_size=None)
            return show(self._asked("reset", {"seed": seed, **options, **task.get("reset", {})})["observation"])

        def step(self, turn: ModelTurn) -> Step:
            try:
                chosen = dict(action(turn.text))
            except (ValueError, TypeError) as error:
                return Step(f"That is no action: {error}.")
            answer = self._asked("step", chosen)
            done, reward = bool(answer.get("done")), answer.get("reward")
            messages = () if done else show(answer["observation"])
            return Step(messages, done=done, reward=None if reward is None else float(reward))

        def close(self) -> None:
            if hasattr(self, "_socket"):
                self._socket.close()

        def _asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
            """Return the data of the server's answer. RuntimeError with the server's message if it is an error."""
            self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv())
            if answer["type"] == "error":
                raise RuntimeError(f"{url} answered {kind} with {answer['data'].get('message', answer['data'])}")
            return dict(answer["data"])

    return OpenEnvEnvironment
