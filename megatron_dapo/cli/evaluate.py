"""Evaluation of a Hugging Face folder without training: one process, the embedded engine, the recipe's protocol."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from megatron_dapo.bridge.huggingface import HuggingFaceFolder
from megatron_dapo.config import Config
from megatron_dapo.data.dataset import PromptDataset, load_eval_prompts
from megatron_dapo.data.template import StopTokens, resolve_stop_token_ids
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.evaluation.protocol import EvaluationProtocol, EvaluationResult
from megatron_dapo.evaluation.runner import EvaluationProgress, evaluate
from megatron_dapo.rewards.pool import VerifierPool


def evaluate_folder(
    config: Config, model_folder: Path, progress: Callable[[EvaluationProgress], None]
) -> EvaluationResult:
    """avg@k and its like of the model in `model_folder`, by the evaluation section of `config`."""
    trust = config.model.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(str(model_folder), trust_remote_code=trust)
    dataset = load_eval_prompts(config.data.eval_paths, tokenizer, config.data.max_prompt_tokens, config.data.template)
    protocol = _protocol(config, model_folder, dataset, _stop_tokens(model_folder, tokenizer, trust))
    engine = loaded_engine(config, model_folder)
    reward = config.reward
    with VerifierPool(
        reward.verifier,
        reward.num_workers,
        reward.timeout_seconds,
        reward.memory_limit_mb,
        reward.correct,
        reward.incorrect,
    ) as pool:
        return evaluate(
            dataset.prompts,
            engine,
            pool.score_many,
            lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
            protocol(pool.version),
            progress=progress,
        )


def loaded_engine(config: Config, model_folder: Path) -> EmbeddedEngine:
    """An embedded engine that holds the folder's weights."""
    settings = EmbeddedEngineSettings(
        max_slots=config.rollout.slots_per_rank,
        max_length=config.data.max_prompt_tokens + config.evaluation_response_tokens,
        dtype=getattr(torch, config.model.dtype),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    engine = EmbeddedEngine.from_folder(model_folder, settings, trust_remote_code=config.model.trust_remote_code)
    with HuggingFaceFolder(model_folder) as source:
        for name, parameter in engine.parameters_by_name().items():
            parameter.copy_(source.read_tensor(name))
    engine.set_policy_version(0)
    return engine


def _stop_tokens(model_folder: Path, tokenizer: Any, trust_remote_code: bool) -> StopTokens:
    config = AutoConfig.from_pretrained(str(model_folder), trust_remote_code=trust_remote_code)
    has_file = (model_folder / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(str(model_folder)).eos_token_id if has_file else None
    return resolve_stop_token_ids(config.eos_token_id, generation, tokenizer.eos_token_id)


def _protocol(
    config: Config, model_folder: Path, dataset: PromptDataset, stops: StopTokens
) -> Callable[[str], EvaluationProtocol]:
    evaluation, report = config.evaluation, dataset.report

    def with_verifier(version: str) -> EvaluationProtocol:
        return EvaluationProtocol(
            model=str(model_folder),
            dataset_path=", ".join(path for path, _ in report.files),
            dataset_sha256=", ".join(digest for _, digest in report.files),
            num_dataset_rows=report.num_rows,
            num_problems=report.num_prompts,
            num_samples=evaluation.num_samples,
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
            max_new_tokens=config.evaluation_response_tokens,
            stop_token_ids=stops.token_ids,
            seed=config.run.seed,
            engine="embedded",
            engine_version=f"transformers {importlib.metadata.version('transformers')}",
            chat_template_sha256=report.template_hash,
            verifier=config.reward.verifier,
            verifier_version=version,
        )

    return with_verifier
