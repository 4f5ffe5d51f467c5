"""The critic: a value for every position, trained along with the policy on a separate layout.

    forward_values(micro_batches)            values without gradients, for advantages
    train_step(micro_batches, loss_fn)       forward, backward, sum over ranks, guarded AdamW step

The value at position t is that of the state after token t, in which token t + 1 is drawn. It has the same index as the
log-prob, advantage and mask of token t + 1 in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_dapo.checkpoints.critic import ValueHeadInit, critic_architecture, initialize_critic_randomly, load_critic
from megatron_dapo.checkpoints.export import ExportReport, export_to_huggingface
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.megatron.schedule import Loss
from megatron_dapo.megatron.trained_model import StepResult, TrainedModel, TrainingSettings
from megatron_dapo.models.architecture import TOKEN_VALUE
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet, all_ranks
from megatron_dapo.types import MicroBatch

# (context-sliced micro-batch, its values [P_local] fp32, its index) -> (scalar loss, scalar sums by name)
ValueLossFunction = Loss[torch.Tensor]


@dataclass(frozen=True)
class CriticSettings(TrainingSettings):
    """`head`: initialization of the value head if the critic starts from a policy."""

    head: ValueHeadInit = field(default_factory=ValueHeadInit)


class MegatronCritic(TrainedModel):
    """One rank's shard of the critic. Methods are collective: all ranks call them, with equally many micro-batches."""

    settings: CriticSettings
    head = TOKEN_VALUE

    @classmethod
    def build(
        cls,
        directory: str | Path,
        layout: ParallelLayout,
        settings: CriticSettings,
        *,
        policy_dir: str | Path | None = None,
        running_models: Sequence[TrainedModel] = (),
        part: RankSet | None = None,
        random_seed: int | None = None,
    ) -> MegatronCritic:
        """Build the critic from a policy, a reward model or a critic (see `checkpoints.critic`), or, given the
        `random_seed` of a random policy of the architecture in `directory`, from that policy's layers.

        Raise ValueError if `directory` holds none of these, or differs from `policy_dir` in architecture or tokenizer.
        """
        rank = (part or all_ranks()).rank

        def load(parameters: Mapping[str, torch.Tensor], tensors: MegatronLayout) -> None:
            if random_seed is None:
                load_critic(directory, tensors, rank, parameters, settings.head)
            else:
                initialize_critic_randomly(random_seed, tensors, rank, parameters, settings.head)

        return cls(critic_architecture(directory, policy_dir), layout, settings, load, running_models, part)

    def forward_values(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        """Compute the values of each micro-batch, fp32 [P_local] in this context rank's token order
        (`slice_for_context`); None on ranks off the last pipeline stage. Values of padding are undefined."""
        return self._forward(micro_batches, _read_values)

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: ValueLossFunction, learning_rate: float
    ) -> StepResult:
        """Make one optimizer step on the sum of the micro-batches' losses over all data and context ranks."""
        return self._step(micro_batches, _read_values, loss_fn, learning_rate)

    def accumulate_gradients(self, micro_batches: Sequence[MicroBatch], loss_fn: ValueLossFunction) -> dict[str, float]:
        """Compute a train_step's gradients without the step and return its summed metrics; see `gradients`."""
        return self._accumulate(micro_batches, _read_values, loss_fn, reduce_fully=True)

    def export(self, target: str | Path, source_dir: str | Path, dtype: torch.dtype | None = None) -> ExportReport:
        """Write a Hugging Face directory, a *ForTokenClassification with one label. `source_dir`: the critic's starting
        point."""
        parameters = {name: parameter.detach() for name, parameter in self.named_local_parameters().items()}
        return export_to_huggingface(
            target, source_dir, self.tensors, parameters, self.part.collective_group, dtype=dtype
        )


def _read_values(chunk: GPTModel, output: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Read [P_local] from the last chunk's output [1, P_local, 1]."""
    return output[0, :, 0]
