"""Staging memory: blocks for messages that cannot be sent from, or received into, their own tensors."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_dapo.bridge.protocol.p2p_stream import Staging


def test_a_message_above_the_budget_is_staged_alone() -> None:
    staging = Staging(torch.device("cpu"), 100)
    assert staging.has(150)
    large, small = staging.take(150), staging.take(20)  # one bucket's
    assert not staging.has(1)
    staging.give_back(small)
    staging.give_back(large)
    assert staging.has(100)


def test_a_block_is_reused() -> None:
    staging = Staging(torch.device("cpu"), 100)
    block = staging.take(60)
    staging.give_back(block)
    assert staging.take(40).data_ptr() == block.data_ptr()


@pytest.mark.parametrize("seed", range(20))
def test_staging_stays_within_its_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **kwargs: made.append(size) or original(size, **kwargs))
    draw, staging, taken = random.Random(seed), Staging(torch.device("cpu"), 1000), []
    for _ in range(300):
        size = draw.randint(1, 300)
        while not staging.has(size):
            staging.give_back(taken.pop(draw.randrange(len(taken))))
        taken.append(staging.take(size))
        assert taken[-1].numel() >= size
        # A reused block may be up to twice as large as its message.
        assert sum(block.numel() for block in taken) + sum(free.numel() for free in staging._free) <= 2000
    assert len(made) < 300
