"""Counters in a checkpoint: those of an earlier version load, unknown ones are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.trainer.actor_learner import LearnerCounters
from megatron_dapo.trainer.checkpointing import Checkpoints, CriticState, RunProgress, RunState
from megatron_dapo.trainer.critic_learner import CriticCounters

LAYOUT = ParallelLayout(1)


def restored(critic: dict[str, Any]) -> CriticCounters:
    """The critic's counters after restoring a checkpoint whose run.json has these for it."""
    counters = CriticCounters()
    state = RunState(None, RunProgress(), LearnerCounters(), None, LAYOUT, 0, 1, CriticState(None, counters, LAYOUT, 0))
    checkpoint = SimpleNamespace(
        folder="checkpoint",
        metadata=state.layouts(),
        load_json=lambda name: {"progress": {}, "learner": {}, "critic": critic},
    )
    Checkpoints(SimpleNamespace(), state, lambda ok: ok).restore_policy(checkpoint)
    return counters


def test_fields_that_an_older_checkpoint_lacks_keep_their_defaults() -> None:
    saved = {"optimizer_steps": 4, "skipped_steps": 1, "history": [[0.5, 0.1]]}
    assert restored(saved) == CriticCounters(4, 1, 0, [[0.5, 0.1]])


def test_fields_of_another_version_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"CriticCounters has no fields \['passes'\].*resume with that version"):
        restored({"passes": 3})
