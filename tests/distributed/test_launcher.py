from __future__ import annotations

import sys
from types import SimpleNamespace

import launcher
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


@pytest.mark.parametrize(
    ("version", "directory", "is_right"),
    [("0.19.2+ab12cd3", "/new", True), ("0.16.1", "/new", False), ("0.19.2", "/old", False)],
)
def test_a_rank_fails_with_another_megatron_core_or_modules_of_two(
    version: str, directory: str, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("megatron.core")]:
        monkeypatch.delitem(sys.modules, name)
    core = SimpleNamespace(__version__=version, __file__="/new/megatron/core/__init__.py")
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    monkeypatch.setitem(sys.modules, "megatron.core.models", SimpleNamespace(__file__=None))  # no __init__.py
    model = SimpleNamespace(__file__=f"{directory}/megatron/core/models/gpt.py")
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt", model)
    monkeypatch.setenv("MEGATRON_DAPO_MEGATRON_CORE", "0.19.2")
    if is_right:
        launcher._require_megatron_core()
        return
    with pytest.raises(AssertionError, match=r"are for megatron-core 0\.19\.2, the rank has"):
        launcher._require_megatron_core()
