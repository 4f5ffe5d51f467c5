import json
from dataclasses import replace

import pytest
import torch

from megatron_dapo.data.sample_tensors import from_tensors, to_tensors
from megatron_dapo.token_support import WHOLE
from megatron_dapo.types import CriticContext, TrainSample, Window


def _sample(index, prompt, response):
    generator = torch.Generator().manual_seed(index)
    return TrainSample(
        sample_id=f"g{index}/0",
        group_index=index,
        tokens=torch.randint(0, 152_064, (prompt + response,), generator=generator),
        prompt_length=prompt,
        loss_mask=torch.ones(response),
        advantages=torch.randn(response, generator=generator),
        rollout_logprobs=-torch.rand(response, generator=generator),
        staleness=torch.arange(response) // 2 * 1.0,
    )


def test_round_trip_is_exact():
    samples = [_sample(0, 3, 5), _sample(1, 1, 1), _sample(2, 7, 2)]
    description, tensors = to_tensors(samples)
    restored = from_tensors(json.loads(json.dumps(description)), tensors)
    for before, after in zip(samples, restored, strict=True):
        assert (before.sample_id, before.group_index, before.prompt_length) == (
            after.sample_id,
            after.group_index,
            after.prompt_length,
        )
        for name in ("tokens", "loss_mask", "advantages", "rollout_logprobs", "staleness"):
            assert torch.equal(getattr(before, name), getattr(after, name))


def test_no_samples():
    assert from_tensors(*to_tensors([])) == []


def test_damaged_batch_names_the_numbers():
    description, tensors = to_tensors([_sample(0, 3, 5)])
    tensors["advantages"] = tensors["advantages"][:-1]
    with pytest.raises(ValueError, match="advantages holds 4 values.*add up to 5"):
        from_tensors(description, tensors)


def test_critic_contexts_are_restored():
    window = Window(start=1, is_finished=False)
    judged = replace(_sample(0, 3, 2), critic_context=CriticContext(reward=-0.5, is_correct=False, window=window))
    description, tensors = to_tensors([judged, _sample(1, 2, 2)])

    back = from_tensors(json.loads(json.dumps(description)), tensors)

    assert [sample.critic_context for sample in back] == [judged.critic_context, None]


def without(tensors, name):
    return {other: tensor for other, tensor in tensors.items() if other != name}


def test_supports_are_restored():
    supports = [torch.tensor([5, 7, ~2, ~9, WHOLE], dtype=torch.int32), torch.tensor([~1], dtype=torch.int32)]
    samples = [replace(_sample(0, 3, 3), support=supports[0]), _sample(1, 2, 2), replace(_sample(2, 1, 1), support=supports[1])]
    description, tensors = to_tensors(samples)
    back = from_tensors(json.loads(json.dumps(description)), tensors)
    assert torch.equal(back[0].support, supports[0]) and torch.equal(back[2].support, supports[1])
    assert back[1].support is None and back[0].support.dtype == torch.int32
    del description["support"]  # Batches dumped before supports were recorded have none.
    assert not any(one.support is not None for one in from_tensors(description, without(tensors, "support")))
    with pytest.raises(ValueError, match="support holds 6 values, its lengths add up to 0"):
        from_tensors(description, tensors)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_routing_is_restored(dtype):
    routing = [torch.randint(0, 200, (rows, 3, 2)).to(dtype) for rows in (7, 1)]
    samples = [
        replace(_sample(0, 3, 5), routing=routing[0]),
        _sample(1, 2, 2),
        replace(_sample(2, 1, 1), routing=routing[1]),
    ]
    description, tensors = to_tensors(samples)
    assert tensors["routing"].dtype == dtype
    back = from_tensors(json.loads(json.dumps(description)), tensors)
    assert torch.equal(back[0].routing, routing[0]) and torch.equal(back[2].routing, routing[1])
    assert back[1].routing is None and back[0].routing.dtype == dtype
    with pytest.raises(ValueError, match="routing holds 47 values, its lengths add up to 48"):
        from_tensors(description, {**tensors, "routing": tensors["routing"][:-1]})
