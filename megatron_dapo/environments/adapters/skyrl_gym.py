"""Environments of SkyRL (`skyrl-gym`)."""

from __future__ import annotations

from typing import Any

from megatron_dapo.environments.remote.api import Environment, EpisodeTask, ModelTurn, Step


def skyrl_environment(name: str, config: Any = None, **extras: Any) -> type[Environment]:
    """Return an environment that plays skyrl_gym's `name`, such as "gsm8k_multi_turn".

    The data row is the environment's `extras`, together with those given here. A row without `reward_spec` gets one with its
    answer as the ground truth. `config` is the environment's `env_config`.
    """

    class SkyRLEnvironment(Environment):
        def reset(self, task: EpisodeTask, seed: int) -> list[dict[str, Any]]:
            import skyrl_gym

            rule = {"reward_spec": {"method": "rule", "ground_truth": task["answer"]}} if "answer" in task else {}
            self._env: Any = skyrl_gym.make(name, env_config=config, extras={**rule, **task, **extras})
            prompt, _ = self._env.init(task.messages)
            return list(prompt)

        def step(self, turn: ModelTurn) -> Step:
            output = self._env.step(turn.text)
            if output.get("postprocessed_action") not in (None, turn.text):
                raise ValueError(
                    f"{name} shortens the model's turn from {len(turn.text)} to {len(output['postprocessed_action'])} "
                    "characters, but sampled tokens are never rewritten; let rollout.stop end the turn there"
                )
            return Step(output["observations"], done=bool(output["done"]), reward=float(output["reward"]))

        def close(self) -> None:
            if hasattr(self, "_env"):
                self._env.close()

    return SkyRLEnvironment
