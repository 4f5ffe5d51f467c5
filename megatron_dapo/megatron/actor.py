"""The policy that is trained.

    forward_logprobs(micro_batches)          old and reference log-probs: no gradients
    train_step(micro_batches, loss_fn)       forward, backward, sum over ranks, guarded AdamW step

Both run the same chunks by the same schedule with the same head, so log-probs of the same weights are the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_dapo.checkpoints.architecture import LANGUAGE_MODEL, ModelArchitecture
from megatron_dapo.checkpoints.load import load_from_huggingface
from megatron_dapo.checkpoints.megatron_layout import MegatronLayout
from megatron_dapo.megatron.head import HeadSettings, TokenOutputs, implementation, token_outputs
from megatron_dapo.megatron.implementations import describe, implementations
from megatron_dapo.megatron.model import unwrap
from megatron_dapo.megatron.schedule import Loss, ReadOutput
from megatron_dapo.megatron.trained_model import Loader, StepResult, TrainedModel, TrainingSettings
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet, all_ranks
from megatron_dapo.types import MicroBatch

logger = logging.getLogger(__name__)

__all__ = ["ActorSettings", "LossFunction", "MegatronActor", "StepResult", "TokenOutputs"]

# (context-sliced micro-batch, its outputs, its index) -> (scalar loss, scalar sums by name)
LossFunction = Loss[TokenOutputs]


@dataclass(frozen=True)
class ActorSettings(TrainingSettings):
    """`chunk_tokens`: tokens whose logits live at a time (None: chosen by size). `head_implementation`: of the log-prob
    head, see `ops.lm_head.select`."""

    chunk_tokens: int | None = None
    head_implementation: str = "auto"


class MegatronActor(TrainedModel):
    """One rank's part of the policy. Methods are collective: all ranks call them, with equally many micro-batches."""

    settings: ActorSettings

    def __init__(
        self,
        architecture: ModelArchitecture,
        layout: ParallelLayout,
        settings: ActorSettings,
        load: Loader,
        beside: Sequence[TrainedModel] = (),
        part: RankSet | None = None,
    ) -> None:
        """See `TrainedModel`."""
        assert architecture.head == LANGUAGE_MODEL, f"a policy has a language-model head, not {architecture.head}"
        super().__init__(architecture, layout, settings, load, beside, part)
        if self.rank == 0:
            table = describe(implementations(self.config, settings.head_implementation))
            logger.info("what each operation of the policy uses:\n%s", table)
        if layout.coordinates(self.rank).pipeline == layout.pipeline - 1:
            chosen = implementation(
                unwrap(self.chunks[-1]), self._head(temperature=1.0)
            )  # refuses what cannot run here
            logger.info("log-prob head: %s (%s)", chosen.name, chosen.reason)

    @classmethod
    def build(
        cls,
        model_folder: str | Path,
        layout: ParallelLayout,
        settings: ActorSettings,
        beside: Sequence[TrainedModel] = (),
        part: RankSet | None = None,
    ) -> MegatronActor:
        """The actor with the architecture and weights of a Hugging Face folder."""

        ranks = part or all_ranks()

        def load(parameters: Mapping[str, torch.Tensor], tensors: MegatronLayout) -> None:
            load_from_huggingface(model_folder, tensors, ranks.rank, parameters)

        return cls(ModelArchitecture.from_directory(model_folder), layout, settings, load, beside, part)

    def forward_logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[TokenOutputs | None]:
        """Log-probs and entropies of the targets of each micro-batch, [P_local] in this context rank's order of tokens
        (`slice_for_context`); None on ranks off the last pipeline stage."""
        return self._forward(micro_batches, self._outputs(temperature))

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, temperature: float, learning_rate: float
    ) -> StepResult:
        """One optimizer step on the sum of the micro-batches' losses over all data and context ranks."""
        return self._step(micro_batches, self._outputs(temperature), loss_fn, learning_rate)

    def accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, temperature: float
    ) -> dict[str, float]:
        """The gradients of a train_step without the step; `gradients` then gives them. Returns the summed metrics."""
        return self._accumulate(micro_batches, self._outputs(temperature), loss_fn, reduce_fully=True)

    def _outputs(self, temperature: float) -> ReadOutput[TokenOutputs]:
        return partial(token_outputs, settings=self._head(temperature))

    def _head(self, temperature: float) -> HeadSettings:
        chunk_tokens, asked = self.settings.chunk_tokens, self.settings.head_implementation
        return HeadSettings(self.architecture.vocab_size, temperature, chunk_tokens, asked)
