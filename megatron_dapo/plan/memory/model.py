"""Bytes of a trained model on a rank: weights, gradients, optimizer, activations and log-prob head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_dapo.config.model_schema import PIECE_ELEMENTS
from megatron_dapo.config.schema import Config
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.plan.memory.activations import Kernels, activation_bytes, is_fp8, working_bytes
from megatron_dapo.plan.memory.adapters import rank_adapters
from megatron_dapo.plan.memory.head import head_bytes
from megatron_dapo.plan.memory.parameters import (
    FP32,
    ITEM_SIZES,
    NUM_MOMENTS,
    RankParameters,
    attention_parameters,
    float32_parameters,
    never_trained,
    optimizer_share,
    own_share,
    rank_parameters,
)
from megatron_dapo.rounding import GIB

# An FP8 weight is kept twice, for the forward and for the backward pass, at one byte per element each.
FP8_COPIES = 2
# Transformer Engine's buffers [tokens of a context rank, hidden size], one per product of a layer and its gradients.
OVERLAP_BUFFERS = 12
# No formula gives these: orders of magnitude measured on one H100 with single-rank groups, rounded up.
CUDA_CONTEXT = int(0.5 * GIB)
WORKSPACES = 1 * GIB  # Transformer Engine and cuBLAS


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of one model on a rank."""

    weights: int
    gradients: int = 0
    main_params: int = 0
    moments: int = 0
    # Main params on the device during an optimizer step if the others are in host memory; None: all stay on the device.
    piece: int | None = None
    activations: int = 0  # kept for the backward pass, at their peak
    working: int = 0  # gradients inside the layer whose backward pass is running
    head: int = 0  # the log-prob head
    overlap: int = 0  # buffers of tp_comm_overlap, shared by all models of a process
    forward: int = 0  # a pass without gradients, including the head
    saved: int = 0  # its part of a checkpoint, copied to host memory while the run continues

    @property
    def optimizer(self) -> int:
        """Bytes of fp32 main params and moments."""
        return self.main_params + self.moments

    @property
    def state_parts(self) -> dict[str, int]:
        """Bytes on the device between steps if nothing is offloaded, by component."""
        parts = {"weights": self.weights, "gradients": self.gradients}
        return parts if self.piece is not None else {**parts, "main_params": self.main_params, "moments": self.moments}

    @property
    def training_parts(self) -> dict[str, int]:
        """Bytes at the peak of a training step, by component; the peak is in the passes or in the update."""
        passes = {"activations": self.activations, "working": self.working, "head": self.head}
        is_update = self.piece is not None and self.piece > sum(passes.values())
        return self.state_parts | ({"update": self.piece or 0} if is_update else passes)

    @property
    def state(self) -> int:
        """Bytes on the device between steps if nothing is offloaded."""
        return sum(self.state_parts.values())

    @property
    def training(self) -> int:
        """Bytes at the peak of a training step."""
        return sum(self.training_parts.values())

    def resident(self, offload: str) -> int:
        """Return the bytes on the GPU while other models or engines use it."""
        return {"none": self.state, "optimizer": self.weights, "all": 0}[offload]

    def on_host(self, offload: str) -> int:
        """Return the bytes of the host copies; gradients have none."""
        optimizer = self.optimizer if offload != "none" or self.piece is not None else 0
        return optimizer + (self.weights if offload == "all" else 0)

    def moved(self, offload: str) -> int:
        """Return the bytes that are offloaded and brought back."""
        return self.on_host(offload) - (self.optimizer if self.piece is not None else 0)


def model_memory(
    config: Config,
    architecture: ModelArchitecture,
    processes: int,
    has_value_head: bool = False,
    kernels: Kernels = "transformer_engine",
) -> ModelMemory:
    """Return the memory of the policy, or of the critic given `as_critic`, on the rank of `processes` that needs most."""
    stages: Iterable[int] = range(config.parallel.pp_size)
    if len(architecture.kinds_of_layers) == 1:
        # Stages after the second need not be checked: they have fewer micro-batches in flight, and neither embedding nor
        # head. The second may have more layers than the first.
        stages = {0, min(1, config.parallel.pp_size - 1), config.parallel.pp_size - 1}
    return max(
        (stage_memory(config, architecture, processes, stage, has_value_head, kernels) for stage in stages),
        key=lambda memory: memory.training,
    )


def stage_memory(
    config: Config,
    architecture: ModelArchitecture,
    processes: int,
    stage: int,
    has_value_head: bool = False,
    kernels: Kernels = "transformer_engine",
) -> ModelMemory:
    """Return the memory of a trained model on each rank of a pipeline stage."""
    held = rank_parameters(architecture, config.parallel, stage, has_value_head)
    frozen = never_trained(architecture, config.parallel, stage)
    if has_value_head and config.critic.freeze:  # its attention
        frozen += attention_parameters(architecture, config.parallel, stage)
    trained = replace(held, dense=held.dense - frozen)
    has_adapters = bool(config.model.lora.rank) and not has_value_head
    if has_adapters:
        trained = rank_adapters(config, architecture, stage)
    float32 = (FP32 - ITEM_SIZES[config.model.dtype]) * float32_parameters(architecture, config.parallel, stage)
    main_param = FP32 if config.model.dtype != "float32" else 0  # an fp32 weight is its own
    share = optimizer_share(config.parallel, trained, processes)
    has_head = stage == config.parallel.pp_size - 1 and not has_value_head
    working, forward = working_bytes(config, architecture, kernels)
    head = head_bytes(config, architecture, kernels) if has_head else 0
    bytes_each = main_param + NUM_MOMENTS * FP32
    largest = max(
        trained.vocabulary, 2 * architecture.intermediate_size * architecture.hidden_size // config.parallel.tp_size
    )
    return ModelMemory(
        weights=_weight_bytes(config, held) + float32 + (ITEM_SIZES[config.model.dtype] * trained.total if has_adapters else 0),
        gradients=FP32 * trained.total,
        main_params=main_param * share,
        moments=NUM_MOMENTS * FP32 * share,
        piece=bytes_each * min(share, max(PIECE_ELEMENTS, largest)) if config.optimizer.on_host else None,
        activations=activation_bytes(config, architecture, stage, kernels),
        working=working,
        head=head,
        overlap=_overlap_bytes(config, architecture),
        forward=forward + (head_bytes(config, architecture, kernels, trains=False) if has_head else 0),
        saved=(ITEM_SIZES[config.model.dtype] + bytes_each) * own_share(config.parallel, trained if has_adapters else held, processes),
    )


def _overlap_bytes(config: Config, architecture: ModelArchitecture) -> int:
    if not config.megatron.get("tp_comm_overlap"):
        return 0
    tokens = config.training.micro_batch_tokens // config.parallel.cp_size
    return OVERLAP_BUFFERS * tokens * architecture.hidden_size * ITEM_SIZES[config.model.dtype]


def _weight_bytes(config: Config, held: RankParameters) -> int:
    item, linear = ITEM_SIZES[config.model.dtype], held.dense + held.experts
    if not is_fp8(config):
        return item * held.total
    if config.precision.fp8_param:
        return FP8_COPIES * linear + item * held.vocabulary
    return item * held.total + FP8_COPIES * linear
