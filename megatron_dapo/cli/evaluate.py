"""Evaluation of a Hugging Face directory without training: one process, the embedded engine, the recipe's protocol."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_dapo.checkpoints.huggingface import HFCheckpoint
from megatron_dapo.config import Config
from megatron_dapo.engines.embedded import EmbeddedEngine
from megatron_dapo.evaluation.protocol import EvaluationResult
from megatron_dapo.evaluation.runner import evaluate
from megatron_dapo.recovery.heartbeat import watched_alone
from megatron_dapo.trainer.build_engines import build_local_engine
from megatron_dapo.trainer.build_rollout import (
    evaluation_protocol,
    load_eval_dataset,
    open_verifier_pool,
    read_model_inputs,
)


def evaluate_model(config: Config) -> EvaluationResult:
    """Estimate avg@k, pass@k and cons@k of the model in model.path by the evaluation section."""
    with watched_alone("evaluate"):
        return _evaluate(config, config.model.path)


def _evaluate(config: Config, model_dir: Path) -> EvaluationResult:
    inputs = read_model_inputs(model_dir, config.model.trust_remote_code)
    engine = loaded_engine(config, model_dir)
    with open_verifier_pool(config.reward) as pool:
        dataset = load_eval_dataset(config, inputs, pool)
        protocol = evaluation_protocol(config, str(model_dir), dataset, inputs.stop_tokens, pool.version)
        return evaluate(dataset.prompts, engine, pool, inputs.decode, protocol)


def loaded_engine(config: Config, model_dir: Path) -> EmbeddedEngine:
    """Return an embedded engine that holds the directory's weights."""
    engine = build_local_engine(config, model_dir)
    with HFCheckpoint(model_dir) as source, torch.no_grad():
        for name, parameter in engine.parameters_by_name().items():
            parameter.copy_(source.read_tensor(name))
    engine.set_policy_version(0)
    return engine
