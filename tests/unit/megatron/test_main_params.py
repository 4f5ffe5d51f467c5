"""Main params are the checkpoint's values, not those that the model's type left of them."""

from __future__ import annotations

import pytest
import torch
from actor_checks import TEMPERATURE, Reference, build_actor, loss_fn, ragged_batch

from megatron_dapo.megatron.actor import ActorSettings
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.state import loading_buffers, round_into
from megatron_dapo.parallel.layout import ParallelLayout

LAYOUT = ParallelLayout(world_size=1)
pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("distributed", [True, False])
def test_main_params_of_a_bfloat16_model_are_the_fp32_checkpoint_bit_for_bit(
    references: str, distributed: bool
) -> None:
    want = Reference.read(references, "qwen3")
    wide = build_actor(want, LAYOUT).named_local_parameters()
    settings = ActorSettings(model=ModelSettings(dtype="bfloat16"), use_distributed_optimizer=distributed)
    actor = build_actor(want, LAYOUT, settings)
    shards = actor.state_shards()
    for name, parameter in actor.named_local_parameters().items():
        assert torch.equal(shards[f"master/{name}"].flatten(), wide[name].flatten()), name
        assert torch.equal(parameter, wide[name].to(torch.bfloat16)), name
    assert any(
        not torch.equal(shards[f"master/{name}"].flatten(), p.flatten().float())
        for name, p in actor.named_local_parameters().items()
    ), "nothing was rounded"


def test_a_step_of_no_length_rounds_the_main_params_and_nothing_else(references: str) -> None:
    actor = build_actor(
        Reference.read(references, "qwen2"), LAYOUT, ActorSettings(model=ModelSettings(dtype="bfloat16"))
    )
    before = {name: parameter.detach().clone() for name, parameter in actor.named_local_parameters().items()}
    actor.train_step([m for _, m in ragged_batch().of_rank(LAYOUT, 0)], loss_fn, TEMPERATURE, learning_rate=0.0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in actor.named_local_parameters().items())


def filled(parameters, load):
    buffers = loading_buffers(parameters)
    load(buffers)
    return buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_missing_tensors_are_named(dtype: torch.dtype) -> None:
    parameters = {name: torch.nn.Parameter(torch.full((2, 3), torch.nan, dtype=dtype)) for name in ("one", "two")}

    def load(buffers) -> None:
        buffers["one"].fill_(1.0)
        buffers["two"][0] = 2.0

    with pytest.raises(ValueError, match="two was not loaded completely"):
        round_into(parameters, filled(parameters, load))


def test_only_values_that_were_rounded_are_kept() -> None:
    parameters = {name: torch.nn.Parameter(torch.empty(2, dtype=torch.bfloat16)) for name in ("fits", "does not")}

    def load(buffers) -> None:
        buffers["fits"].fill_(0.5)
        buffers["does not"].fill_(0.1)

    kept = round_into(parameters, filled(parameters, load))
    assert list(kept) == ["does not"] and torch.equal(kept["does not"], torch.full((2,), 0.1))


def test_main_params_of_weights_held_as_fp8_are_set_even_where_nothing_was_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """megatron-core would take them from the values before the load."""
    monkeypatch.setattr("megatron_dapo.megatron.state.is_float8tensor", lambda tensor: True)
    parameters = {"one": torch.nn.Parameter(torch.empty(2, dtype=torch.bfloat16))}
    assert list(round_into(parameters, {"one": torch.zeros(2)})) == ["one"]
