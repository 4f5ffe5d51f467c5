"""The source side of a weight sync on one trainer rank: the actor's parameters, unchanged or quantized to FP8.

`layouts` is called once, when the servers are up; `current` is called at every sync. Both are collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from megatron_dapo.bridge.fp8_weights import Fp8Weights
from megatron_dapo.bridge.transports.adapters import AdapterEngineLayout
from megatron_dapo.checkpoints.layouts.fp8 import Fp8EngineLayout, Fp8SourceLayout, expected_parameters, read_parameters
from megatron_dapo.checkpoints.layouts.sglang import SglangLayout
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import Layout, TensorSpec

if TYPE_CHECKING:
    from megatron_dapo.bridge.sync_plan import EngineLayout
    from megatron_dapo.megatron.actor import MegatronActor
    from megatron_dapo.parallel.coordination import Coordination


class WeightSource:
    """Supplies the actor's parameters unchanged; the transports cast them to the engines' types.

    Args:
        actor: supplies its layout (`tensors`) and this rank's live weights (`served_parameters()`).
        rank: this rank's number in the layout.
        coordination: the actor's ranks; None for a single process.
    """

    needs_description = False  # True if `layouts` needs a description of a server's parameters

    def __init__(self, actor: MegatronActor, rank: int, coordination: Coordination | None) -> None:
        self._actor = actor
        self._rank = rank
        self._coordination = coordination

    def layouts(
        self, engines: SglangLayout, described: Sequence[Mapping[str, TensorSpec]] = ()
    ) -> tuple[Layout, EngineLayout]:
        """Return both sides of a sync into `engines`; `described`: the parameters of each rank of one server."""
        return self._actor.tensors, engines

    def current(self) -> Buffers:
        """Return this rank's buffers with the current weights."""
        return self._actor.served_parameters()

    def as_served(self) -> AbstractContextManager[None]:
        """Return a context in which the actor's parameters have the values that engines compute with. Here the two
        differ only in type."""
        return nullcontext()


class AdapterSource(WeightSource):
    """Supplies only the actor's LoRA adapters, whole to every engine rank."""

    def layouts(
        self, engines: SglangLayout, described: Sequence[Mapping[str, TensorSpec]] = ()
    ) -> tuple[Layout, EngineLayout]:
        """See `WeightSource.layouts`."""
        layout, size = self._actor.trained_tensors, engines.tensor_parallel
        return layout, AdapterEngineLayout(layout.tensors, size, engines.num_ranks // size)

    def current(self) -> Buffers:
        """Return this rank's buffers with the current adapters."""
        return {name: parameter.detach() for name, parameter in self._actor.trained_parameters().items()}


class Fp8WeightSource(WeightSource):
    """Quantizes the parameters that servers hold in FP8 and leaves all others unchanged."""

    needs_description = True
    _source: Fp8SourceLayout | None = None

    def layouts(
        self, engines: SglangLayout, described: Sequence[Mapping[str, TensorSpec]] = ()
    ) -> tuple[Layout, EngineLayout]:
        """Raise ValueError if a server holds a parameter that cannot be filled, see `read_parameters`."""
        served = Fp8EngineLayout(engines, read_parameters(engines, described))
        self._source = Fp8SourceLayout(self._actor.tensors, served)
        return self._source, served

    def current(self) -> Fp8Weights:
        """Return the quantized weights. Collective: blocks cut between ranks share one scale."""
        assert self._source is not None, "layouts comes before current"
        return Fp8Weights(self._source, self._rank, super().current(), self._largest)

    def as_served(self) -> AbstractContextManager[None]:
        """See `WeightSource.as_served`."""
        return self.current().in_place()

    def _largest(self, magnitudes: torch.Tensor) -> None:
        if self._coordination is not None:
            magnitudes.copy_(self._coordination.maximum(magnitudes, "the magnitudes of shared blocks"))


SOURCES: Mapping[str, type[WeightSource]] = {"none": WeightSource, "fp8": Fp8WeightSource}  # keyed by quantization


def expected_layouts(
    quantization: str, engines: SglangLayout, trainer: Layout | None = None
) -> tuple[Layout | None, EngineLayout]:
    """Return both sides of a sync before any server can be asked; without `trainer`, only the engines' side."""
    if quantization == "none":
        return trainer, engines
    served = Fp8EngineLayout(engines, expected_parameters(engines))
    return (None if trainer is None else Fp8SourceLayout(trainer, served)), served
