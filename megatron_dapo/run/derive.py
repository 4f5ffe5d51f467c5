"""The configurations that are derived from a run's: of value pretraining, fine-tuning, evaluation and sampling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_dapo.config.algorithm_schema import AlgorithmConfig, CriticConfig
from megatron_dapo.config.data_schema import InjectionConfig
from megatron_dapo.config.derive import derive
from megatron_dapo.config.loss_schema import PpoClipLossConfig
from megatron_dapo.config.rollout_schema import RolloutConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.data.files import count_rows

# Below the run's directory, and below its checkpoint directory if that is separate.
SUBDIRECTORY = "value_pretraining"
SFT_SUBDIRECTORY = "sft"


def pretraining_config(config: Config, directory: Path | None = None) -> Config:
    """Return a configuration that learns from every whole group, evaluates none and never updates the policy.

    `directory`: where it writes.

    It never writes where the run itself will: a run that found these checkpoints would continue from them. A critic.path that
    names what pretraining is to write is where the run starts from; pretraining itself then starts from the policy.
    """
    directory = directory or config.run.output_dir / SUBDIRECTORY
    start = config.critic.path
    if start and Path(start).resolve() == (directory / "critic").resolve():
        start = ""
    checkpoints = str(Path(config.checkpoint.output_dir) / SUBDIRECTORY) if config.checkpoint.output_dir else ""
    changes = {
        "run": {
            "output_dir": directory,
            "total_steps": config.value_pretraining.max_steps,
            "max_generation_steps": 0,
            "max_train_seconds": 0.0,
        },
        "rollout": {"filter_groups": False, "dynamic_sampling": "hard"},
        "distillation": {"teachers": ()},
        "data": (
            {"train_paths": config.value_pretraining.train_paths, "sources": ()}
            if config.value_pretraining.train_paths
            else {}
        ),
        # Returns are computed on whole responses, and there are no advantages.
        "algorithm": {
            "name": "vapo",
            "kl_loss_coefficient": 0.0,
            "kl_reward_coefficient": 0.0,
            "gkl": {"coefficient": 0.0},
        },
        "advantage_estimation": {
            "lambda_rule": "fixed",
            "policy_lambda": 1.0,
            "critic_lambda": 1.0,
            "whiten": True,
            "clip": 0.0,
        },
        # The policy's, which makes no step: how its rate would move over so few says nothing.
        "optimizer": {"schedule": "constant"},
        "critic": {"path": start, "warmup_train_steps": 0},
        "checkpoint": {"output_dir": checkpoints},
        "evaluation": {"interval": 0, "at_start": False, "at_end": False, "background": False},
    }
    return derive(config, changes)


def for_evaluation(config: Config) -> Config:
    """Return the configuration without what only training needs, which may suit other machines or no longer exist."""
    changes: dict[str, Any] = {
        "telemetry": {"references": ()},
        "critic": CriticConfig(),
        "distillation": {"teachers": ()},
        # No training run evaluates: the data of both is the same.
        "evaluation": {"interval": 0, "at_start": False, "at_end": False, "background": False},
    }
    if config.data.eval_paths:
        changes["data"] = {"train_paths": config.data.eval_paths, "sources": ()}
    if config.sglang.urls:
        # No weights are brought to servers that run already, so no transport is refused.
        changes["sglang"] = {"placement": "disaggregated", "weight_sync_transport": "disk"}
    return derive(config, changes)


def for_sampling(config: Config) -> Config:
    """Return the same with the training prompts."""
    data = {"train_paths": config.data.train_paths, "sources": config.data.sources}
    return derive(for_evaluation(config), {"data": data})


def with_rollout_sampling(config: Config, num_samples: int) -> Config:
    """Return the configuration whose evaluations sample `num_samples` responses to a prompt as training does."""
    rollout = config.rollout
    sampling = {
        "num_samples": num_samples,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_response_tokens": rollout.max_response_tokens,
    }
    return derive(config, {"evaluation": sampling})


def sft_config(config: Config, directory: Path | None = None) -> Config:
    """Return the configuration with which the recipe's policy learns given responses by maximum likelihood.

    `directory`: where the run writes; default: sft in run.output_dir. ValueError if a data file cannot be read.
    """
    section, rollout = config.sft, config.rollout
    paths = section.train_paths or config.data.train_paths
    num_rows = sum(map(count_rows, paths))
    checkpoints = str(Path(config.checkpoint.output_dir) / SFT_SUBDIRECTORY) if config.checkpoint.output_dir else ""
    changes = {
        "run": {
            "output_dir": directory or config.run.output_dir / SFT_SUBDIRECTORY,
            "total_steps": max(1, math.ceil(num_rows * section.epochs / section.batch_size)),
            "max_generation_steps": 0,
        },
        "data": {
            "train_paths": paths,
            "sources": () if paths else config.data.sources,
            "held_out_share": 0.0,  # its rows are responses
            "max_epochs": 0,
            "injection": InjectionConfig(),
        },
        "distillation": {"teachers": ()},
        # The engine serves evaluations, which have their own sampling.
        "rollout": RolloutConfig(
            engine=rollout.engine,
            slots_per_rank=rollout.slots_per_rank,
            max_response_tokens=rollout.max_response_tokens,
            prompts_per_step=section.batch_size,
            group_size=1,
            filter_groups=False,
        ),
        "reward": {"shadow_verifier": ""},
        "evaluation": {"background": False},
        "training": {"mini_batch_prompts": section.batch_size, "epochs": 1, "stream": "off", "old_logprobs": "snapshot"},
        "checkpoint": {"output_dir": checkpoints},
        "telemetry": {"references": ()},
    }
    algorithm = AlgorithmConfig(name="sft", loss=PpoClipLossConfig(aggregation=section.aggregation))
    return derive(config, {**changes, "algorithm": algorithm, "optimizer": section.optimizer.model_dump()})
