"""Teachers in the trainer's processes: frozen models that take turns on the device.

    teach(micro_batches)    each teacher's hidden states at the tokens that it teaches, kept in host memory
    loss(head, ...)         in the training pass: the divergence of the policy's head from the teachers', in tiles
    refresh(train_step)     before a train step: teachers that are snapshots of the policy take its weights, if they are due

Teacher and policy have one layout: the same rank holds the same words, tokens and stage of both. Only a teacher with another
prompt may have its tokens on other context-parallel ranks; its hidden states then move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_dapo.config.distillation_schema import TeacherConfig
from megatron_dapo.config.schema import Config
from megatron_dapo.data.teacher_prompts import split_prompts
from megatron_dapo.megatron.context import context_token_index, slice_for_context
from megatron_dapo.ops.distillation import align_rows, vocab_parallel_distillation
from megatron_dapo.parallel.packing import pack
from megatron_dapo.plan.memory import padded_vocabulary
from megatron_dapo.telemetry.metrics import DISTILLED
from megatron_dapo.trainer.offload import POLICY, REFERENCE, DeviceModels, teacher_key
from megatron_dapo.types import MicroBatch, TrainSample

if TYPE_CHECKING:
    from megatron_dapo.megatron.actor import HeadInput, MegatronActor


@dataclass(frozen=True)
class Lesson:
    """What a teacher says about this rank's tokens of a micro-batch."""

    teacher: TeacherConfig
    hidden: torch.Tensor  # [R, h] in host memory
    positions: torch.Tensor  # [R] ascending, in the context-sliced micro-batch
    weight: torch.Tensor  # [rows, h], rows of the same words as the policy's
    vocab_size: int


class Teachers:
    """The teachers of a run that are models. Collective over the policy's ranks."""

    def __init__(self, config: Config, models: Mapping[str, MegatronActor], actor: MegatronActor, devices: DeviceModels) -> None:
        """`models`: by the names of distillation.models. `actor`: the policy."""
        self._section, self._temperature = config.distillation, config.rollout.temperature
        self._divergence, self._beta = config.distillation.divergence, config.distillation.beta
        self._models, self._devices, self._actor = models, devices, actor
        self._keeps_weights = config.distillation.offload == "none"
        self._vocab_size = actor.architecture.vocab_size
        self._num_rows = padded_vocabulary(self._vocab_size, actor.layout.tensor) // actor.layout.tensor
        named = {source for teacher in self._section.models for source in teacher.sources}
        self._sources = sorted(named | {source.label for source in config.data.sources})
        layout = self._layout = actor.layout
        self._context, self._context_rank = actor.groups.context, layout.coordinates(actor.rank).context
        # Ranks of these layouts and of FP8 meet inside a pass, so all of them make it for every micro-batch.
        meets = layout.expert > 1 or layout.virtual_pipeline > 1 or config.precision.recipe.startswith("fp8")
        self._skips_untaught = not meets

    @property
    def snapshots(self) -> dict[str, MegatronActor]:
        """Teachers whose weights change, by name."""
        return {teacher.name: self._models[teacher.name] for teacher in self._section.snapshots}

    def refresh(self, train_step: int) -> None:
        """Let the snapshots that are due before `train_step`, from 0, take the policy's weights."""
        for teacher in self._section.snapshots:
            if train_step and train_step % teacher.refresh_steps == 0:
                with self._devices.on_device(teacher_key(teacher.name), POLICY):
                    self._models[teacher.name].take_weights(self._actor)

    def teach(self, micro_batches: Sequence[MicroBatch], samples: Mapping[str, TrainSample]) -> list[list[Lesson]]:
        """Return the lessons about each micro-batch. `samples`: those that are in them, by id."""
        lessons: list[list[Lesson]] = [[] for _ in micro_batches]
        for teacher in self._section.models:
            taught = [_taught_by(teacher, micro_batch, samples) for micro_batch in micro_batches]
            chosen = [
                index
                for index, micro_batch in enumerate(taught)
                if not self._skips_untaught or len(_positions(micro_batch))
            ]
            # The policy stays between its steps: its optimizer is more to move than a teacher's weights.
            with self._devices.on_device(teacher_key(teacher.name), POLICY, REFERENCE, training=POLICY):
                for index, lesson in zip(chosen, self._lessons(teacher, [taught[i] for i in chosen], samples), strict=True):
                    lessons[index] += [lesson] if lesson is not None else []
        return lessons

    def _lessons(
        self, teacher: TeacherConfig, taught: Sequence[MicroBatch], samples: Mapping[str, TrainSample]
    ) -> list[Lesson | None]:
        model = self._models[teacher.name]
        read = [self._read_by(teacher, micro_batch, samples) for micro_batch in taught] if teacher.prompt else taught
        heads = model.forward_head_inputs(read, self._temperature) if read else []
        weight = next((self._rows(head) for head in heads if head is not None), None)
        vocab_size = min(self._vocab_size, model.architecture.vocab_size)
        lessons: list[Lesson | None] = []
        for head, micro_batch, other in zip(heads, taught, read, strict=True):
            if head is None or head.positions is None or weight is None:
                lessons.append(None)
                continue
            hidden, positions = (
                self._aligned(head.hidden, other, micro_batch) if teacher.prompt else (head.hidden, head.positions)
            )
            lessons.append(Lesson(teacher, hidden.cpu(), positions, weight, vocab_size))
        return lessons

    def _read_by(self, teacher: TeacherConfig, taught: MicroBatch, samples: Mapping[str, TrainSample]) -> MicroBatch:
        """Return the micro-batch of the sequences that a teacher with another prompt teaches, with its prompt before the
        responses. Its response positions are those of the same tokens in the same order."""
        chosen = [samples[name] for name in taught.sample_ids if name in samples and _teaches(teacher, samples[name].source)]
        own = [replace(sample, **self._prompted(teacher, sample), routing=None, support=None) for sample in chosen]
        packed = pack(own, [0.0] * len(own), self._layout)
        positions = (packed.loss_mask > 0).nonzero()[:, 0]
        return replace(packed, response_positions=positions)

    def _prompted(self, teacher: TeacherConfig, sample: TrainSample) -> dict[str, Any]:
        assert sample.teacher_prompts is not None, f"rank 0 rendered the prompt of {teacher.name} for {sample.sample_id}"
        place = self._section.readers_of(sample.source).index(teacher)
        prompt = split_prompts(sample.teacher_prompts)[place]
        return {"tokens": torch.cat((prompt, sample.tokens[sample.prompt_length :])), "prompt_length": len(prompt)}

    def _aligned(self, hidden: torch.Tensor, read: MicroBatch, taught: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states of this rank's tokens of `taught`, and their positions in it.

        `hidden`: those of its tokens of `read`, which context-parallel ranks cut elsewhere, as its prompts have other lengths.
        """
        (here, _), (there, positions) = self._tokens_here(read), self._tokens_here(taught)
        if self._layout.context > 1:
            whole = hidden.new_zeros(len(_positions(read)), hidden.size(1)).index_copy(0, here.to(hidden.device), hidden)
            dist.all_reduce(whole, group=self._context)  # each token is on one rank: the sum is exact
            hidden = whole.index_select(0, there.to(hidden.device))
        return hidden, positions

    def _tokens_here(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the response positions this rank holds, by their numbers, and their positions in its slice."""
        size, rank = self._layout.context, self._context_rank
        local = _positions(slice_for_context(micro_batch, rank, size))
        if size == 1:
            return torch.arange(len(local)), local
        whole = context_token_index(micro_batch.cu_seqlens, rank, size)[local]
        return torch.searchsorted(_positions(micro_batch), whole), local

    def _rows(self, head: HeadInput) -> torch.Tensor:
        """Return the teacher's rows of the policy's words, in memory that outlives its turn on the device."""
        rows = align_rows(head.weight.detach(), self._num_rows, head.group)
        return rows if self._keeps_weights or rows.data_ptr() != head.weight.data_ptr() else rows.clone()

    def loss(
        self,
        head: HeadInput,
        micro_batch: MicroBatch,
        samples: Mapping[str, TrainSample],
        lessons: Sequence[Lesson],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the token losses [P_local] of a micro-batch's lessons, and sums of divergences by teacher and source."""
        section, total = self._section, head.hidden.new_zeros(head.num_tokens, dtype=torch.float32)
        metrics = {name: total.new_zeros(()) for name in self.metric_sums}
        sources = _sources(micro_batch, samples)
        for lesson in lessons:
            positions = lesson.positions.to(total.device)
            index = positions if head.positions is None else torch.searchsorted(head.positions, positions)
            divergence = vocab_parallel_distillation(
                head.hidden.index_select(0, index),
                head.weight,
                lesson.hidden.to(total.device),
                lesson.weight,
                vocab_size=lesson.vocab_size,
                divergence=self._divergence,
                beta=self._beta,
                temperature=head.settings.temperature,
                group=head.group,
                chunk_tokens=head.settings.chunk_tokens,
            )
            total = total.index_add(0, positions, section.coefficient * lesson.teacher.weight * divergence)
            found = divergence.detach()
            _count(metrics, f"teacher/{lesson.teacher.name}", found)
            sequences = micro_batch.sequence_ids.index_select(0, positions)
            for source in self._sources:
                own = [number for number, name in enumerate(sources) if name == source]
                _count(metrics, f"source/{source}", found[torch.isin(sequences, sequences.new_tensor(own))])
        return total, metrics

    @property
    def metric_sums(self) -> list[str]:
        """Names of the sums of `loss`: of divergences and, under the name with _tokens, of tokens."""
        labels = [f"teacher/{teacher.name}" for teacher in self._section.models]
        labels += [f"source/{source}" for source in self._sources]
        return [f"{DISTILLED}{label}{suffix}" for label in labels for suffix in ("", _TOKENS)]


_TOKENS = "_tokens"


def distillation_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return the mean divergence of each teacher and source that taught a token, from the sums of `Teachers.loss`."""
    return {
        f"{name}/divergence": total / totals[f"{name}{_TOKENS}"]
        for name, total in totals.items()
        if name.startswith(DISTILLED) and totals.get(f"{name}{_TOKENS}")
    }


def _count(metrics: dict[str, torch.Tensor], label: str, divergence: torch.Tensor) -> None:
    metrics[f"{DISTILLED}{label}"] += divergence.sum()
    metrics[f"{DISTILLED}{label}{_TOKENS}"] += divergence.numel()


def _positions(micro_batch: MicroBatch) -> torch.Tensor:
    assert micro_batch.response_positions is not None, "of `_taught_by`"
    return micro_batch.response_positions


def _sources(micro_batch: MicroBatch, samples: Mapping[str, TrainSample]) -> list[str]:
    return [samples[name].source if name in samples else "" for name in micro_batch.sample_ids]


def _teaches(teacher: TeacherConfig, source: str) -> bool:
    return not teacher.sources or source in teacher.sources


def _taught_by(teacher: TeacherConfig, micro_batch: MicroBatch, samples: Mapping[str, TrainSample]) -> MicroBatch:
    """Return the micro-batch with the trained positions of the teacher's sequences as its response positions."""
    taught = torch.tensor([_teaches(teacher, source) for source in _sources(micro_batch, samples)])
    positions = (taught[micro_batch.sequence_ids] & (micro_batch.loss_mask > 0)).nonzero()[:, 0]
    # Experts are the teacher's own choice, and it speaks of the whole vocabulary.
    return replace(micro_batch, response_positions=positions, routing=None, is_routed=None, support=None)
