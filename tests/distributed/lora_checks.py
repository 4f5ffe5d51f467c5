"""LoRA against autograd of the merged weights: with W' = W + s B A, dA = s B^T dW' and dB = s dW' A^T; workers run in gloo ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from actor_checks import Reference, build_actor, fill_local, model_settings, parity_of, write_reference

from megatron_dapo.checkpoints.load import random_normal
from megatron_dapo.config.model_schema import LoraConfig
from megatron_dapo.megatron import schedule
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
from megatron_dapo.models.lora import LORA_A, LORA_B, WEIGHT
from megatron_dapo.parallel.layout import ParallelLayout

RANK, ALPHA = 3, 4.5
SOME = ("q_proj", "v_proj", "up_proj")  # fused layers of which a part has an adapter
TARGETS = {
    "all": (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    ),
    "some": SOME,
}


def lora(targets: str) -> LoraConfig:
    return LoraConfig(rank=RANK, alpha=ALPHA, targets=SOME if targets == "some" else ())


def drawn_adapters(weights: Mapping[str, torch.Tensor], targets: str) -> dict[str, torch.Tensor]:
    """Adapters in fp64, B not zero, of every matrix of `weights` that is a target."""
    found = {}
    for name, weight in weights.items():
        matrix = name.removesuffix(WEIGHT)
        if matrix.rpartition(".")[2] in TARGETS[targets] and name.endswith(WEIGHT):
            shapes = {LORA_A: (RANK, weight.shape[1]), LORA_B: (weight.shape[0], RANK)}
            found |= {matrix + kind: 0.1 * random_normal(5, matrix + kind, shape).double() for kind, shape in shapes.items()}
    return found


def write_lora_references(directory: Path, cases: Sequence[Mapping[str, Any]]) -> None:
    """Write the reference of each case's model with merged adapters to a directory a set of targets, with the weights before the
    merge."""
    for targets, name in sorted({(case["targets"], case["model"]) for case in cases}):
        (directory / targets).mkdir(exist_ok=True)
        write_reference(directory / targets, name, lambda tensors, targets=targets: _merge(tensors, targets))


def _merge(tensors: dict[str, torch.Tensor], targets: str) -> dict[str, torch.Tensor]:
    base = {name: tensor.clone() for name, tensor in tensors.items()}
    adapters = drawn_adapters(base, targets)
    for matrix in matrices(adapters):
        tensors[matrix + WEIGHT] += ALPHA / RANK * adapters[matrix + LORA_B] @ adapters[matrix + LORA_A]
    return base


def matrices(adapters: Mapping[str, torch.Tensor]) -> list[str]:
    return [name.removesuffix(LORA_A) for name in adapters if name.endswith(LORA_A)]


def adapter_gradients(adapters: Mapping[str, torch.Tensor], merged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of adapters, given those of the merged weights."""
    scale, found = ALPHA / RANK, {}
    for matrix in matrices(adapters):
        a, b, gradient = adapters[matrix + LORA_A], adapters[matrix + LORA_B], merged[matrix + WEIGHT]
        found |= {matrix + LORA_A: scale * b.T @ gradient, matrix + LORA_B: scale * gradient @ a.T}
    return found


def lora_actor(
    want: Reference, layout: ParallelLayout, targets: str, settings: ActorSettings | None = None
) -> MegatronActor:
    """The reference's weights with `drawn_adapters`."""
    actor = build_actor(want, layout, replace(settings or ActorSettings(), lora=lora(targets)))
    with torch.no_grad():
        fill_local(actor.trained_parameters(), actor.trained_tensors, dist.get_rank(), drawn_adapters(want.weights, targets))
    return actor


def parity_of_adapters(arguments: dict[str, Any]) -> list[dict[str, float]]:
    """Worker: errors of each case {"model", "targets", "layout"}, see `actor_checks.parity_of_layouts`."""
    results = []
    for case in arguments["cases"]:
        schedule.MAX_PADDED_SHARE = 0.0
        want = Reference.read(Path(arguments["references"]) / case["targets"], case["model"])
        layout = ParallelLayout(world_size=dist.get_world_size(), **case["layout"])
        settings = ActorSettings(model=model_settings(case), use_distributed_optimizer=case.get("distributed", True))
        actor = lora_actor(want, layout, case["targets"], settings)
        gradients = adapter_gradients(drawn_adapters(want.weights, case["targets"]), want.gradients)
        errors = parity_of(actor, replace(want, gradients=gradients))
        results.append({**errors, "base_gradients": float(has_base_gradients(actor))})
    return results


def has_base_gradients(actor: MegatronActor) -> bool:
    return any(each.requires_grad or hasattr(each, "main_grad") for each in actor.named_local_parameters().values())
