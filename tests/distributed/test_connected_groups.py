"""Every process group of a run makes its first collective at the end of the build."""

from __future__ import annotations

from typing import Any

from launcher import run_distributed, target_in


def check_groups(arguments: dict[str, Any]) -> dict[str, int]:
    """Create groups of a layout and of a part of the world, connect them, and return the collectives of each."""
    import torch.distributed as dist

    from megatron_dapo.megatron.parallel_state import connect_groups, initialize_parallel_state
    from megatron_dapo.parallel.layout import ParallelLayout
    from megatron_dapo.parallel.rank_set import partition_ranks

    initialize_parallel_state(ParallelLayout(4, tensor=2))
    partition_ranks(1, 60.0)  # rank 3 is a member of other groups than the rest
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
    before = sum(group._get_sequence_number_for_group() == 0 for group in groups)
    assert before, "no group is new: there is nothing to see"
    assert connect_groups() == 0, "without a GPU no device memory is taken"
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}


def test_all_groups_have_made_a_collective() -> None:
    counts = run_distributed(target_in(__file__, "check_groups"), 4, {})
    assert len(counts) > 4 and min(counts.values()) >= 1, counts
