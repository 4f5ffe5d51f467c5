"""Value pretraining leaves every bit of the policy unchanged."""

from __future__ import annotations

import torch

from megatron_dapo.trainer.value_pretraining import weights_digest


def test_a_digest_sees_one_changed_bit() -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    before = weights_digest(weights)
    assert before == weights_digest({name: tensor.clone() for name, tensor in reversed(weights.items())})
    weights["b"][1] = 1.0078125
    assert weights_digest(weights) != before
