"""Of several failures of one engine, the one closest to the cause is reported."""

from __future__ import annotations

import pytest

from megatron_dapo.bridge.protocol.peer_group import PeerError
from megatron_dapo.bridge.transports.base import Call, SyncDeadline
from megatron_dapo.bridge.transports.p2p import FailureKind, SyncFailure, _collect, _few_failures


def call(error: Exception) -> Call:
    def fail() -> None:
        raise error

    return Call(fail)


@pytest.mark.parametrize("cause", ["PeerError is not defined", "the loader took longer than its 3 s"])
def test_a_cause_is_known_by_its_type_and_not_by_its_text(cause: str) -> None:
    calls = [call(TimeoutError("late")), call(PeerError("a connection broke")), call(ValueError(cause))]
    with pytest.raises(ValueError, match=cause):
        _collect(calls, SyncDeadline(10))
    with pytest.raises(PeerError):
        _collect(calls[:2], SyncDeadline(10))


def test_leaders_come_first_then_causes_then_what_others_saw_of_them() -> None:
    lost, late = FailureKind.LOST, FailureKind.LATE
    views = [
        {"0": [SyncFailure(True, late, 1, "late")]},
        {"0": [[True, 1, 2, "a connection broke"]], "1": [[False, 0, 2, "other"]]},  # sent by another rank
        {"0": [SyncFailure(True, FailureKind.CAUSE, 3, "a bad shape")]},
        {"0": [SyncFailure(False, lost, 0, "the leader's connection broke")]},
    ]
    failures = [SyncFailure(*each) for each in _few_failures(views)["0"]]
    assert [failure.rank for failure in failures] == [0, 3, 2, 1]
    assert min(failures, key=lambda failure: failure.kind).reason == "a bad shape"
