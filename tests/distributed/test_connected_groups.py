"""The process groups that training uses make their first collective at the end of the build, and no others do."""

from __future__ import annotations

from typing import Any

import pytest
from launcher import run_distributed, target_in

from megatron_dapo.config.model_schema import ParallelConfig
from megatron_dapo.plan.memory.communication import model_groups


def check_groups(arguments: dict[str, Any]) -> list[int]:
    """Connect the groups of TP2 x DP2 (or EP2); return the sizes of those that made a collective."""
    import torch.distributed as dist

    from megatron_dapo.megatron.parallel_state import connect_groups, initialize_parallel_state
    from megatron_dapo.parallel.layout import ParallelLayout

    initialize_parallel_state(ParallelLayout(4, tensor=2, **arguments["layout"]))
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
    before = {group.group_name: group._get_sequence_number_for_group() for group in groups}
    assert connect_groups(arguments["has_experts"]) == 0, "without a GPU no device memory is taken"
    connected = [g for g in groups if g._get_sequence_number_for_group() > before[g.group_name]]
    assert len(connected) < len(groups), "megatron-core creates groups that training does not use"
    return sorted(group.size() for group in connected)


@pytest.mark.parametrize(("layout", "has_experts"), [({}, False), ({"expert": 2}, True)])
def test_the_groups_that_the_memory_plan_counts_are_connected(layout: dict[str, int], has_experts: bool) -> None:
    sizes = run_distributed(target_in(__file__, "check_groups"), 4, {"layout": layout, "has_experts": has_experts})
    parallel = ParallelConfig(tp_size=2, ep_size=layout.get("expert", 1))
    assert sizes == sorted(group.ranks for group in model_groups(parallel, 4, has_experts, 4).values())
