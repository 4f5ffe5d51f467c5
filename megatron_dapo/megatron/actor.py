"""The policy that is trained: this rank's part of the model, its optimizer, and what is done with them each step.

    forward_logprobs(micro_batches)          old and reference log-probs: no gradients
    train_step(micro_batches, loss_fn)       forward, backward, sum over ranks, guarded AdamW step

Both run the same chunks by the same schedule with the same head, so log-probs of the same weights are the same numbers.
The model is always in training mode; there is no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.bridge.architecture import ModelArchitecture
from megatron_dapo.bridge.load import load_from_huggingface
from megatron_dapo.bridge.megatron_layout import MegatronLayout, megatron_layout
from megatron_dapo.megatron import schedule, state
from megatron_dapo.megatron.head import HeadSettings, TokenOutputs
from megatron_dapo.megatron.metrics import sum_metrics
from megatron_dapo.megatron.model import build_chunks, named_local_parameters
from megatron_dapo.megatron.model_config import DTYPES, ModelSettings, transformer_config
from megatron_dapo.megatron.optimizer import OptimizerSettings, build_optimizer, guarded_step, wrap_data_parallel
from megatron_dapo.megatron.parallel_state import Groups, initialize_parallel_state
from megatron_dapo.megatron.schedule import LossFunction
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.types import MicroBatch

__all__ = ["ActorSettings", "LossFunction", "MegatronActor", "StepResult", "TokenOutputs"]

Loader = Callable[[Mapping[str, torch.Tensor], MegatronLayout], None]


@dataclass(frozen=True)
class ActorSettings:
    """`chunk_tokens`: tokens whose logits live at a time (None: chosen by size). `seed`: of the random-number tracker.

    `collective_timeout_s`: how long a rank waits for the others before it fails instead of hanging.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    chunk_tokens: int | None = None
    seed: int = 0
    collective_timeout_s: float = 1800.0


@dataclass(frozen=True)
class StepResult:
    """`metrics`: sums over micro-batches, data and context ranks. `grad_norm`: whole model, before clipping."""

    metrics: dict[str, float]
    grad_norm: float
    applied: bool  # False: the gradients were not finite somewhere, and no rank changed anything


class MegatronActor:
    """One rank's part of the policy. Methods are collective: all ranks call them, with equally many micro-batches."""

    def __init__(
        self, architecture: ModelArchitecture, layout: ParallelLayout, settings: ActorSettings, load: Loader
    ) -> None:
        """Build on the default process group. `load` fills the named local parameters, NaN until then."""
        self.architecture = architecture
        self.layout = layout
        self.settings = settings
        self.rank = dist.get_rank()
        self.tensors = megatron_layout(architecture, layout, DTYPES[settings.model.dtype])
        self.groups: Groups = initialize_parallel_state(layout, settings.seed, settings.collective_timeout_s)
        self.config = transformer_config(architecture, layout, settings.model)
        schedule.sum_gradients(self.config)
        chunks = build_chunks(architecture, layout, self.config, self.rank)
        self._check_parameters(named_local_parameters(chunks))
        load({name: parameter.data for name, parameter in named_local_parameters(chunks).items()}, self.tensors)
        self.chunks = wrap_data_parallel(chunks, self.config, settings.optimizer)
        self.optimizer = build_optimizer(self.chunks, self.config, settings.optimizer)

    @classmethod
    def build(cls, model_folder: str | Path, layout: ParallelLayout, settings: ActorSettings) -> MegatronActor:
        """The actor with the architecture and weights of a Hugging Face folder."""

        def load(parameters: Mapping[str, torch.Tensor], tensors: MegatronLayout) -> None:
            load_from_huggingface(model_folder, tensors, dist.get_rank(), parameters)

        return cls(ModelArchitecture.from_folder(model_folder), layout, settings, load)

    def _check_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        expected = self.tensors.local_shapes(self.rank)
        difference = sorted(set(shapes.items()) ^ set(expected.items()))
        assert not difference, f"megatron-core and the layout disagree on local parameters: {difference[:4]}"

    def named_local_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by "{virtual pipeline stage}.{path inside that chunk}", live."""
        return named_local_parameters(self.chunks)

    def weights_changed(self) -> None:
        """Tell the optimizer that the parameters were written from outside: fp32 masters are taken from them again."""
        self.optimizer.reload_model_params()

    def forward_logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[TokenOutputs | None]:
        """Log-probs and entropies of the targets of each micro-batch, [P_local] in this context rank's order of tokens
        (`slice_for_context`); None on ranks off the last pipeline stage."""
        prepared = schedule.prepare(micro_batches, self.layout, self.rank)
        return schedule.forward(self.chunks, prepared, self._head(temperature))

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, temperature: float, learning_rate: float
    ) -> StepResult:
        """One optimizer step on the sum of the micro-batches' losses over all data and context ranks."""
        metrics = self._accumulate(micro_batches, loss_fn, temperature)
        grad_norm, applied = guarded_step(self.optimizer, learning_rate, self.settings.optimizer)
        return StepResult(metrics, grad_norm, applied)

    def accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, temperature: float
    ) -> dict[str, float]:
        """The gradients of a train_step without the step; `gradients` then gives them. Returns the summed metrics."""
        return self._accumulate(micro_batches, loss_fn, temperature, reduce_fully=True)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Live fp32 gradients after `accumulate_gradients`, summed over data and context ranks."""
        return {name: parameter.main_grad for name, parameter in self.named_local_parameters().items()}

    def state_shards(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's whole state as flat live tensors, and a JSON-able description of it (see `megatron.state`)."""
        return state.state_shards(self.named_local_parameters(), self.optimizer)

    def load_state_shards(self, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> None:
        """Go on exactly where `state_shards` was taken, on the same layout. ValueError where the state does not fit."""
        state.load_state_shards(self.named_local_parameters(), self.optimizer, tensors, description)

    def _accumulate(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, temperature: float, reduce_fully: bool = False
    ) -> dict[str, float]:
        prepared = schedule.prepare(micro_batches, self.layout, self.rank)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = schedule.forward_backward(self.chunks, prepared, self._head(temperature), loss_fn, reduce_fully)
        return sum_metrics(parts, self.groups)

    def _head(self, temperature: float) -> HeadSettings:
        return HeadSettings(self.architecture.vocab_size, temperature, self.settings.chunk_tokens)
