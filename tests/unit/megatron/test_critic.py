from __future__ import annotations

from pathlib import Path

import pytest
import torch
from actor_checks import MODELS, SIZES, make_micro_batch, sequences
from critic_checks import (
    CriticReference,
    loss_fn,
    of_rank,
    settings_of,
    train,
    value_error,
    write_critic,
)
from transformers import Gemma3TextConfig, Gemma3TextForSequenceClassification

from megatron_dapo.megatron.critic import MegatronCritic
from megatron_dapo.parallel.layout import ParallelLayout

LAYOUT = ParallelLayout(world_size=1)
pytestmark = pytest.mark.usefixtures("single_process")


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> CriticReference:
    directory = tmp_path_factory.mktemp("critics")
    write_critic(directory, "qwen3")
    return CriticReference.read(directory, "qwen3")


def build(want: CriticReference, **case: str) -> MegatronCritic:
    return MegatronCritic.build(want.directory, LAYOUT, settings_of(case))


def test_the_head_computes_in_fp32_and_keeps_fp32_main_params_of_a_bfloat16_model(want: CriticReference) -> None:
    critic = build(want, dtype="bfloat16")
    assert 1e-5 < value_error(critic, want) < 0.05
    [values, *_] = critic.forward_values(of_rank(LAYOUT))
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())
    train(critic, [10])
    shards = critic.state_shards()
    for name in ("0.output_layer.weight", "0.output_layer.bias"):
        assert shards[f"master/{name}"].dtype == torch.float32
        assert critic.named_local_parameters()[name].dtype == torch.bfloat16


def test_packing_does_not_change_a_sequence(want: CriticReference) -> None:
    critic, parts = build(want), sequences((5, 17, 1, 30, 64, 2), seed=9)
    [together] = critic.forward_values([make_micro_batch(parts, LAYOUT, 1, seed=0)])
    alone = critic.forward_values([make_micro_batch([part], LAYOUT, 1, seed=0) for part in parts])
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=3e-6)


def test_values_of_a_gemma_3_are_those_of_transformers(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**{**SIZES, **MODELS["gemma3"][1]}, num_labels=1)
    model = Gemma3TextForSequenceClassification(config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path / "reward")
    critic, parts = (
        MegatronCritic.build(tmp_path / "reward", LAYOUT, settings_of({})),
        sequences((5, 17, 1, 30), seed=9),
    )
    [values] = critic.forward_values([make_micro_batch(parts, LAYOUT, 1, seed=0)])
    exact = model.double()
    with torch.no_grad():
        expected = [exact.score(exact.model(part[None]).last_hidden_state)[0, :, 0] for part in parts]
    torch.testing.assert_close(values.double(), torch.cat(expected), rtol=0, atol=1e-5)


def test_training_sees_the_values_of_the_forward_pass_bit_for_bit(want: CriticReference) -> None:
    critic, seen = build(want), {}

    def watch(micro_batch, values, index):
        seen[index] = values.detach().clone()
        return loss_fn(micro_batch, values, index)

    before = critic.forward_values(of_rank(LAYOUT))
    result = critic.train_step(of_rank(LAYOUT), watch, 1e-3)
    assert result.applied and result.metrics["num_targets"] == sum(float(m.loss_mask.sum()) for m in of_rank(LAYOUT))
    assert all(torch.equal(values, seen[index]) for index, values in enumerate(before))


def test_a_policy_without_weights_gives_a_critic_that_starts_near_zero(want: CriticReference) -> None:
    from critic_checks import model_of

    directory = want.directory.parent / "config_only"
    directory.mkdir(exist_ok=True)
    model_of("qwen3", "ForCausalLM").config.save_pretrained(directory)
    critic = MegatronCritic.build(directory, LAYOUT, settings_of({}), random_seed=1)
    values = torch.cat(critic.forward_values(of_rank(LAYOUT)))
    assert 1e-4 < values.abs().mean() < 0.05


def test_a_wrong_directory_is_refused_before_anything_is_built(want: CriticReference, tmp_path: Path) -> None:
    from critic_checks import model_of

    model_of("qwen3", "ForCausalLM", vocab_size=299).save_pretrained(tmp_path / "policy")
    with pytest.raises(ValueError, match="vocab_size 300 and 299"):
        MegatronCritic.build(want.directory, LAYOUT, settings_of({}), policy_dir=tmp_path / "policy")
