"""check-loss itself: it passes on two processes and on a user's directory, and it detects the errors it is for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launcher import run_distributed, target_in

from megatron_dapo.algorithms.policy_loss import POLICY_LOSSES
from megatron_dapo.proof.check_loss import check_loss, run_check_loss
from megatron_dapo.proof.losses import PROOF_LOSSES
from megatron_dapo.types import TrainSample


@pytest.mark.long
def test_all_layouts_of_two_processes_agree_with_the_plain_model(capfd) -> None:
    assert check_loss(2, json_output=True) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["max_rel_diff"] <= 1e-5 and report["max_loss_rel_diff"] <= 1e-6
    assert report["num_layouts"] == 6 + 3 and report["num_comparisons"] == len(report["rows"]) == 6 * 7 * 5 + 3 * 5
    assert not report["skipped"]
    assert {row["layout"] for row in report["rows"]} >= {
        "TP2 PP1 CP1 DP1 SP",
        "TP1 PP2 VPP2 CP1 DP1",
        "TP1 PP1 CP2 DP1",
        "TP1 PP1 CP1 DP2",
        "TP1 PP1 CP2 DP1 EP2",
        "TP2 PP1 CP1 DP1 EP2 ETP1 SP",
    }


@pytest.mark.long  # Layouts in test_actor_parity.py have tied heads, too.
def test_a_tied_model_from_a_directory(tmp_path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=20,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    report = run_check_loss(1, model=str(tmp_path))
    assert report.passed, max(report.rows, key=lambda row: row.rel_diff)


def per_micro_batch_mean(samples: Sequence[TrainSample]) -> list[float]:
    """The error of averaging per micro-batch: each sample is divided by its own and its neighbor's tokens."""
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    pairs = [
        counts[index] + counts[index ^ 1] if index ^ 1 < len(counts) else counts[index] for index in range(len(counts))
    ]
    return [2 / (len(counts) * max(pair, 1)) for pair in pairs]


def faults(_: Any) -> dict[str, Any]:
    from megatron_dapo.parallel.layout import ParallelLayout
    from megatron_dapo.proof.cases import MAX_RESPONSE_TOKENS, Cut
    from megatron_dapo.proof.worker import build_actor, check_cut, compare_gradients, pose_problem
    from megatron_dapo.trainer.updater import loss_weights

    problem = pose_problem()
    actor = build_actor(problem, ParallelLayout(2), "float32")
    cut = Cut("2", "packed")
    weights = loss_weights(problem.samples, "token_mean", MAX_RESPONSE_TOKENS)
    right = check_cut(problem, actor, cut, "token_mean", weights)
    wrong_weights = check_cut(problem, actor, cut, "token_mean", per_micro_batch_mean(problem.samples))
    found = {"right": right.rel_diff, "per_micro_batch_mean": wrong_weights.rel_diff}

    check_cut(problem, actor, cut, "token_mean", weights)
    gradients = {name: gradient.clone() for name, gradient in actor.gradients().items()}
    answer = problem.answers["token_mean"].gradients

    def difference(name: str, where: Any, add: float) -> Any:
        changed = {**gradients, name: gradients[name].clone()}
        if dist.get_rank() == 1:
            changed[name][where] += add
        return compare_gradients(changed, actor.tensors, dist.get_rank(), answer)

    norm = difference("0.decoder.final_layernorm.weight", 3, 1.0)
    found["one_replica"] = [norm.relative, norm.tensor]
    padding = difference("0.output_layer.weight", (-1, 0), 1e-12)
    found["padding"] = [padding.relative, padding.tensor]
    nan = difference("0.decoder.layers.2.mlp.linear_fc2.weight", (0, 0), float("nan"))
    found["nan"] = [nan.relative, nan.tensor]
    return found


def test_wrong_weights_replicas_padding_and_nan_are_detected() -> None:
    found = run_distributed(target_in(__file__, "faults"), 2)
    assert found["right"] <= 1e-5
    assert found["per_micro_batch_mean"] > 0.05
    assert found["one_replica"][0] > 1e-3 and found["one_replica"][1] == "model.norm.weight"
    assert found["padding"][0] > 1e300 and found["padding"][1] == "padding"
    assert found["nan"][0] > 1e300 and found["nan"][1] == "model.layers.2.mlp.down_proj.weight"


OWN_LOSS = '''
import torch

def loss(inputs):
    """The loss of the papers, written anew: clip-higher, dual clip of 3."""
    advantages, ratio = inputs.trained_advantages(), inputs.log_ratio().exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    return torch.where(advantages < 0, torch.minimum(clipped, -3.0 * advantages), clipped)
'''


def own_losses(arguments: dict[str, Any]) -> dict[str, float]:
    from megatron_dapo.algorithms.objective import BehaviorTerms, PolicyObjective
    from megatron_dapo.config.algorithm_schema import AlgorithmConfig
    from megatron_dapo.config.loss_schema import FunctionLossConfig
    from megatron_dapo.parallel.layout import ParallelLayout
    from megatron_dapo.proof import worker
    from megatron_dapo.proof.cases import MAX_RESPONSE_TOKENS, Cut
    from megatron_dapo.trainer.updater import loss_weights

    objective = PolicyObjective(AlgorithmConfig(loss=FunctionLossConfig(function=f"{arguments['file']}:loss")))

    def own(micro_batch, outputs, index):
        return objective(micro_batch, outputs.logprobs, outputs.entropy, BehaviorTerms(micro_batch.rollout_logprobs))

    problem, built_in = worker.pose_problem(), worker.trained_loss
    worker.trained_loss = lambda problem, actor: own
    try:
        found = {}
        for fields in arguments["layouts"]:
            layout = ParallelLayout(2, **fields)
            if arguments["is_whole"]:
                rows = worker.check_layout(problem, layout, "float32")
            else:
                weights = loss_weights(problem.samples, "token_mean", MAX_RESPONSE_TOKENS)
                actor = worker.build_actor(problem, layout, "float32")
                rows = [worker.check_cut(problem, actor, Cut("2", "packed"), "token_mean", weights)]
            found[layout.describe()] = max(max(row.rel_diff, row.loss_rel_diff) for row in rows)
        return found
    finally:
        worker.trained_loss = built_in  # these processes serve other tests


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one cut", "all cuts"])
def test_a_loss_of_the_users_own_is_exact_under_any_layout(is_whole: bool, tmp_path) -> None:
    layouts: list[dict[str, int]] = [{}, {"tensor": 2}, {"context": 2}]
    (tmp_path / "own_loss.py").write_text(OWN_LOSS)
    arguments = {"file": str(tmp_path / "own_loss.py"), "layouts": layouts, "is_whole": is_whole}
    found = run_distributed(target_in(__file__, "own_losses"), 2, arguments)
    assert len(found) == len(layouts) and max(found.values()) <= 1e-5, found


def built_in_losses(names: list[str]) -> dict[str, float]:
    from megatron_dapo.parallel.layout import ParallelLayout
    from megatron_dapo.proof import worker
    from megatron_dapo.proof.cases import MAX_RESPONSE_TOKENS, Cut
    from megatron_dapo.trainer.updater import loss_weights

    differences = {}
    for name in names:
        problem = worker.pose_problem(loss=name)
        weights = loss_weights(problem.samples, "sample_mean", MAX_RESPONSE_TOKENS)
        for fields in ({"tensor": 2}, {"context": 2}):
            actor = worker.build_actor(problem, ParallelLayout(2, **fields), "float32")
            row = worker.check_cut(problem, actor, Cut("2", "packed"), "sample_mean", weights)
            differences[f"{name} {row.layout}"] = max(row.rel_diff, row.loss_rel_diff)
    return differences


def test_every_built_in_loss_is_exact_cut_over_ranks() -> None:
    names = sorted(PROOF_LOSSES.keys())
    assert set(names) == POLICY_LOSSES.keys() - {"function", "gspo_token"}  # gspo_token has the gradient of gspo
    differences = run_distributed(target_in(__file__, "built_in_losses"), 2, names)
    assert len(differences) == 2 * len(names) and max(differences.values()) <= 1e-5, differences
