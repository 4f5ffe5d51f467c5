"""Coordinates of ranks in TP x CP x DP x PP and the layers they hold, as arithmetic without process groups."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dapo.models.stages import layers_of_chunk
from megatron_dapo.plan.rank_order import dense_coordinates, expert_coordinates
from megatron_dapo.precision import micro_batch_multiple, sequence_multiple


@dataclass(frozen=True)
class RankCoordinates:
    """A rank's index along every axis."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class ExpertCoordinates:
    """Coordinates of a rank within its pipeline stage for the weights of experts."""

    tensor: int  # part of each expert
    expert: int  # expert-parallel rank
    data: int  # index of the replica


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel axes. Ranks are numbered in Megatron-core's default order "tp-cp-ep-dp-pp", tensor
    fastest.

    Experts use the same ranks of a pipeline stage in a different layout: each expert is cut over `expert_tensor` ranks
    (None: as many as `tensor`), experts are distributed over `expert` ranks, and the remaining factor holds replicas.
    `first_stage_layers`, `last_stage_layers`: layers of the first and last pipeline stage, 0 for an even share.
    `token_multiple`: a rank's tokens of a micro-batch are a multiple of this, as FP8 products require. Raise ValueError
    if the sizes do not fit the world.
    """

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    expert_tensor: int | None = None
    token_multiple: int = 1
    first_stage_layers: int = 0
    last_stage_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "tensor", "pipeline", "virtual_pipeline", "context", "expert", "token_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel layout: {name} = {getattr(self, name)}, must be at least 1")
        if self.world_size % self.model_size:
            raise ValueError(
                f"parallel layout: tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} = "
                f"{self.model_size} does not divide the {self.world_size} processes; "
                f"start a multiple of {self.model_size} processes"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel layout: virtual_pipeline {self.virtual_pipeline} needs pipeline > 1; set pipeline or drop "
                "virtual_pipeline"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "parallel layout: sequence_parallel shards over tensor ranks, but tensor = 1; set tensor > 1 or drop it"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        if self.expert_tensor is None:
            # Experts have as many tensor ranks as dense layers, so they only use ranks of the other axes.
            if (self.data * self.context) % self.expert:
                raise ValueError(
                    f"parallel layout: expert {self.expert} does not divide context x data = "
                    f"{self.data * self.context}; choose a divisor"
                )
            return
        if self.expert_tensor < 1 or self.tensor % self.expert_tensor:
            raise ValueError(
                f"parallel layout: expert_tensor {self.expert_tensor} does not divide tensor = {self.tensor}; "
                "choose a divisor"
            )
        if self.expert_tensor != self.tensor and self.expert == 1:
            raise ValueError(
                f"parallel layout: expert_tensor {self.expert_tensor} other than tensor = {self.tensor} needs expert "
                "> 1: without it Megatron-core sums gradients of experts as those of dense layers"
            )
        if self.stage_size % (self.expert_tensor * self.expert):
            raise ValueError(
                f"parallel layout: expert_tensor {self.expert_tensor} x expert {self.expert} does not divide the "
                f"{self.stage_size} ranks of a pipeline stage; choose sizes whose product does"
            )

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica of the model for one batch shard."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        return self.world_size // self.model_size

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pipeline

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that hold one expert together."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    def coordinates(self, rank: int) -> RankCoordinates:
        assert 0 <= rank < self.world_size, f"rank {rank} outside a world of {self.world_size}"
        return RankCoordinates(*dense_coordinates(rank, self.tensor, self.context, self.data))

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        assert 0 <= rank < self.world_size, f"rank {rank} outside a world of {self.world_size}"
        return ExpertCoordinates(*expert_coordinates(rank, self.stage_size, self.expert_tensor_size, self.expert))

    def layers_of(self, pipeline_rank: int, vp_stage: int, num_layers: int) -> range:
        """Return the global indices of the layers of one model chunk, interleaved over stages under virtual pipelining.
        Raise ValueError if the layers do not divide."""
        ends = self.first_stage_layers, self.last_stage_layers
        try:
            return layers_of_chunk(num_layers, self.pipeline, self.virtual_pipeline, pipeline_rank, vp_stage, *ends)
        except ValueError as error:
            raise ValueError(f"parallel layout: {error}") from None

    @property
    def sequence_alignment(self) -> int:
        """Multiple that every packed sequence is padded to."""
        return sequence_multiple(self.context)

    @property
    def micro_batch_alignment(self) -> int:
        """Multiple that the tokens of a packed micro-batch are padded to."""
        return micro_batch_multiple(self.tensor, self.context, self.sequence_parallel, self.token_multiple)

    def describe(self) -> str:
        """Short label for logs and tables, e.g. "TP2 PP2 VPP2 CP1 DP1 SP"."""
        parts = [f"TP{self.tensor}", f"PP{self.pipeline}"]
        if self.virtual_pipeline > 1:
            parts.append(f"VPP{self.virtual_pipeline}")
        if self.first_stage_layers or self.last_stage_layers:
            parts.append(f"({self.first_stage_layers or 'even'} layers first, {self.last_stage_layers or 'even'} last)")
        parts += [f"CP{self.context}", f"DP{self.data}"]
        if self.expert > 1:
            parts.append(f"EP{self.expert}")
        if self.expert_tensor_size != self.tensor:
            parts.append(f"ETP{self.expert_tensor_size}")
        if self.sequence_parallel:
            parts.append("SP")
        return " ".join(parts)
