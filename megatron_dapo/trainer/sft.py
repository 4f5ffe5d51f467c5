"""Supervised fine-tuning: the policy learns given responses by maximum likelihood.

    ExampleBatches      rank 0 draws examples in the order of the prompt stream; every rank gets all their tokens
    SftLearner          mini-batches -> cross entropy of the response tokens -> guarded steps
    SftLoop             the training loop without generation: engines get weights only for evaluations
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_dapo.algorithms.group_advantages import EstimatedBatch
from megatron_dapo.algorithms.objective import entropy_loss
from megatron_dapo.data.examples import Example
from megatron_dapo.data.prompt_stream import PromptStream
from megatron_dapo.parallel.collectives import broadcast_tensors
from megatron_dapo.parallel.coordination import Coordination
from megatron_dapo.rollout.batch import RolloutBatch
from megatron_dapo.rollout.statistics import StatisticsBuilder
from megatron_dapo.trainer.actor_learner import LearnResult, PolicyLearner
from megatron_dapo.trainer.learner import Learner
from megatron_dapo.trainer.loop import Parts, TrainingLoop
from megatron_dapo.trainer.metrics import sft_metrics
from megatron_dapo.trainer.offload import POLICY
from megatron_dapo.trainer.updater import add_sums
from megatron_dapo.types import MicroBatch, TrainSample

if TYPE_CHECKING:
    from megatron_dapo.megatron.actor import TokenOutputs
    from megatron_dapo.trainer.checkpointing import RunProgress
    from megatron_dapo.trainer.context import RunContext

STATE_VERSION = "sft 1"


class ExampleStream:
    """The examples of a run, on rank 0. Its state is part of every checkpoint."""

    def __init__(self, examples: Mapping[str, Example], stream: PromptStream) -> None:
        """`examples`: by the prompt ids that `stream` yields."""
        self._examples = examples
        self._stream = stream

    def next(self, size: int) -> list[Example]:
        """Return the next `size` examples, fewer at the end of the data."""
        drawn = (self._stream.next() for _ in range(size))
        return [self._examples[name] for name in drawn if name is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data."""
        return {"version": STATE_VERSION, "stream": self._stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. ValueError for the state of a run that samples, or of other data."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"collector state has version {state.get('version')}, fine-tuning has {STATE_VERSION!r}: the checkpoint is of a "
                "run that samples; name another output directory"
            )
        self._stream.load_state_dict(state["stream"])


class ExampleBatches:
    """Batches of examples, the same on every rank. `stream`: on rank 0."""

    def __init__(self, stream: ExampleStream | None, coordination: Coordination) -> None:
        self._stream = stream
        self._coordination = coordination

    def next(self, size: int) -> list[TrainSample]:
        """Return the next `size` examples as samples, fewer at the end of the data. Collective."""
        tensors = None if self._stream is None else _tensors_of(self._stream.next(size))
        if self._coordination.size > 1:
            tensors = {name: tensor.cpu() for name, tensor in broadcast_tensors(tensors).items()}
        assert tensors is not None, "rank 0 has the examples"
        return list(_samples_of(**tensors))


def _tensors_of(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Return examples as tensors: lengths [S, 2] of prompt and response, and the tokens of all, one after the other."""
    lengths = [(len(example.prompt.token_ids), len(example.token_ids)) for example in examples]
    tokens = [token for example in examples for token in (*example.prompt.token_ids, *example.token_ids.tolist())]
    return {
        "lengths": torch.tensor(lengths, dtype=torch.int32).reshape(-1, 2),
        "tokens": torch.tensor(tokens, dtype=torch.int32),
    }


def _samples_of(lengths: torch.Tensor, tokens: torch.Tensor) -> Iterator[TrainSample]:
    """Invert `_tensors_of`. All response tokens are in the loss; there are no advantages and no engine's log-probs."""
    sequences = tokens.split(lengths.sum(dim=1).tolist())
    for index, (sequence, (prompt, response)) in enumerate(zip(sequences, lengths.tolist(), strict=True)):
        nothing = torch.zeros(1).expand(response)
        yield TrainSample(
            sample_id=str(index),
            group_index=index,
            tokens=sequence,
            prompt_length=prompt,
            loss_mask=torch.ones(1).expand(response),
            advantages=nothing,
            rollout_logprobs=nothing,
        )


class SftLearner(Learner):
    """Maximum likelihood: the loss of an optimizer step is the sum over its response tokens of weight * -log pi(token).

    The weight is 1 / number of tokens (sft.aggregation = "token_mean"), or 1 / (number of responses * tokens of the
    response) ("sample_mean"), from counts over all ranks.
    """

    policy: PolicyLearner

    def estimate_advantages(self, samples: Sequence[TrainSample]) -> EstimatedBatch:
        """Return the batch as it is: a likelihood has no advantages."""
        return EstimatedBatch(list(samples), list(samples))

    def train_actor(self, batch: EstimatedBatch, train_step: int, mismatch_gate: float | None = None) -> LearnResult:
        """Make the optimizer steps of a batch. There is no engine to compare with, so the gate does not apply."""
        policy, totals = self.policy, dict[str, float]()
        mini_batches, steps = policy.cut_batch(batch.policy_samples, train_step), []
        with self._phases.phase("train"), self.models.on_device(POLICY, training=POLICY):
            for mini_batch in mini_batches:
                steps.append(policy.updater.step(mini_batch, cross_entropy, train_step, temperature=1.0))
                add_sums(totals, steps[-1].metrics)
            policy.actor.finish_steps()
        return LearnResult(policy.metrics(totals, steps, mini_batches, [], train_step), len(steps))


def cross_entropy(
    micro_batch: MicroBatch, outputs: TokenOutputs, index: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a micro-batch and its sums over trained tokens."""
    mask = micro_batch.loss_mask
    loss = (torch.where(mask > 0, -outputs.logprobs, 0.0) * micro_batch.loss_weights).sum()
    _, sums = entropy_loss(outputs.entropy, mask, 0.0)
    return loss, {**sums, "loss_sum": loss.detach(), "num_tokens": mask.sum()}


class SftLoop(TrainingLoop):
    """The training loop over examples."""

    def __init__(self, context: RunContext, parts: Parts, progress: RunProgress, examples: ExampleBatches) -> None:
        super().__init__(context, parts, progress)
        self._examples = examples

    def _serve(self) -> None:
        """Do nothing: an evaluation serves the weights that it needs."""

    def _generate(self) -> RolloutBatch:
        with self._phases.phase("generate"):
            samples = self._examples.next(self._config.rollout.prompts_per_step)
            step = self._progress.train_step + 1
            return RolloutBatch((), StatisticsBuilder().build(), should_stop=not samples, generation_step=step, samples=samples)

    def _evaluate(self) -> bool:
        is_whole = super()._evaluate()
        if self._parts.evaluator is not None:
            # Engines on the trainer's devices release their memory until the next evaluation.
            self._parts.rollout.sleep()
            self._served_step = -1
        return is_whole

    def _step_metrics(self, batch: RolloutBatch, result: LearnResult, times: Mapping[str, float]) -> dict[str, float]:
        return sft_metrics(batch.samples, result.metrics, times)
