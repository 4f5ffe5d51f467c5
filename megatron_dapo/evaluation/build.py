"""Problems and protocol of a run's evaluations from its configuration."""

from __future__ import annotations

import hashlib
import importlib.metadata
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dapo.config.schema import Config
from megatron_dapo.data.dataset import PromptDataset, load_eval_sources, load_sources, prompt_template
from megatron_dapo.data.model_inputs import ModelInputs
from megatron_dapo.data.sources import eval_sources
from megatron_dapo.data.template import StopTokens
from megatron_dapo.evaluation.protocol import EvaluationProtocol
from megatron_dapo.hooks import source_file


def load_eval_dataset(config: Config, inputs: ModelInputs, pool: Any) -> PromptDataset:
    """Load the held-out problems, each once. Those that are held out of the training prompts are left out if they are too
    long, as in training."""
    template = prompt_template(config.data, inputs.tokenizer, inputs.vocab_size)
    load = partial(load_sources, deduplicate=True) if config.data.holds_out else load_eval_sources
    load = partial(load, begin_episodes=config.environment.is_on)
    sources, limit = eval_sources(config.data), config.data.max_prompt_tokens
    return load(sources, template, limit, validate_answers=pool.validate_answers)


def evaluation_protocol(
    config: Config, model: str, dataset: PromptDataset, stop_tokens: StopTokens, verifier_version: str
) -> EvaluationProtocol:
    """Return the record of everything besides the model that affects an evaluation's score. The version is the embedded engine's:
    only a server that runs tells its own."""
    evaluation, report = config.evaluation, dataset.report
    return EvaluationProtocol(
        model=model,
        dataset_path=", ".join(path for path, _ in report.files),
        dataset_sha256=", ".join(digest for _, digest in report.files),
        num_dataset_rows=report.num_rows,
        num_problems=report.num_prompts,
        num_samples=evaluation.num_samples,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        max_new_tokens=config.evaluation_response_tokens,
        stop_token_ids=stop_tokens.token_ids,
        seed=config.run.seed,
        engine=config.rollout.engine,
        engine_version=f"transformers {importlib.metadata.version('transformers')}",
        chat_template_sha256=report.template_hash,
        verifier=config.reward.verifier,
        verifier_version=verifier_version,
        **_environment(config),
    )


# Keys of [environment] on which an episode's end or reward depends.
_LIMITS = (
    *("max_turns", "max_turn_tokens", "max_context_tokens", "reset_seconds", "step_seconds", "episode_seconds"),
    *("on_step_timeout", "memory_limit_mb", "max_processes", "success", "other_sampling"),
)


def _environment(config: Config) -> dict[str, str]:
    """Return the protocol's fields of an environment. Files are known by their names and contents, wherever they are."""
    environment, turns = config.environment, config.turns
    if not environment.is_on:
        return {}
    place = environment.path or environment.function
    module, _, name = place.rpartition(":")
    words = [place and f"{Path(module).name}:{name}", *(Path(word).name for word in (*environment.command, *environment.agent))]
    files = [source_file(module)] if place else [Path(word) for word in (*environment.command, *environment.agent)]
    digest = hashlib.sha256()
    for file in files:
        if file is not None and file.is_file():
            digest.update(file.read_bytes())
    return {
        "environment": " ".join(filter(None, words)),
        "environment_sha256": digest.hexdigest(),
        "environment_limits": ", ".join(f"{key} = {getattr(environment, key)!r}" for key in _LIMITS),
        "turns": f"history = {turns.history}, parser = {turns.parser}, on_cut = {turns.on_cut}",
    }
