"""What the policy and the critic have in common: this rank's part of a model, its optimizer, and what a step does.

A subclass says what it reads from the last chunk's output; everything else (chunks, data-parallel wrapper, schedules,
sums over ranks, guarded step, exact state) is here. The model is always in training mode; there is no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from megatron.core.fp8_utils import get_fp8_recipe

from megatron_dapo.checkpoints.architecture import ModelArchitecture
from megatron_dapo.checkpoints.megatron_layout import MegatronLayout, megatron_layout
from megatron_dapo.megatron import schedule, state
from megatron_dapo.megatron.host_memory import HostMemory, Moved, own_memory
from megatron_dapo.megatron.main_params import load_exactly, set_main_params
from megatron_dapo.megatron.metrics import sum_metrics
from megatron_dapo.megatron.model import build_chunks, named_local_parameters
from megatron_dapo.megatron.model_config import DTYPES, ModelSettings, transformer_config
from megatron_dapo.megatron.optimizer import OptimizerSettings, build_optimizer, guarded_step, wrap_data_parallel
from megatron_dapo.megatron.parallel_state import Groups, initialize_parallel_state
from megatron_dapo.megatron.scales import load_scales, scales
from megatron_dapo.megatron.schedule import ReadOutput
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet, all_ranks
from megatron_dapo.types import MicroBatch

FP8 = "fp8"  # kind of the state of delayed scaling in `state_shards`
# What a model that rests keeps in host memory. Gradients mean nothing between steps, so they are given up.
OFFLOADS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "none": frozenset(),
        "optimizer": frozenset({"gradients", "optimizer"}),
        "all": frozenset({"gradients", "optimizer", "weights"}),
    }
)
EVERYTHING = ("gradients", "optimizer", "weights")

Loader = Callable[[Mapping[str, torch.Tensor], MegatronLayout], None]
Output = TypeVar("Output")


@dataclass(frozen=True)
class TrainingSettings:
    """`seed`: of the random-number tracker. `offload`: what leaves the device while the model rests, see `OFFLOADS`.

    `collective_timeout_s`: how long a rank waits for the others before it fails instead of hanging.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    seed: int = 0
    offload: str = "none"
    collective_timeout_s: float = 1800.0


@dataclass(frozen=True)
class StepResult:
    """`metrics`: sums over micro-batches, data and context ranks. `grad_norm`: whole model, before clipping."""

    metrics: dict[str, float]
    grad_norm: float
    applied: bool  # False: the gradients were not finite somewhere, and no rank changed anything


class TrainedModel:
    """One rank's part of a model. Methods are collective: all its ranks call them, with equally many micro-batches.

    `rank` numbers the ranks of the model, which are those of the layout and may be a part of the world. A model rests
    from `rest` on; what it sent to host memory then comes back with the first call that needs it.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        layout: ParallelLayout,
        settings: TrainingSettings,
        load: Loader,
        beside: Sequence[TrainedModel] = (),
        part: RankSet | None = None,
    ) -> None:
        """Build on the ranks of `part` (None: all processes). `load` fills fp32 buffers of the named local parameters, all
        NaN until then; main params are what it gives, parameters that rounded to the model's type.

        Models of one layout share their process groups. `beside` are models on other layouts that will run again: their
        groups stay; those of other models on another layout are destroyed (`initialize_parallel_state`).
        """
        self.architecture = architecture
        self.layout = layout
        self.settings = settings
        if settings.offload not in OFFLOADS:
            raise ValueError(f"offload {settings.offload!r}; there are {', '.join(OFFLOADS)}")
        self._host = HostMemory()
        self.part = part or all_ranks()
        self.rank = self.part.rank
        self.tensors = megatron_layout(architecture, layout, DTYPES[settings.model.dtype])
        self.parallel_state = initialize_parallel_state(
            layout,
            settings.seed,
            settings.collective_timeout_s,
            keep=[model.parallel_state for model in beside],
            part=self.part,
        )
        self.config = transformer_config(architecture, layout, settings.model)
        schedule.sum_gradients(self.config)
        chunks = build_chunks(architecture, layout, self.config, self.rank)
        self._check_parameters(named_local_parameters(chunks))
        exact = load_exactly(named_local_parameters(chunks), lambda buffers: load(buffers, self.tensors))
        if "weights" in OFFLOADS[settings.offload]:
            own_memory(named_local_parameters(chunks).values())
        self.chunks = wrap_data_parallel(chunks, self.config, settings.optimizer)
        self.optimizer = build_optimizer(self.chunks, self.config, settings.optimizer, self.part)
        set_main_params(self.named_local_parameters(), self.optimizer, exact)

    def _check_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        expected = self.tensors.local_shapes(self.rank)
        difference = sorted(set(shapes.items()) ^ set(expected.items()))
        assert not difference, f"megatron-core and the layout disagree on local parameters: {difference[:4]}"

    @property
    def groups(self) -> Groups:
        return self.parallel_state.groups

    def named_local_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by "{virtual pipeline stage}.{path inside that chunk}", live and on the device until the
        model rests."""
        self.come_back(("weights",))
        return named_local_parameters(self.chunks)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Live fp32 gradients after `accumulate_gradients`, summed over data and context ranks."""
        self.come_back(("gradients",))
        return {name: parameter.main_grad for name, parameter in self.named_local_parameters().items()}

    @property
    def moved(self) -> Moved:
        """What went to host memory and came back so far."""
        return self._host.moved

    def rest(self, keep: Sequence[str] = ()) -> None:
        """Let go of what settings.offload names until it is needed again; what is in `keep` stays where it is."""
        kinds = OFFLOADS[self.settings.offload].difference(keep)
        if "gradients" in kinds:
            self._host.forget(self._tensors("gradients"))
        self._host.send(
            [tensor for kind in ("optimizer", "weights") if kind in kinds for tensor in self._tensors(kind)]
        )

    def come_back(self, kinds: Sequence[str] = EVERYTHING) -> None:
        """Bring these kinds of tensors back to the device, where they are away."""
        if not self._host.is_empty:
            self._host.bring_back([tensor for kind in kinds for tensor in self._tensors(kind)])

    def _tensors(self, kind: str) -> list[torch.Tensor]:
        parameters = named_local_parameters(self.chunks)
        if kind == "optimizer":
            return list(state.optimizer_tensors(parameters, self.optimizer))
        return [one if kind == "weights" else one.main_grad for one in parameters.values()]

    def state_shards(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's whole state as flat tensors, and a JSON-able description of it (see `megatron.state`). The tensors are
        live; those of a model that rests are the copies in host memory."""
        found, description = state.state_shards(named_local_parameters(self.chunks), self.optimizer)
        tensors = {name: self._to_save(tensor) for name, tensor in found.items()}
        return {**tensors, **{f"{FP8}/{name}": tensor for name, tensor in scales(self.chunks).items()}}, description

    def _to_save(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._host.is_away(tensor):
            return self._host.read(tensor)
        # Who writes a file looks at memory through numpy, after which it could not be given back.
        pinned = tensor.device.type == "cpu" and OFFLOADS[self.settings.offload]
        return tensor.clone() if pinned else tensor

    def load_state_shards(self, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None:
        """Go on exactly where `state_shards` was taken, on the same layout. ValueError where the state does not fit."""
        self.come_back()
        state.load_state_shards(self.named_local_parameters(), self.optimizer, tensors, description)
        saved = {key.removeprefix(f"{FP8}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{FP8}/")}
        if saved:
            load_scales(self.chunks, saved, lambda module: module.init_fp8_meta_tensors(get_fp8_recipe(self.config)))
        self.rest()

    def _forward(self, micro_batches: Sequence[MicroBatch], read: ReadOutput[Output]) -> list[Output | None]:
        """What `read` makes of each micro-batch without gradients; None on ranks off the last pipeline stage."""
        self.come_back(("weights",))
        self.parallel_state.activate()
        prepared = schedule.prepare(micro_batches, self.layout, self.rank)
        return schedule.forward(self.chunks, prepared, read)

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        read: ReadOutput[Output],
        loss_fn: schedule.Loss[Output],
        reduce_fully: bool = False,
    ) -> dict[str, float]:
        """The gradients of the sum of the micro-batches' losses over all data and context ranks; summed metrics."""
        self.come_back(("gradients", "weights"))
        self.parallel_state.activate()
        prepared = schedule.prepare(micro_batches, self.layout, self.rank)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = schedule.forward_backward(self.chunks, prepared, read, loss_fn, reduce_fully)
        return sum_metrics(parts, self.groups)

    def _step(
        self,
        micro_batches: Sequence[MicroBatch],
        read: ReadOutput[Output],
        loss_fn: schedule.Loss[Output],
        learning_rate: float,
    ) -> StepResult:
        """`_accumulate` and one guarded optimizer step."""
        metrics = self._accumulate(micro_batches, read, loss_fn)
        self.come_back(("optimizer",))
        grad_norm, applied = guarded_step(self.optimizer, learning_rate, self.settings.optimizer, self.part.group)
        return StepResult(metrics, grad_norm, applied)
