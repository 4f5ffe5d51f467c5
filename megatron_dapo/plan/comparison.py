"""Planned against measured seconds and memory of a run's first steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.plan.cluster import Cluster
from megatron_dapo.plan.device import GPUS, Gpu
from megatron_dapo.plan.memory import RunMemory, run_memory
from megatron_dapo.plan.step import plan_step
from megatron_dapo.rounding import GIB

PLAN = "plan.json"
COMPARED_STEP = 2  # the second step of an attempt: the first one compiles and captures

# A planned phase -> the phases of the loop that do its work.
MEASURED: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate",),
    "log_probs": ("logprobs",),
    "train": ("train",),
    "train_critic": ("values", "train_critic"),
    "offload": ("offload",),
    "weight_update": ("weight_sync",),
}


def known_gpu(device_name: str) -> Gpu | None:
    """Return the GPU whose name is a word in CUDA's device name; None if its rates are unknown."""
    words = device_name.replace("-", " ").split()
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


@dataclass(frozen=True)
class PlannedRun:
    """A run on GPUs with known rates."""

    config: Config
    architecture: ModelArchitecture
    processes: int
    cluster: Cluster
    gpu: Gpu

    @classmethod
    def of(cls, config: Config, processes: int, cluster: Cluster, device_name: str) -> PlannedRun | None:
        """Return the run, None if the plan does not know the device."""
        gpu = known_gpu(device_name)
        if gpu is None or not cluster.gpus_per_node:
            return None
        return cls(config, read_architecture(config.model.path), processes, cluster, gpu)

    @cached_property
    def memory(self) -> RunMemory:
        """Planned memory of every kind of GPU, by phase and component."""
        return run_memory(self.config, self.architecture, self.processes, self.cluster)

    def against(self, metrics: Mapping[str, float], peak_bytes: int) -> dict[str, Any]:
        """Return pairs of planned and measured: seconds by phase and of the step, bytes of rank 0's tensors at their peak.

        The plan uses the mean length of the step's responses.
        """
        mean = metrics["rollout/response_tokens_mean"]
        plan = plan_step(self.config, self.architecture, self.processes, self.cluster, self.gpu, max(1.0, mean))
        seconds = {
            phase: (plan.of_phase(phase), sum(metrics[f"time/{name}"] for name in MEASURED[phase]))
            for phase in plan.seconds
        }
        step = metrics["time/step"] - metrics["time/evaluate"] - metrics["time/checkpoint"]
        models = [plan.memory.policy, *([plan.memory.critic] if plan.memory.critic else [])]
        peak = max(model.training for model in models)
        return {"seconds": seconds, "step": (plan.total, step), "peak_bytes": (peak, peak_bytes)}


def comparison_line(found: Mapping[str, Any]) -> str:
    """Return the pairs of `PlannedRun.against` as one line."""
    planned, measured = found["step"]
    phases = ", ".join(f"{phase} {one[0]:.1f} / {one[1]:.1f}" for phase, one in found["seconds"].items())
    peak = " / ".join(f"{num_bytes / GIB:.1f}" for num_bytes in found["peak_bytes"])
    return f"planned / measured: step {planned:.1f} / {measured:.1f} s ({phases}); peak of rank 0 {peak} GiB"


def comparison_json(train_step: int, found: Mapping[str, Any]) -> str:
    """Return the pairs of `PlannedRun.against` as the text of plan.json."""
    return json.dumps({"train_step": train_step, "line": comparison_line(found), **found}) + "\n"
