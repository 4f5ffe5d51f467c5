"""What `megatron-dapo pretrain-value` runs: the configuration of a run with what pretraining does otherwise."""

from __future__ import annotations

from pathlib import Path

from megatron_dapo.config.schema import Config

SUBFOLDER = "value_pretraining"  # of the run's folder, and of its checkpoints' where those have one of their own


def pretraining_config(config: Config, folder: Path | None = None) -> Config:
    """Every group is learned from, whole, none is evaluated, and the policy makes no step. `folder`: where it writes.

    It never writes where the run itself will: a run that found these checkpoints would go on from them. A critic.path that
    names what pretraining is to write is where the run starts from; pretraining itself then starts from the policy.
    """
    folder = folder or config.run.output_dir / SUBFOLDER
    start = config.critic.path
    if start and Path(start).resolve() == (folder / "critic").resolve():
        start = ""
    checkpoints = str(Path(config.checkpoint.output_dir) / SUBFOLDER) if config.checkpoint.output_dir else ""
    changes = {
        "run": {
            "output_dir": folder,
            "total_steps": config.value_pretraining.max_steps,
            "max_generation_steps": 0,
        },
        "rollout": {"filter_groups": False},
        "data": {"train_paths": config.value_pretraining.train_paths or config.data.train_paths},
        # Returns are those of whole responses, and there are no advantages.
        "algorithm": {"name": "vapo"},
        "advantage_estimation": {"lambda_rule": "fixed"},
        # The policy's, which makes no step: how its rate would move over so few says nothing.
        "optimizer": {"schedule": "constant"},
        "critic": {"path": start, "warmup_train_steps": 0},
        "checkpoint": {"output_dir": checkpoints},
        "evaluation": {"interval": 0, "at_start": False, "at_end": False},
    }
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    )
