"""Builds the episode engine of a configuration with an environment: template, processes, limits."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from megatron_dapo.config.schema import Config
from megatron_dapo.data.dataset import prompt_template
from megatron_dapo.data.model_inputs import ModelInputs
from megatron_dapo.data.template_proof import TemplateProof, prove_template
from megatron_dapo.data.turns import ROLES, TurnTemplate
from megatron_dapo.engines.base import RolloutEngine
from megatron_dapo.engines.endpoint import AGENTS
from megatron_dapo.environments.pool import WorkerPool, WorkerSettings
from megatron_dapo.rollout.episodes.engine import EpisodeEngine
from megatron_dapo.rollout.episodes.live_episode import EpisodeSettings

logger = logging.getLogger(__name__)

Engine = TypeVar("Engine", bound=RolloutEngine)


@contextmanager
def episode_engine(config: Config, proof: TemplateProof | None, engine: Engine) -> Iterator[Engine]:
    """Return an engine that plays episodes on `engine`; without an environment, and so without a proof, `engine` itself.

    ValueError in one line if the environment cannot be loaded, or its tools' results have no place in the template.
    """
    if proof is None:
        yield engine
        return
    # An environment's answer ends a server engine's wait; the embedded engine does not wait.
    wake = getattr(engine, "wake", lambda: None)
    with WorkerPool(worker_settings(config, proof.turns.roles), wake) as pool:
        check_tool_role(config, proof, pool.hello)
        yield cast(Engine, EpisodeEngine(engine, pool, proof.turns, episode_settings(config)))


def template_proof(config: Config, inputs: ModelInputs) -> TemplateProof | None:
    """Return the proof that the chat template continues episodes exactly; None without an environment.

    ValueError in one line if it does not, or if it rewrites history and turns.history is "refuse".
    """
    if not config.environment.is_on:
        return None
    template = prompt_template(config.data, inputs.tokenizer, inputs.vocab_size)
    return prove_template(TurnTemplate(template, inputs.stop_tokens.token_ids, config.turns.history))


def check_tool_role(config: Config, proof: TemplateProof, hello: Mapping[str, Any]) -> None:
    """Raise ValueError in one line if the environment's tools answer in a role that the chat template has no place for.

    `hello`: what the first worker said. It knows the tools of a `ToolEnvironment` only: of an agent's, a warning is logged.
    """
    role, roles = hello.get("result_role", "tool"), proof.turns.roles
    if role in roles:
        return
    reason = proof.refused.get(role, f"it has one for {', '.join(roles)}")
    refused = f"the chat template of {config.model.path} has no place for messages of the role {role} ({reason})"
    if hello.get("tools"):
        raise ValueError(
            f"{refused}, in which {worker_settings(config).name} answers calls of its tools: set result_role = "
            f'"{roles[0]}" in the class and name the tools in the prompt, or choose a model whose template has tools'
        )
    if config.environment.agent:
        logger.warning("%s: an agent's request with the result of a tool is answered with 400; choose another model for it", refused)


def episode_settings(config: Config) -> EpisodeSettings:
    """Return the limits of an episode."""
    environment, order = config.environment, config.environment.order
    if order == "auto":
        order = "rounds" if config.rollout.engine == "embedded" else "arrival"
    workers = worker_settings(config)
    num_places = workers.num_processes * workers.episodes_per_process
    num_episodes = config.rollout.prompts_per_step * config.rollout.group_size
    if num_places < num_episodes:
        logger.warning(
            "environment: %d of the %d episodes of a batch play at a time, the others wait: raise environment.processes (%d) "
            "or environment.episodes_per_process (%d)",
            num_places,
            num_episodes,
            workers.num_processes,
            workers.episodes_per_process,
        )
    return EpisodeSettings(
        max_context_tokens=environment.max_context_tokens or config.longest_trained,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_turns=environment.max_turns,
        max_turn_tokens=environment.max_turn_tokens,
        max_seconds=environment.episode_seconds,
        success=environment.success,
        max_environments=num_places,
        retries=environment.retries,
        resume=environment.resume,
        order=order,
        parser=config.turns.parser,
        on_cut="observe" if environment.agent else config.turns.on_cut,
    )


def worker_settings(config: Config, roles: Sequence[str] = ROLES) -> WorkerSettings:
    """Return what runs in the environments' worker processes, and its limits.

    `roles`: of messages that may follow an answer, which the chat template decides.
    """
    environment = config.environment
    return WorkerSettings(
        kind="environment" if environment.path else "function" if environment.function else "command",
        place=environment.path or environment.function,
        command=_agents_command(config, roles) if environment.agent else environment.command,
        python=environment.python,
        num_processes=environment.processes or max(1, (os.cpu_count() or 1) // 2),
        episodes_per_process=environment.episodes_per_process,
        max_episodes_per_process=environment.max_episodes_per_process,
        reset_seconds=environment.reset_seconds,
        step_seconds=environment.step_seconds,
        episode_seconds=environment.episode_seconds,
        memory_limit_mb=environment.memory_limit_mb,
        max_processes=environment.max_processes,
        on_step_timeout=environment.on_step_timeout,
        with_state=environment.resume == "state",
        max_branches=environment.max_branches,
        variables=environment.variables,
    )


def _agents_command(config: Config, roles: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a worker whose episodes are programs of environment.agent."""
    environment, first = config.environment, config.environment.agent[0]
    if first == "python":
        first = environment.python or sys.executable
    settings = {
        "command": [first, *environment.agent[1:]],
        "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p,
        "other_sampling": environment.other_sampling,
        "max_branches": environment.max_branches,
        "roles": roles,
        "template": {
            "path": str(config.model.path.absolute()),
            "trust_remote_code": config.model.trust_remote_code,
            "name": config.data.template,
            "options": config.data.chat_template_options,
            "history": config.turns.history,
        },
    }
    return (sys.executable, "-m", AGENTS, json.dumps(settings))
