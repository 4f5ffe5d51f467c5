"""The base class of policy and critic: this rank's shard of a model, its optimizer, and the training step.

A subclass chooses what to read from the last chunk's output; everything else (chunks, data-parallel wrapper, schedules,
sums over ranks, guarded step, exact state) is here. The model is always in training mode and has no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from megatron.core.fp8_utils import get_fp8_recipe

from megatron_dapo.checkpoints.adapters import MergedWeights, initialize_adapters, load_adapters
from megatron_dapo.checkpoints.formats.peft import AdapterDescription
from megatron_dapo.checkpoints.layouts.lora import ADAPTER, LoraLayout
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.config.model_schema import LoraConfig, OptimizerConfig
from megatron_dapo.megatron import schedule, state
from megatron_dapo.megatron.host_memory import HostMemory, Moved, own_memory
from megatron_dapo.megatron.lora import attach_adapters
from megatron_dapo.megatron.model import build_chunks, freeze, named_local_parameters
from megatron_dapo.megatron.model_config import DTYPES, ModelSettings, transformer_config
from megatron_dapo.megatron.model_state import ModelState
from megatron_dapo.megatron.optimizer import build_optimizer, finish_param_gathers, guarded_step, wrap_data_parallel
from megatron_dapo.megatron.parallel_state import Groups, ParallelState, initialize_parallel_state
from megatron_dapo.megatron.precision import load_scales, scales
from megatron_dapo.megatron.schedule import ReadOutput, sum_metrics
from megatron_dapo.megatron.state import loading_buffers, round_into, set_main_params, share_parameters
from megatron_dapo.megatron.tensor_overlap import initialize_overlap
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet, all_ranks
from megatron_dapo.types import MicroBatch

FP8 = "fp8"  # kind of delayed-scaling state in `state_shards`
# Kinds of tensors that `offload` moves. Gradients are not needed between steps, so they are discarded, not copied.
OFFLOADS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "none": frozenset(),
        "optimizer": frozenset({"gradients", "optimizer"}),
        "all": frozenset({"gradients", "optimizer", "weights"}),
    }
)
EVERYTHING = ("gradients", "optimizer", "weights")

Loader = Callable[[Mapping[str, torch.Tensor], Any], None]  # (fp32 buffers by local name, their layout)
Output = TypeVar("Output")


@dataclass(frozen=True)
class TrainingSettings:
    """Settings that policy and critic share."""

    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    use_distributed_optimizer: bool = True  # shard the optimizer's state over data x context ranks
    seed: int = 0  # seeds the random-number tracker
    offload: str = "none"  # a name of OFFLOADS
    freeze: tuple[str, ...] = ()  # parts that keep their weights, see `model.freeze`
    is_frozen: bool = False  # only for passes without gradients: no gradients, main params or optimizer
    lora: LoraConfig = LoraConfig()  # adapters to train instead of weights if its rank is above 0; in a frozen model, those of its path are merged
    fixed_tokens: int = 0  # pad every micro-batch to this length; 0: no fixed length, or a common one in a pipeline
    collective_timeout_s: float = 1800.0  # a rank fails after waiting this long for the others


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step."""

    metrics: dict[str, float]  # sums over micro-batches, data and context ranks
    grad_norm: float  # norm over the whole model, before clipping
    applied: bool  # False: a gradient was not finite on some rank, and no rank changed anything


class TrainedModel:
    """One rank's shard of a model. Methods are collective: all its ranks call them, with equally many micro-batches.

    `rank` counts the ranks of the model's layout, which may be a subset of the world. After `offload`, the first call
    that needs a tensor brings it back to the device.
    """

    head: ClassVar[str]  # head of the architectures that the subclass trains
    base: tuple[str, str] = ("", "")  # path and fingerprint of the model that adapters belong to, on rank 0
    replays_routing = False  # use the engine's choice of experts if micro-batches contain it
    reads_supports = False  # its head renormalizes over what tokens were drawn from

    def __init__(
        self,
        architecture: ModelArchitecture,
        layout: ParallelLayout,
        settings: TrainingSettings,
        load: Loader,
        running_models: Sequence[TrainedModel] = (),
        part: RankSet | None = None,
        base: TrainedModel | None = None,
    ) -> None:
        """Build on the ranks of `part` (None: all processes). `load` fills fp32 buffers of the named local parameters,
        which hold NaN until then. The buffers become the main params, and rounded to the model's type, the parameters.
        With `base`, a model of the same directory and layout, adapters are trained next to its weights, and nothing is loaded.

        Models with the same layout share process groups. `running_models` lists models on other layouts that will run again and
        keep their groups; groups of any other model on another layout are destroyed (`initialize_parallel_state`).
        """
        assert architecture.head == self.head, (
            f"{type(self).__name__} has the head {self.head}, not {architecture.head}"
        )
        self.architecture = architecture
        self.layout = layout
        self.settings = settings
        self._host = HostMemory()
        self.part = part or all_ranks()
        self.rank = self.part.rank
        self.tensors = megatron_layout(architecture, layout, DTYPES[settings.model.dtype])
        lora = settings.lora
        self.adapters = LoraLayout(self.tensors, lora.rank, lora.targets) if lora.rank and not settings.is_frozen else None
        self.parallel_state: ParallelState = initialize_parallel_state(
            layout,
            settings.seed,
            settings.collective_timeout_s,
            keep=[model.parallel_state for model in running_models],
            part=self.part,
        )
        self.config = transformer_config(architecture, layout, settings.model)
        if self.config.tp_comm_overlap:
            initialize_overlap(self.config, layout, settings.fixed_tokens)
        schedule.sum_gradients(self.config)
        chunks = build_chunks(architecture, layout, self.config, self.rank)
        exact: state.Buffers = {}
        if base is None:
            exact = self._load(named_local_parameters(chunks), self.tensors, load)
        else:
            share_parameters(named_local_parameters(chunks), base.named_local_parameters())
        if self.adapters is not None:
            attach_adapters(chunks, self.adapters, settings.lora.scale, self.rank)
            added = {name: each for name, each in named_local_parameters(chunks).items() if ADAPTER in name}
            exact = self._load(added, self.adapters, self._initialize_adapters)
        if "weights" in OFFLOADS[settings.offload]:
            own_memory(named_local_parameters(chunks).values())
        self._gathers_are_due = self._is_on_host = False
        self.optimizer: Any = None
        if settings.is_frozen:
            for chunk in chunks:
                chunk.requires_grad_(False)
            self.chunks: Sequence[Any] = chunks
            return
        freeze(chunks, settings.freeze)
        distributed, options = settings.use_distributed_optimizer, settings.model.megatron
        self.chunks = wrap_data_parallel(chunks, self.config, distributed, options)
        self._is_on_host = settings.optimizer.on_host
        if self._is_on_host:
            # All main params are created on the device; freeing the gradients makes room for them.
            self._host.discard(self._tensors("gradients"))
        self.optimizer = build_optimizer(self.chunks, self.config, settings.optimizer, distributed, self.part, options)
        set_main_params(self.trained_parameters(), self.optimizer, exact)
        if self._is_on_host:
            self._host.offload(self._tensors("optimizer"))

    def _load(
        self, parameters: Mapping[str, torch.nn.Parameter], tensors: MegatronLayout | LoraLayout, load: Loader
    ) -> state.Buffers:
        """Load the parameters and return the loaded values that they cannot hold exactly."""
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        difference = sorted(set(shapes.items()) ^ set(tensors.local_shapes(self.rank).items()))
        assert not difference, f"megatron-core and the layout disagree on local parameters: {difference[:4]}"
        buffers = loading_buffers(parameters)
        load(buffers, tensors)
        return round_into(parameters, buffers)

    def _initialize_adapters(self, buffers: Mapping[str, torch.Tensor], tensors: LoraLayout) -> None:
        if self.settings.lora.path:
            load_adapters(Path(self.settings.lora.path), tensors, self.rank, buffers)
        else:
            initialize_adapters(self.settings.seed, tensors, self.rank, buffers)

    @property
    def groups(self) -> Groups:
        return self.parallel_state.groups

    @property
    def trained_tensors(self) -> MegatronLayout | LoraLayout:
        """The layout of what is trained: the adapters, or without them the model."""
        return self.adapters or self.tensors

    def adapter_description(self) -> AdapterDescription | None:
        """Return what the adapters are and which model they belong to; None without adapters."""
        lora = self.settings.lora
        if self.adapters is None:
            return None
        return AdapterDescription(lora.rank, lora.alpha, self.adapters.targets, *self.base)

    def named_local_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's live parameters by "{virtual pipeline stage}.{path inside that chunk}", without adapters."""
        return {name: each for name, each in self._parameters().items() if ADAPTER not in name}

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's live parameters of `trained_tensors`, by their local names."""
        return {name: each for name, each in self._parameters().items() if self.adapters is None or ADAPTER in name}

    def served_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's part of the model that generates: the parameters, with the adapters merged into them."""
        parameters = {name: parameter.detach() for name, parameter in self._parameters().items()}
        if self.adapters is None:
            return parameters
        return MergedWeights(self.adapters, self.rank, parameters, self.settings.lora.scale)

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        self.onload(("weights",))
        self.finish_steps()
        return named_local_parameters(self.chunks)

    def copy_weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's trained parameters in host memory."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.trained_parameters().items()}

    @contextmanager
    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Compute with `weights`, of `copy_weights`, inside the block. The optimizer's main params stay what they are."""
        current = self.copy_weights()
        self._put_weights(weights)
        try:
            yield
        finally:
            self._put_weights(current)

    def _put_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.trained_parameters().items():
                parameter.copy_(weights[name])

    def take_weights(self, other: TrainedModel) -> None:
        """Copy the parameters of a model of the same architecture, layout and type, with its adapters merged."""
        self._put_weights(other.served_parameters())

    def finish_steps(self) -> None:
        """Gather the weights of the last step if `overlap_param_gather` left that to the next forward pass."""
        if self._gathers_are_due:
            finish_param_gathers(self.chunks)
        self._gathers_are_due = False

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the live fp32 gradients after `accumulate_gradients`, summed over data and context ranks; frozen parameters
        have none."""
        self.onload(("gradients",))
        parameters: dict[str, Any] = self.trained_parameters()
        return {name: each.main_grad for name, each in parameters.items() if each.requires_grad}

    @property
    def moved(self) -> Moved:
        """Bytes and seconds of all offloading and onloading so far."""
        return self._host.moved

    def offload(self, keep: Sequence[str] = ()) -> None:
        """Move the kinds of tensors named by settings.offload to host memory, except those in `keep`. An optimizer that
        is already on the host stays there."""
        self.finish_steps()
        kinds = OFFLOADS[self.settings.offload].difference(keep)
        if "gradients" in kinds:
            self._host.discard(self._tensors("gradients"))
        self._host.offload(
            [tensor for kind in ("optimizer", "weights") if kind in kinds for tensor in self._tensors(kind)]
        )

    def onload(self, kinds: Sequence[str] = EVERYTHING) -> None:
        """Move these kinds of tensors back to the device if they are offloaded, but not an optimizer kept on the
        host."""
        if not self._host.is_empty:
            moving = [kind for kind in kinds if not (kind == "optimizer" and self._is_on_host)]
            self._host.onload([tensor for kind in moving for tensor in self._tensors(kind)])

    @contextmanager
    def on_device(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Keep these tensors of the model on the device inside the block, then move them back to where they were."""
        away = [tensor for tensor in tensors if self._host.is_offloaded(tensor)]
        self._host.onload(away)
        try:
            yield
        finally:  # If this checkpoint is damaged, another may be loaded next.
            self._host.offload(away, release=False)

    def _tensors(self, kind: str) -> list[torch.Tensor]:
        parameters: dict[str, Any] = named_local_parameters(self.chunks)  # megatron-core adds `main_grad` to them
        if kind == "optimizer":
            return list(state.optimizer_tensors(parameters, self.optimizer))
        if kind == "gradients":
            return [parameter.main_grad for parameter in parameters.values() if parameter.requires_grad]
        return list(parameters.values())

    def state_shards(self) -> dict[str, torch.Tensor]:
        """Return this rank's whole state as flat tensors (see `megatron.state`). They are live; for offloaded tensors they
        are the host copies."""
        self.finish_steps()
        parameters = named_local_parameters(self.chunks)
        trained = {name: each for name, each in parameters.items() if self.adapters is None or ADAPTER in name}
        found = state.state_shards(trained, self.optimizer)
        tensors = {name: self._to_save(tensor) for name, tensor in found.items()}
        return {**tensors, **{f"{FP8}/{name}": tensor for name, tensor in scales(self.chunks).items()}}

    def _to_save(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._host.is_offloaded(tensor):
            return self._host.read(tensor)
        # A file writer reads memory through numpy, and memory that numpy has seen cannot be freed by resizing.
        pinned = tensor.device.type == "cpu" and OFFLOADS[self.settings.offload]
        return tensor.clone() if pinned else tensor

    @cached_property
    def saved_state(self) -> ModelState:
        """Return this rank's part of the saved state."""
        return ModelState(self)

    def loading_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors to load this rank's state into; see `state.loading_state`. Tensors of an optimizer on the
        host are offloaded: fill them inside `on_device`."""
        self.onload(("optimizer", "weights"))
        host = self._host if self._is_on_host else None
        return state.loading_state(self.trained_parameters(), self.optimizer, host)

    def finish_loading(self, loaded: Mapping[str, torch.Tensor], steps: Mapping[str, float]) -> None:
        """Put loaded tensors in place; see `state.finish_loading`."""
        state.finish_loading(self.trained_parameters(), self.optimizer, loaded, steps)
        self._settle()

    def _settle(self) -> None:
        """Offload what was loaded, and drop the host copies that it replaced."""
        self.offload()
        if self._is_on_host:
            self._host.offload(self._tensors("optimizer"))
        self._host.forget_others(tensor for kind in EVERYTHING for tensor in self._tensors(kind))

    def load_rank_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the rank-specific part of `state_shards`: random states and scales of FP8 modules."""
        state.set_random_states(_of_kind("random", tensors))
        saved = _of_kind(FP8, tensors)
        if saved:
            load_scales(self.chunks, saved, get_fp8_recipe(self.config))

    def _forward(self, micro_batches: Sequence[MicroBatch], read: ReadOutput[Output]) -> list[Output | None]:
        """Return `read` of each micro-batch, without gradients; None on ranks off the last pipeline stage."""
        self.onload(("weights",))
        self.parallel_state.activate()
        prepared = schedule.prepare(micro_batches, self.layout, self.rank, self.settings.fixed_tokens)
        return schedule.forward(self.chunks, prepared, read)

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        read: ReadOutput[Output],
        loss_fn: schedule.Loss[Output],
        reduce_fully: bool = False,
    ) -> dict[str, float]:
        """Compute the gradients of the sum of all losses over data and context ranks; return the summed metrics."""
        self.onload(("gradients", "weights"))
        self.parallel_state.activate()
        prepared = schedule.prepare(micro_batches, self.layout, self.rank, self.settings.fixed_tokens)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        metrics = schedule.forward_backward(self.chunks, prepared, read, loss_fn, reduce_fully)
        return sum_metrics(metrics, self.groups)

    def _step(
        self,
        micro_batches: Sequence[MicroBatch],
        read: ReadOutput[Output],
        loss_fn: schedule.Loss[Output],
        learning_rate: float,
    ) -> StepResult:
        """Run `_accumulate` and one guarded optimizer step."""
        metrics = self._accumulate(micro_batches, read, loss_fn)
        self.onload(("optimizer",))
        grad_norm, applied = guarded_step(
            self.optimizer, learning_rate, self.settings.optimizer, self.chunks, self._host, self.part.group
        )
        self._gathers_are_due = self.chunks[0].ddp_config.overlap_param_gather
        return StepResult(metrics, grad_norm, applied)


def _of_kind(kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = f"{kind}/"
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
