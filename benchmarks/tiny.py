"""Overrides of a quickstart recipe that make a step tiny, for the --tiny runs of the benchmarks that train."""

from __future__ import annotations

# Responses keep their length: shorter ones would all be cut and wrong, and no group would teach anything.
TINY_STEP = ("rollout.prompts_per_step=4", "training.mini_batch_prompts=4", "rollout.group_size=4")
