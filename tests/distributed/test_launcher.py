from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from launcher import run_distributed, target_in


def sum_of_ranks(arguments: dict[str, int]) -> list[int]:
    total = torch.tensor([dist.get_rank() + arguments["offset"]])
    dist.all_reduce(total)
    return total.tolist()


def fail_on_rank_one(arguments: None) -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("the cause")
    dist.barrier()


def hang(arguments: None) -> None:
    if dist.get_rank() == 1:
        import time

        time.sleep(60)
    dist.barrier()


def test_ranks_communicate_and_rank_0_returns() -> None:
    assert run_distributed(target_in(__file__, "sum_of_ranks"), 2, {"offset": 10}, timeout_s=60) == [21]


def test_the_failing_rank_is_named_with_its_output() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed(.|\n)*the cause"):
        run_distributed(target_in(__file__, "fail_on_rank_one"), 2, timeout_s=60)


def test_the_deadline_ends_a_hang() -> None:
    with pytest.raises(TimeoutError, match="still ran"):
        run_distributed(target_in(__file__, "hang"), 2, timeout_s=8)
