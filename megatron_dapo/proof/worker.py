"""One process of `check-loss`: builds the real actor for each layout, and compares the gradients of every cut.

Started by torchrun, through `check_loss` or by the user on a cluster. The same processes check all layouts in turn.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.algorithms.objective import BehaviorTerms, PolicyObjective
from megatron_dapo.checkpoints.layouts.megatron import MegatronLayout, megatron_layout
from megatron_dapo.checkpoints.load import TensorReader, fill, load_from_huggingface
from megatron_dapo.config.algorithm_schema import AlgorithmConfig
from megatron_dapo.data.sample_tensors import from_tensors, to_tensors
from megatron_dapo.launch.environment import prepare_rendezvous, process_environment
from megatron_dapo.megatron.actor import ActorSettings, Loader, LossFunction, MegatronActor, TokenOutputs
from megatron_dapo.megatron.model_config import DTYPES, ModelSettings, transformer_config
from megatron_dapo.megatron.parallel_state import initialize_process_group
from megatron_dapo.models.architecture import ModelArchitecture
from megatron_dapo.models.config_json import parse_architecture, read_architecture
from megatron_dapo.parallel.collectives import (
    broadcast_json,
    broadcast_tensors,
    communication_device,
    sum_over,
    summing,
)
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.parallel.mini_batch import build_micro_batches
from megatron_dapo.proof import oracle
from megatron_dapo.proof.cases import (
    CUTS,
    EXPERT_CUTS,
    MAX_RESPONSE_TOKENS,
    PACKINGS,
    Cut,
    expert_layouts,
    layouts,
    make_batch,
)
from megatron_dapo.proof.check_loss import LossCheckRow
from megatron_dapo.proof.losses import PROOF_LOSSES
from megatron_dapo.reshard.layout import SingleHolderLayout, TensorSpec, local_holes, shard_view, slice_view
from megatron_dapo.rounding import round_up
from megatron_dapo.trainer.updater import loss_weights
from megatron_dapo.types import MicroBatch, TrainSample

logger = logging.getLogger(__name__)

WAIT_TIMEOUT_S = 600.0  # timeout of a collective: the others wait while rank 0 solves the batch


@dataclass(frozen=True)
class LossProblem:
    """The batch, the model and the right answers, the same on every rank."""

    samples: list[TrainSample]
    answers: Mapping[str, oracle.Answer]
    architecture: ModelArchitecture
    load: Loader
    loss: str  # key of PROOF_LOSSES


def pose_problem(
    directory: str = "", dtype: str = "float32", *, experts: bool = False, loss: str = "ppo_clip"
) -> LossProblem:
    """Solve the batch with the plain model on rank 0 and broadcast the problem.

    `loss` is a key of PROOF_LOSSES. The model is that of a Hugging Face `directory`, or if "" a small random one, with `experts` or without.
    """
    config, description, tensors, numbers, weights, gradients = None, None, None, None, None, {}
    if dist.get_rank() == 0:
        model: Any = oracle.make_model(directory, experts)
        model = model.to(DTYPES[dtype])  # both sides compute with the rounded weights
        config = model.config.to_dict()
        # Cloned, because solving turns the model's own parameters into fp64. A directory is read by every rank.
        whole = {} if directory else {name: tensor.clone() for name, tensor in model.state_dict().items()}
        weights = oracle.stored_tensors(whole)
        samples, answers = oracle.solve(model.to(communication_device()), make_batch(config["vocab_size"]), PROOF_LOSSES[loss])
        description, tensors = to_tensors(samples)
        numbers = {name: (answer.loss, answer.loss_scale) for name, answer in answers.items()}
        gradients = {name: dict(answer.gradients) for name, answer in answers.items()}
    description = broadcast_json(description)
    samples = from_tensors(description, {name: tensor.cpu() for name, tensor in broadcast_tensors(tensors).items()})
    weights = broadcast_tensors(weights)
    numbers = broadcast_json(numbers)
    answers = {
        name: oracle.Answer(loss, loss_scale, broadcast_tensors(gradients.get(name)))
        for name, (loss, loss_scale) in numbers.items()
    }
    architecture = (read_architecture(directory) if directory else parse_architecture(broadcast_json(config)))
    return LossProblem(samples, answers, architecture, _loader(directory, weights), loss)


def _loader(directory: str, weights: Mapping[str, torch.Tensor]) -> Loader:
    def load(parameters: Mapping[str, torch.Tensor], layout: MegatronLayout) -> None:
        if directory:
            load_from_huggingface(directory, layout, dist.get_rank(), parameters)
        else:
            specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
            source = SingleHolderLayout(specs, layout.num_ranks)
            fill(source, TensorReader(weights), layout, dist.get_rank(), parameters)

    return load


def trained_loss(problem: LossProblem, actor: MegatronActor) -> LossFunction:
    """Return the problem's loss as the training path computes it.

    The batch's rollout log-probs take the place of the old log-probs.
    """
    section = {"name": problem.loss, **PROOF_LOSSES[problem.loss].section}
    objective = PolicyObjective(AlgorithmConfig.model_validate({"loss": section}), summing(actor.groups.context), actor.layout.context)

    def loss(
        micro_batch: MicroBatch, outputs: TokenOutputs, index: int
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return objective(micro_batch, outputs.logprobs, outputs.entropy, BehaviorTerms(micro_batch.rollout_logprobs))

    return loss


def build_actor(problem: LossProblem, layout: ParallelLayout, dtype: str) -> MegatronActor:
    """Return the real actor on `layout` with the problem's weights."""
    return MegatronActor(problem.architecture, layout, ActorSettings(model=ModelSettings(dtype=dtype)), problem.load)


def check_layout(problem: LossProblem, layout: ParallelLayout, dtype: str) -> list[LossCheckRow]:
    # One actor serves all cuts: gradients are cleared between them, parameters never change.
    actor = build_actor(problem, layout, dtype)
    return [
        check_cut(problem, actor, cut, aggregation, loss_weights(problem.samples, aggregation, MAX_RESPONSE_TOKENS))
        for cut in (EXPERT_CUTS if layout.expert > 1 else CUTS)
        for aggregation in oracle.WEIGHTS
    ]


def check_cut(
    problem: LossProblem, actor: MegatronActor, cut: Cut, aggregation: str, weights: Sequence[float]
) -> LossCheckRow:
    """Compare the gradients of one cut, with samples weighted by `weights`, to the answer of `aggregation`."""
    layout, rank = actor.layout, actor.rank
    longest = round_up(max(sample.num_tokens for sample in problem.samples), layout.micro_batch_alignment)
    limits = cut.limits(longest)
    micro_batches = build_micro_batches(
        problem.samples, weights, layout, layout.coordinates(rank).data, limits, PACKINGS[cut.packing]
    )
    metrics = actor.accumulate_gradients(micro_batches, trained_loss(problem, actor), oracle.TEMPERATURE)
    answer = problem.answers[aggregation]
    trained = sum(float(sample.loss_mask.sum()) for sample in problem.samples)
    # Equal gradients of fewer tokens would mean that both sides dropped the same ones.
    assert metrics["num_tokens"] == trained, f"{metrics['num_tokens']} tokens were trained, the batch has {trained}"
    difference = compare_gradients(actor.gradients(), actor.tensors, rank, answer.gradients)
    return LossCheckRow(
        layout=layout.describe(),
        micro_batch=cut.micro_batch,
        packing=cut.packing,
        aggregation=aggregation,
        num_micro_batches=len(micro_batches),
        rel_diff=difference.relative,
        worst_tensor=difference.tensor,
        loss_rel_diff=abs(metrics["loss_sum"] - answer.loss) / answer.loss_scale,
    )


def check_all(directory: str, dtype: str, loss: str = "ppo_clip") -> dict[str, Any]:
    """Check every layout of the world; return {"rows": [...], "skipped": [...]}.

    Layouts that the model does not divide into are skipped with the reason.
    """
    rows, skipped = [], []
    candidates = [(problem, layout) for problem, candidates in _problems(directory, dtype, loss) for layout in candidates]
    for number, (problem, layout) in enumerate(candidates, 1):
        # Checked before building, because if only one rank failed, the others would hang in a collective.
        try:
            megatron_layout(problem.architecture, layout, DTYPES[dtype])
            transformer_config(problem.architecture, layout, ModelSettings(dtype=dtype))
        except ValueError as error:
            skipped.append({"layout": layout.describe(), "reason": str(error)})
            continue
        done = check_layout(problem, layout, dtype)
        rows += [asdict(row) for row in done]
        if dist.get_rank() == 0:
            worst = max(row.rel_diff for row in done)
            logger.info("%d/%d %s: largest relative difference %.1e", number, len(candidates), layout.describe(), worst)
    return {"rows": rows, "skipped": skipped}


def _problems(directory: str, dtype: str, loss: str) -> list[tuple[LossProblem, list[ParallelLayout]]]:
    """Return the problems with their layouts.

    A model of the user's is checked under expert parallelism if it has experts; otherwise a second small model is.
    """
    dense, experts = layouts(dist.get_world_size()), expert_layouts(dist.get_world_size())
    problem = pose_problem(directory, dtype, loss=loss)
    if directory:
        return [(problem, dense + (experts if problem.architecture.experts is not None else []))]
    if not experts:
        return [(problem, dense)]
    return [(problem, dense), (pose_problem(directory, dtype, experts=True, loss=loss), experts)]


def join_and_check(directory: str, dtype: str, loss: str) -> dict[str, Any]:
    """Join the processes that a launcher started, and check; the result is the same on every rank."""
    process = process_environment()
    prepare_rendezvous(process)
    if torch.cuda.is_available():
        torch.cuda.set_device(process.local_rank)
    initialize_process_group(WAIT_TIMEOUT_S)
    try:
        return check_all(directory, dtype, loss)
    finally:
        dist.destroy_process_group()


def run_worker(result_file: str, directory: str, dtype: str, loss: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    result = join_and_check(directory, dtype, loss)
    if process_environment().rank == 0:
        Path(result_file).write_text(json.dumps(result))


# ---- gradients of a layout's ranks against whole gradients by Hugging Face name, replicas and padding rows included


@dataclass(frozen=True)
class GradientDifference:
    """Largest |ours - expected| / |expected| over tensors (2-norms over the shards of all ranks), and its tensor."""

    relative: float
    tensor: str
    overall: float = sys.float_info.max  # the same of all tensors as one vector


def compare_gradients(
    gradients: Mapping[str, torch.Tensor], layout: MegatronLayout, rank: int, expected: Mapping[str, torch.Tensor]
) -> GradientDifference:
    """Compare the local gradients of all ranks; collective over the default group.

    A gradient of padding that is not zero, or one that is not finite, makes the difference the largest float.
    """
    names = list(expected)
    sums = torch.zeros(2, len(names), dtype=torch.float64, device=communication_device())
    index = {name: number for number, name in enumerate(names)}
    for shard in layout.shards(rank):
        wanted = slice_view(expected[shard.tensor], shard.bounds).double()
        ours = shard_view(gradients[shard.local], shard).to(wanted.device, torch.float64)
        # Every replica adds to both sums, so one deviating replica changes the result.
        sums[0, index[shard.tensor]] += (ours - wanted).square().sum()
        sums[1, index[shard.tensor]] += wanted.square().sum()
    totals = sum_over({"sums": sums, "padding": _padding_sum(gradients, layout, rank)})
    error, norm = totals["sums"]
    relative = (error / norm.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()
    broken = ~torch.isfinite(relative)
    # The largest float, because JSON has no infinity.
    if broken.any():
        return GradientDifference(sys.float_info.max, names[int(broken.int().argmax())])
    if totals["padding"] != 0:
        return GradientDifference(sys.float_info.max, "padding")
    worst = int(relative.argmax())
    return GradientDifference(float(relative[worst]), names[worst], float((error.sum() / norm.sum()).sqrt()))


def _padding_sum(gradients: Mapping[str, torch.Tensor], layout: MegatronLayout, rank: int) -> float:
    """Return the sum of absolute gradients of everything that no shard covers."""
    shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
    holes = local_holes(layout.shards(rank), shapes)
    return sum(
        float(slice_view(gradients[name], hole).abs().double().sum()) for name, found in holes.items() for hole in found
    )
