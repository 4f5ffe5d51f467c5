"""Problems and protocol of a run's evaluations from its configuration."""

from __future__ import annotations

import importlib.metadata
from functools import partial
from typing import Any

from megatron_dapo.config.schema import Config
from megatron_dapo.data.dataset import PromptDataset, load_eval_sources, load_sources, prompt_template
from megatron_dapo.data.model_inputs import ModelInputs
from megatron_dapo.data.sources import eval_sources
from megatron_dapo.data.template import StopTokens
from megatron_dapo.evaluation.protocol import EvaluationProtocol


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
    )
