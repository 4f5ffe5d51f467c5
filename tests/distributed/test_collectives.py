"""Collectives over three gloo processes; encodings on one."""

from __future__ import annotations

from typing import Any

import pytest
import numpy as np
import torch
import torch.distributed as dist
from launcher import run_distributed, target_in

from megatron_dapo.parallel import collectives
from megatron_dapo.parallel.coordination import Coordination

TENSORS = {
    "empty": torch.zeros(0, 3),
    "empty of numpy": torch.from_numpy(np.zeros(0)),  # its stride is 0
    "scalar": torch.tensor(7, dtype=torch.int64),
    "odd": torch.tensor([True, False, True]),
    "half": torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16),
    "double": torch.linspace(0, 1, 5, dtype=torch.float64),
    "strided": torch.arange(12, dtype=torch.float32).view(3, 4).T,
}


def worker(_: Any) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    value = {"text": "Ωmega", "list": [1, 2.5, None], "big": "x" * 100_000}
    assert collectives.broadcast_json(value if rank == 1 else None, source=1) == value
    gathered = Coordination(dist.group.WORLD).gather({"rank": rank, "pad": "y" * rank})
    assert gathered == [{"rank": r, "pad": "y" * r} for r in range(size)]

    received = collectives.broadcast_tensors(TENSORS if rank == 2 else None, source=2)
    assert list(received) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor), name
    assert collectives.broadcast_tensors({} if rank == 0 else None) == {}

    # Insertion order differs between ranks: names decide, not positions.
    mine = [("a", torch.tensor([1.0, 2.0]) * (rank + 1)), ("b", 10 - rank)]
    values = dict(mine if rank else reversed(mine))
    assert {name: part.tolist() for name, part in collectives.sum_over(values).items()} == {"a": [6.0, 12.0], "b": 27.0}
    assert {name: part.tolist() for name, part in collectives.max_over(values).items()} == {"a": [3.0, 6.0], "b": 10.0}
    assert collectives.sum_over({"count": 2**40 + rank})["count"].item() == 3 * 2**40 + 3

    for reduce in (collectives.sum_over, collectives.max_over):
        with pytest.raises(AssertionError, match="different names or shapes"):
            reduce({"loss" if rank else "los": 1.0})

    pair = dist.new_group([1, 2])
    if rank:
        assert collectives.broadcast_json("hi" if rank == 2 else None, source=1, group=pair) == "hi"
    return "done"


def test_collectives_over_processes() -> None:
    assert run_distributed(target_in(__file__, "worker"), 3) == "done"
