"""What is delivered to the servers of a run: the trainer's parameters as they are, or what FP8 makes of them.

`layouts` once, when the servers are up; `current` at every update. Both are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from megatron_dapo.bridge.fp8_weights import Fp8Weights, LargestOverRanks
from megatron_dapo.bridge.sync_plan import EngineLayout
from megatron_dapo.checkpoints.fp8_layout import Fp8EngineLayout, Fp8SourceLayout, expected_parameters, read_parameters
from megatron_dapo.checkpoints.sglang_layout import SglangLayout
from megatron_dapo.reshard.execution import Buffers
from megatron_dapo.reshard.layout import Layout, TensorSpec

Describe = Callable[[], Sequence[Mapping[str, TensorSpec]]]
"""Asks a server for the parameters of each of its ranks; the answer is on every rank. Collective."""

AsServed = Callable[[], AbstractContextManager[None]]
"""Inside it the trainer's parameters have the values that servers multiply by. Collective."""


class ServedWeights(Protocol):
    """The source side of deliveries on one rank."""

    @property
    def as_served(self) -> AsServed | None:
        """None where servers hold the trainer's values (but for their type)."""

    def layouts(self, engines: SglangLayout, describe: Describe) -> tuple[Layout, EngineLayout]:
        """Both sides of a delivery into `engines`."""

    def current(self) -> Buffers:
        """This rank's buffers at the weights of this moment."""


class TrainedWeights:
    """The parameters as they are, cast on the way."""

    as_served = None

    def __init__(
        self,
        layout: Layout,
        rank: int,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        largest: LargestOverRanks,
    ) -> None:
        """`parameters`: the live ones of this rank, by their names in `layout`."""
        self._layout = layout
        self._parameters = parameters

    def layouts(self, engines: SglangLayout, describe: Describe) -> tuple[Layout, EngineLayout]:
        return self._layout, engines

    def current(self) -> Buffers:
        return {name: tensor.detach() for name, tensor in self._parameters().items()}


class QuantizedWeights:
    """Those that the servers hold in FP8 are rounded to it, all others cast."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        largest: LargestOverRanks,
    ) -> None:
        self._trained = TrainedWeights(layout, rank, parameters, largest)
        self._master = layout
        self._rank = rank
        self._largest = largest
        self._source: Fp8SourceLayout | None = None

    def layouts(self, engines: SglangLayout, describe: Describe) -> tuple[Layout, EngineLayout]:
        """ValueError where a server holds what cannot be filled, see `read_parameters`."""
        served = Fp8EngineLayout(engines, read_parameters(engines, describe()))
        self._source = Fp8SourceLayout(self._master, served)
        return self._source, served

    def current(self) -> Fp8Weights:
        assert self._source is not None, "the servers have not been asked yet"
        return Fp8Weights(self._source, self._rank, self._trained.current(), self._largest)

    def as_served(self) -> AbstractContextManager[None]:
        return self.current().in_place()


WEIGHTS: Mapping[str, Callable[..., ServedWeights]] = {"none": TrainedWeights, "fp8": QuantizedWeights}


def _as_it_is(engines: SglangLayout) -> EngineLayout:
    return engines


def _in_fp8(engines: SglangLayout) -> EngineLayout:
    return Fp8EngineLayout(engines, expected_parameters(engines))


# What servers will hold, before there are any, and the trainer's side of a delivery to them.
EXPECTED_ENGINES: Mapping[str, Callable[[SglangLayout], EngineLayout]] = {"none": _as_it_is, "fp8": _in_fp8}
EXPECTED_SOURCES: Mapping[str, Callable[[Layout, Any], Layout]] = {
    "none": lambda master, engines: master,
    "fp8": Fp8SourceLayout,
}
