"""What a checkpoint of a run holds, so that the run goes on bit for bit as if it had never stopped.

rank_00000.safetensors, rank_00000.json   a rank's parameters, fp32 main params, moments, steps and random states
critic_rank_00000.*                       the same of the critic, where there is one, by its own ranks' numbers
run.json                                  counters, and what was measured so far
collector.json, collector.safetensors     prompt stream, replay buffer and unfinished responses; their tokens as tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.recovery.checkpoint_store import (
    Agree,
    Checkpoint,
    CheckpointStore,
    CheckpointWriter,
    save_checkpoint,
)
from megatron_dapo.rollout.serialization import join_state, split_state


class Stateful(Protocol):
    """An actor whose rank-local state can be taken and put back."""

    def state_shards(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]: ...

    def load_state_shards(self, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None: ...


class JsonStateful(Protocol):
    """Something whose whole state is JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class RunProgress:
    """Counters of a run, and what it has measured; part of every checkpoint."""

    train_step: int = 0  # rollout batches trained; the learning-rate schedule and TensorBoard count these
    train_seconds: float = 0.0  # time in steps, over all attempts
    num_samples: int = 0  # responses trained on
    generation_step: int = 0  # generation rounds begun
    num_generated_tokens: int = 0
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)  # train step -> headline metrics
    mismatch_trend: dict[str, Any] = field(default_factory=dict)  # state of the alarm; empty before the first step


@dataclass
class CriticState:
    """What is saved of a critic. `model` is None on ranks that hold nothing of it."""

    model: Stateful | None
    counters: Any  # a dataclass
    layout: ParallelLayout
    rank: int  # among the critic's


@dataclass
class RunState:
    """Everything that is saved. `collector` exists on rank 0 only, `actor` on the ranks that hold the policy."""

    actor: Stateful | None
    progress: RunProgress
    learner_counters: Any  # a dataclass
    collector: JsonStateful | None
    layout: ParallelLayout
    rank: int  # in the world, and among the policy's
    num_ranks: int  # of the world
    critic: CriticState | None = None

    def layouts(self) -> dict[str, Any]:
        """By their names in a checkpoint's metadata."""
        critic = {"critic_layout": asdict(self.critic.layout)} if self.critic else {}
        return {"layout": asdict(self.layout), **critic}

    def models(self) -> dict[str, Stateful]:
        """What this rank holds, by the names of its files."""
        found = {f"rank_{self.rank:05d}": self.actor}
        if self.critic is not None:
            found[f"critic_rank_{self.critic.rank:05d}"] = self.critic.model
        return {name: model for name, model in found.items() if model is not None}

    def counters(self) -> dict[str, Any]:
        """Dataclasses by their names in run.json."""
        critic = {"critic": self.critic.counters} if self.critic else {}
        return {"progress": self.progress, "learner": self.learner_counters, **critic}


class Checkpoints:
    """Saves and restores a RunState. Every method is collective."""

    def __init__(self, store: CheckpointStore, state: RunState, agree: Agree) -> None:
        self._store = store
        self._state = state
        self._agree = agree

    def save(self) -> Path:
        """Write the checkpoint of the current train step; on any failure all ranks raise CheckpointError and older ones are intact."""
        state = self._state
        return save_checkpoint(
            self._store,
            state.progress.train_step,
            self._write,
            metadata={"train_step": state.progress.train_step, **state.layouts()},
            rank=state.rank,
            num_ranks=state.num_ranks,
            agree=self._agree,
        )

    def _write(self, writer: CheckpointWriter) -> None:
        state = self._state
        for name, model in state.models().items():
            tensors, description = model.state_shards()
            writer.save_tensors(f"{name}.safetensors", tensors)
            writer.save_json(f"{name}.json", description)
        if state.collector is not None:
            writer.save_json("run.json", {name: asdict(counters) for name, counters in state.counters().items()})
            document, tensors = split_state(state.collector.state_dict())
            writer.save_json("collector.json", document)
            writer.save_tensors("collector.safetensors", tensors)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint's whole state back. Raises ValueError where it was written under another layout."""
        self.restore_policy(checkpoint)
        if self._state.collector is not None:
            self._state.collector.load_state_dict(collector_state(checkpoint))

    def restore_policy(self, checkpoint: Checkpoint) -> None:
        """Put back the models, their optimizers and the counters, not the data."""
        state = self._state
        for name, current in state.layouts().items():
            _check_layout(checkpoint, name, current)
        for name, model in state.models().items():
            model.load_state_shards(
                checkpoint.load_tensors(f"{name}.safetensors"), checkpoint.load_json(f"{name}.json")
            )
        document = checkpoint.load_json("run.json")
        for name, counters in state.counters().items():
            _restore_dataclass(counters, document[name])


def collector_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Prompt stream, buffer and unfinished responses, also of a checkpoint that holds all of it in JSON."""
    document = checkpoint.load_json("collector.json")
    if "collector.safetensors" not in checkpoint.files:
        return document
    return join_state(document, checkpoint.load_tensors("collector.safetensors"))


def _check_layout(checkpoint: Checkpoint, name: str, current: Mapping[str, Any]) -> None:
    """ValueError where the checkpoint's layout of that name is another one, or it has none."""
    saved = checkpoint.metadata.get(name)
    if saved is None:
        raise ValueError(
            f"checkpoint {checkpoint.directory} holds no {name}: it was written by an algorithm without a critic; start a "
            "new run from its Hugging Face export"
        )
    if saved != current:
        different = {key: (saved.get(key), current[key]) for key in current if saved.get(key) != current[key]}
        raise ValueError(
            f"checkpoint {checkpoint.directory} was written under another {name} (saved, asked for): {different}; "
            "resume with the layout it was written under, or start a new run from its Hugging Face export"
        )


def _restore_dataclass(target: Any, values: Mapping[str, Any]) -> None:
    """Set the saved fields. Fields that an older checkpoint does not have keep their defaults."""
    unknown = sorted(set(values) - set(asdict(target)))
    if unknown:
        raise ValueError(
            f"checkpoint: {type(target).__name__} has no fields {unknown}; the checkpoint was written by another version of "
            "megatron_dapo: resume with that version, or start a new run from its Hugging Face export"
        )
    for name, value in values.items():
        setattr(target, name, value)
