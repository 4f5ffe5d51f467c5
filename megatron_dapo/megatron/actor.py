"""The trained policy.

    forward_logprobs(micro_batches)          old and reference log-probs, no gradients
    train_step(micro_batches, loss_fn)       forward, backward, sum over ranks, guarded AdamW step

Both run the same chunks, schedule and head, so equal weights give identical log-probs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_dapo.checkpoints.export import export_adapters
from megatron_dapo.checkpoints.formats.peft import base_fingerprint, require_own_base
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout
from megatron_dapo.checkpoints.load import initialize_randomly, load_from_huggingface
from megatron_dapo.megatron.experts import replay_routing, take_replayed
from megatron_dapo.megatron.implementations import describe, implementations
from megatron_dapo.megatron.lora import without_adapters
from megatron_dapo.megatron.model import output_weight, unwrap
from megatron_dapo.megatron.schedule import Loss, ReadOutput
from megatron_dapo.megatron.trained_model import Loader, StepResult, TrainedModel, TrainingSettings
from megatron_dapo.models.architecture import LANGUAGE_MODEL, ModelArchitecture
from megatron_dapo.models.config_json import read_architecture
from megatron_dapo.ops.divergence import Divergence, vocab_parallel_divergence
from megatron_dapo.ops.lm_head.select import AUTO, Choice, HeadSpec, choose
from megatron_dapo.ops.restricted import sampled_logprobs
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.rank_set import RankSet, all_ranks
from megatron_dapo.types import MicroBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenOutputs:
    """fp32 log-prob of each target and entropy at its position, aligned with the (context-sliced) micro-batch."""

    logprobs: torch.Tensor  # [P_local]
    entropy: torch.Tensor  # [P_local]
    head: HeadInput | None = None  # kept in training, if the settings say so


# (context-sliced micro-batch, its outputs, its index) -> (scalar loss, scalar sums by name)
LossFunction = Loss[TokenOutputs]


@dataclass(frozen=True)
class HeadSettings:
    """Settings of the log-prob head."""

    vocab_size: int  # padding excluded
    temperature: float = 1.0
    chunk_tokens: int | None = None  # tokens whose logits are in memory at once; None: chosen by size
    implementation: str = AUTO  # a name of `ops.lm_head.select.IMPLEMENTATIONS`, or "auto" for the rule there
    keep_bytes: int = 0  # largest memory for logits between a forward and its backward pass
    keeps_input: bool = False  # give the head's input to the loss, to compute a divergence from another model


@dataclass(frozen=True)
class HeadInput:
    """A model's hidden states at the positions that predict response tokens, and its output weight."""

    hidden: torch.Tensor  # [R_local, h]
    weight: torch.Tensor  # [rows, h]
    positions: torch.Tensor | None  # [R_local], out of P_local; None: all
    num_tokens: int  # P_local
    settings: HeadSettings
    group: dist.ProcessGroup | None  # tensor-parallel ranks

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return [P_local] with `values` [R_local] at the positions and 0 at all others."""
        if self.positions is None:
            return values
        return values.new_zeros(self.num_tokens).index_copy(0, self.positions, values)

    def divergence_from(self, reference: HeadInput, gamma: float, weigh_by: str) -> Divergence:
        """Compute both terms [P_local] of the generalized KL towards `reference`, of the same micro-batch."""
        found = vocab_parallel_divergence(
            self.hidden,
            self.weight,
            reference.hidden,
            reference.weight,
            vocab_size=self.settings.vocab_size,
            gamma=gamma,
            weigh_by=weigh_by,
            temperature=self.settings.temperature,
            group=self.group,
            chunk_tokens=self.settings.chunk_tokens,
        )
        return Divergence(self.spread(found.weighted_mse), self.spread(found.cross_entropy))


def head_input(chunk: GPTModel, hidden: torch.Tensor, micro_batch: MicroBatch, settings: HeadSettings) -> HeadInput:
    """Select the head's input from the last chunk's hidden states [1, P_local, h]."""
    group, positions = chunk.pg_collection.tp, micro_batch.response_positions
    rows = hidden[0] if positions is None else hidden[0].index_select(0, positions)
    tensor_group = group if group.size() > 1 else None
    return HeadInput(rows, output_weight(chunk), positions, micro_batch.num_tokens, settings, tensor_group)


def token_outputs(
    chunk: GPTModel, hidden: torch.Tensor, micro_batch: MicroBatch, settings: HeadSettings
) -> TokenOutputs:
    """Compute the policy's outputs from the last chunk's hidden states [1, P_local, h] at `settings.temperature`.

    The head only sees the positions that predict response tokens; outputs are 0 at all others.
    """
    head = head_input(chunk, hidden, micro_batch, settings)
    targets, support = (
        part if part is None or head.positions is None else part.index_select(0, head.positions)
        for part in (micro_batch.targets, micro_batch.support)
    )
    assert targets is not None
    logprobs, entropy = sampled_logprobs(
        head.hidden,
        head.weight,
        targets,
        support,
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        group=head.group,
        implementation=settings.implementation,
        chunk_tokens=settings.chunk_tokens,
        keep_bytes=settings.keep_bytes,
        # A divergence adds another gradient to the weight, through autograd.
        adds_to_main_grad=not settings.keeps_input,
    )
    return TokenOutputs(head.spread(logprobs), head.spread(entropy), head if settings.keeps_input else None)


def implementation(chunk: GPTModel, settings: HeadSettings) -> Choice:
    """Return the implementation that `token_outputs` uses for this last chunk. Raise ValueError if it cannot run
    here."""
    weight = output_weight(chunk)
    return choose(settings.implementation, HeadSpec(weight.device, weight.dtype, weight.size(1), weight.size(0)))


@dataclass(frozen=True)
class ActorSettings(TrainingSettings):
    """Settings of the policy; see `HeadSettings` for the fields it adds."""

    chunk_tokens: int | None = None
    head_implementation: str = AUTO
    head_keep_bytes: int = 0
    keeps_head_input: bool = False  # only in training
    replays_routing: bool = False


class MegatronActor(TrainedModel):
    """One rank's shard of the policy. Methods are collective: all ranks call them, with equally many micro-batches."""

    settings: ActorSettings
    head = LANGUAGE_MODEL
    reads_supports = True
    operations = ""  # their implementations as a table, on rank 0

    def __init__(
        self,
        architecture: ModelArchitecture,
        layout: ParallelLayout,
        settings: ActorSettings,
        load: Loader,
        running_models: Sequence[TrainedModel] = (),
        part: RankSet | None = None,
        base: TrainedModel | None = None,
    ) -> None:
        """See `TrainedModel`."""
        super().__init__(architecture, layout, settings, load, running_models, part, base)
        self.replays_routing = settings.replays_routing
        for chunk in self.chunks if self.replays_routing else ():
            replay_routing(unwrap(chunk))
        if self.rank == 0:
            self.operations = describe(implementations(self.config, settings.head_implementation))
            logger.debug("implementations of the policy's operations:\n%s", self.operations)
        if layout.coordinates(self.rank).pipeline == layout.pipeline - 1:
            # Refuse a head that cannot run here now, not after the first rollout.
            chosen = implementation(unwrap(self.chunks[-1]), self._head(temperature=1.0))
            logger.debug("log-prob head: %s (%s)", chosen.name, chosen.reason)

    @classmethod
    def build(
        cls,
        model_dir: str | Path,
        layout: ParallelLayout,
        settings: ActorSettings,
        running_models: Sequence[TrainedModel] = (),
        part: RankSet | None = None,
        random_seed: int | None = None,
        base: MegatronActor | None = None,
    ) -> MegatronActor:
        """Build the actor from a Hugging Face directory, with its weights or, given `random_seed`, with random ones.

        `base`: an actor of the same directory, whose weights it shares. Raises ValueError, on rank 0, if settings.lora.path was
        trained on another model.
        """
        rank, lora = (part or all_ranks()).rank, settings.lora
        merged = Path(lora.path) if lora.path and settings.is_frozen else None

        def load(parameters: Mapping[str, torch.Tensor], tensors: MegatronLayout) -> None:
            if random_seed is None:
                report = load_from_huggingface(model_dir, tensors, rank, parameters, merged)
                logger.debug("loaded %d of %d tensors from %s", report.num_tensors, report.num_model_tensors, model_dir)
            else:
                initialize_randomly(random_seed, tensors, rank, parameters)

        actor = cls(read_architecture(model_dir), layout, settings, load, running_models, part, base)
        if base is not None:
            actor.base = base.base
        elif actor.adapters is not None and actor.rank == 0:
            fingerprint = base_fingerprint(Path(model_dir)) if random_seed is None else f"random {random_seed}"
            actor.base = str(model_dir), fingerprint
        if lora.path and actor.adapters is not None and actor.rank == 0:
            require_own_base(Path(lora.path), *actor.base)
        return actor

    def export_adapters(self, target: Path) -> None:
        """Write the adapters as a PEFT directory. Collective."""
        description = self.adapter_description()
        assert self.adapters is not None and description is not None, "the model has no adapters"
        parameters = {name: each.detach() for name, each in self.trained_parameters().items()}
        export_adapters(target, self.adapters, parameters, description, self.part.collective_group)

    def forward_logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[TokenOutputs | None]:
        """Compute log-probs and entropies of each micro-batch's targets, [P_local] in this context rank's token order
        (`slice_for_context`); None on ranks off the last pipeline stage."""
        return self._forward(micro_batches, self._outputs(temperature))

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, temperature: float, learning_rate: float
    ) -> StepResult:
        """Make one optimizer step on the sum of the micro-batches' losses over all data and context ranks."""
        return self._step(micro_batches, self._outputs(temperature, is_training=True), loss_fn, learning_rate)

    def accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFunction, temperature: float
    ) -> dict[str, float]:
        """Compute a train_step's gradients without the step and return its summed metrics; see `gradients`."""
        read = self._outputs(temperature, is_training=True)
        return self._accumulate(micro_batches, read, loss_fn, reduce_fully=True)

    def forward_head_inputs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[HeadInput | None]:
        """Compute the head's input for each micro-batch, without gradients; None on ranks off the last pipeline
        stage."""
        return self._forward(micro_batches, partial(head_input, settings=self._head(temperature)))

    def take_replayed(self) -> dict[str, float]:
        """Return the counts of `experts.take_replayed` for this rank's layers and tokens, by name."""
        counts = torch.stack([take_replayed(unwrap(chunk)) for chunk in self.chunks])
        replayed, own = counts.sum(0).tolist()
        return {"replayed": replayed, "own": own}

    def _outputs(self, temperature: float, is_training: bool = False) -> ReadOutput[TokenOutputs]:
        # Without gradients nothing reads the input, and a whole batch's hidden states would stay in memory.
        keeps_input = is_training and self.settings.keeps_head_input
        return partial(token_outputs, settings=replace(self._head(temperature), keeps_input=keeps_input))

    def _head(self, temperature: float) -> HeadSettings:
        settings = self.settings
        return HeadSettings(
            self.architecture.vocab_size,
            temperature,
            settings.chunk_tokens,
            settings.head_implementation,
            settings.head_keep_bytes,
        )


class PolicyBeforeAdapters:
    """The model that a policy with adapters started from: its weights, so that a reference policy needs no other copy."""

    def __init__(self, actor: MegatronActor) -> None:
        self._actor = actor

    def forward_logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[TokenOutputs | None]:
        """See `MegatronActor.forward_logprobs`."""
        with without_adapters(self._actor.chunks):
            return self._actor.forward_logprobs(micro_batches, temperature)

    def forward_head_inputs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[HeadInput | None]:
        """See `MegatronActor.forward_head_inputs`."""
        with without_adapters(self._actor.chunks):
            return self._actor.forward_head_inputs(micro_batches, temperature)
