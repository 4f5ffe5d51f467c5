from __future__ import annotations

import pytest
import torch
from actor_checks import (
    MODELS,
    REPLAYED,
    TEMPERATURE,
    Reference,
    build_actor,
    differing,
    loss_fn,
    make_micro_batch,
    parity,
    ragged_batch,
    sequences,
    snapshot,
    take_over,
    train,
)

from megatron_dapo.config.model_schema import OptimizerConfig
from megatron_dapo.megatron.actor import ActorSettings, MegatronActor
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.types import MicroBatch

LAYOUT = ParallelLayout(world_size=1)
pytestmark = pytest.mark.usefixtures("single_process")


def micro_batches(seed: int = 3) -> list[MicroBatch]:
    return [micro_batch for _, micro_batch in ragged_batch(seed).of_rank(LAYOUT, 0)]


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_the_logprobs_and_gradients_of_transformers(references: str, name: str) -> None:
    errors = parity(Reference.read(references, name), LAYOUT, ActorSettings(replays_routing=name.endswith(REPLAYED)))
    assert errors["logprob"] < 1e-5 and errors["gradient"] < 1e-5, errors
    assert errors["loss"] < 1e-5 and errors["norm"] < 1e-5, errors


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_bit(references: str, recompute: str) -> None:
    want = Reference.read(references, "qwen3")
    plain = build_actor(want, LAYOUT)
    plain.accumulate_gradients(micro_batches(), loss_fn, TEMPERATURE)
    again = build_actor(want, LAYOUT, ActorSettings(model=ModelSettings(recompute=recompute)))
    again.accumulate_gradients(micro_batches(), loss_fn, TEMPERATURE)
    for name, gradient in plain.gradients().items():
        assert torch.equal(gradient, again.gradients()[name]), name


def test_bfloat16_is_close_and_keeps_fp32_main_params(references: str) -> None:
    want = Reference.read(references, "qwen2")
    settings = ActorSettings(model=ModelSettings(dtype="bfloat16"))
    errors = parity(want, LAYOUT, settings)
    assert 1e-5 < errors["logprob"] < 0.1 and errors["gradient"] < 0.1, errors
    actor = build_actor(want, LAYOUT, settings)
    train(actor, [10])
    shards = actor.state_shards()
    assert all(tensor.dtype == torch.float32 for key, tensor in shards.items() if key.startswith("master/"))
    for name, parameter in actor.named_local_parameters().items():
        assert torch.equal(parameter.flatten(), shards[f"master/{name}"].to(torch.bfloat16)), name


def test_packing_does_not_change_a_sequence(references: str) -> None:
    actor = build_actor(Reference.read(references, "llama3"), LAYOUT)
    parts = sequences((5, 17, 1, 30, 64, 2), seed=9)
    packed = make_micro_batch(parts, LAYOUT, 1, seed=0)
    [together] = actor.forward_logprobs([packed], TEMPERATURE)
    alone = actor.forward_logprobs([make_micro_batch([part], LAYOUT, 1, seed=0) for part in parts], TEMPERATURE)
    for name in ("logprobs", "entropy"):
        separate = torch.cat([getattr(outputs, name) for outputs in alone])
        torch.testing.assert_close(getattr(together, name), separate, rtol=0, atol=3e-6)


def test_training_sees_the_logprobs_of_the_forward_pass_bit_for_bit(references: str) -> None:
    actor = build_actor(Reference.read(references, "qwen2"), LAYOUT)
    seen = {}

    def watch(micro_batch, outputs, index):
        seen[index] = outputs.logprobs.detach().clone()
        return loss_fn(micro_batch, outputs, index)

    old = actor.forward_logprobs(micro_batches(), TEMPERATURE)
    actor.train_step(micro_batches(), watch, TEMPERATURE, 1e-3)
    assert all(torch.equal(outputs.logprobs, seen[index]) for index, outputs in enumerate(old))


def test_three_steps_are_adamw_with_clipping_and_decay_of_matrices_only(references: str) -> None:
    optimizer = OptimizerConfig(betas=(0.8, 0.9), epsilon=1e-6, weight_decay=0.3, clip_grad=0.01)
    actor = build_actor(Reference.read(references, "qwen3"), LAYOUT, ActorSettings(optimizer=optimizer))
    parameters = actor.named_local_parameters()
    mirror = {name: torch.nn.Parameter(parameter.detach().double()) for name, parameter in parameters.items()}
    groups = [
        {"params": [p for p in mirror.values() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in mirror.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6)
    for step, learning_rate in enumerate((1e-2, 3e-3, 1e-3)):
        actor.accumulate_gradients(micro_batches(step), loss_fn, TEMPERATURE)
        for name, gradient in actor.gradients().items():
            mirror[name].grad = gradient.double()
        norm = torch.nn.utils.clip_grad_norm_(mirror.values(), 0.01)
        for group in adamw.param_groups:
            group["lr"] = learning_rate
        adamw.step()
        result = actor.train_step(micro_batches(step), loss_fn, TEMPERATURE, learning_rate)
        assert norm > 0.01 and abs(result.grad_norm - float(norm)) < 1e-6 * float(norm)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach().double(), mirror[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.fixture
def actor(references: str) -> MegatronActor:
    return build_actor(Reference.read(references, "qwen2"), LAYOUT)


def test_a_fresh_state_has_no_moments(actor: MegatronActor) -> None:
    saved = snapshot(actor)
    assert {key.split("/")[0] for key in saved} == {"parameter", "random"}
    train(actor, [10])
    take_over(actor, saved)
    assert not differing(snapshot(actor), saved)


def test_batches_that_cannot_run_are_refused(actor: MegatronActor) -> None:
    with pytest.raises(ValueError, match="at least one micro-batch"):
        actor.forward_logprobs([], TEMPERATURE)
    [first, *_] = micro_batches()
    with pytest.raises(ValueError, match="53 tokens, cu_seqlens end at 23"):
        actor.forward_logprobs([MicroBatch(**{**vars(first), "cu_seqlens": first.cu_seqlens[:4]})], TEMPERATURE)


def test_a_layout_for_other_processes_or_sizes_is_refused(references: str) -> None:
    want = Reference.read(references, "qwen2")
    with pytest.raises(ValueError, match="is for 2 processes, but 1 were started"):
        build_actor(want, ParallelLayout(world_size=2, tensor=2))
    with pytest.raises(ValueError, match="num_key_value_heads 2"):
        build_actor(want, ParallelLayout(world_size=3, tensor=3))


def test_a_loss_without_metrics_trains(actor: MegatronActor) -> None:
    result = actor.train_step(micro_batches(), lambda *step: (loss_fn(*step)[0], {}), TEMPERATURE, 1e-3)
    assert result.applied and result.metrics == {}
