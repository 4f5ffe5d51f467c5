"""A filter of groups: train those whose rewards differ, however right they are. rollout.group_filter = "group_filter.py:keep"."""

from megatron_dapo import Group


def keep(group: Group) -> bool:
    """Return True to train a group."""
    rewards = [sample.reward for sample in group.samples]
    return max(rewards) - min(rewards) > 1e-3
