"""Counters of a weight sync through shared memory: when a writer or a reader may continue, and what ends its wait."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatron_dapo.bridge.protocol.progress import NUM_WORDS, ArenaProgress


@pytest.fixture
def progress() -> ArenaProgress:
    progress = ArenaProgress(torch.full((NUM_WORDS,), 99, dtype=torch.int64))  # left by an earlier sync
    progress.start(5)
    return progress


def test_writers_may_be_two_buckets_ahead_of_the_reader(progress: ArenaProgress) -> None:
    assert progress.wait_for_slot(0, 0.01) and progress.wait_for_slot(1, 0.01)
    assert not progress.wait_for_slot(2, 0.01)
    progress.count_loaded(1)
    assert progress.wait_for_slot(2, 0.01)
    assert not progress.wait_for_slot(3, 0.01)


def test_a_bucket_is_complete_once_all_ranks_have_written(progress: ArenaProgress) -> None:
    progress.count_written(0, 2)
    progress.count_written(2, 1)
    with pytest.raises(TimeoutError, match="bucket 0"):
        progress.wait_for_bucket(0, 5, 3, 0.01)
    progress.count_written(1, 1)
    progress.wait_for_bucket(0, 5, 3, 0.01)
    with pytest.raises(TimeoutError, match="bucket 1"):
        progress.wait_for_bucket(1, 5, 3, 0.01)


def test_another_sync_is_never_read(progress: ArenaProgress) -> None:
    progress.count_written(0, 1)
    with pytest.raises(ValueError, match="abandoned the weight sync"):
        progress.wait_for_bucket(0, 4, 1, 10.0)


def test_a_sync_begins_once_and_only_while_it_is_current(progress: ArenaProgress) -> None:
    with pytest.raises(ValueError, match="abandoned the weight sync"):
        progress.begin(4)
    progress.begin(5)
    with pytest.raises(ValueError, match="begun already"):
        progress.begin(5)
    progress.start(6)
    progress.stop_sync(5)  # an earlier sync: no effect on this one
    progress.begin(6)
    progress.stop_sync(6)
    assert progress.is_stopped
    with pytest.raises(ValueError, match="abandoned the weight sync"):
        progress.begin(6)


def test_stopping_ends_all_waits(progress: ArenaProgress) -> None:
    errors = []

    def wait(function, *arguments) -> None:
        with pytest.raises(ValueError) as caught:
            function(*arguments)
        errors.append(str(caught.value))

    waits = [(progress.wait_for_slot, 2, 30.0), (progress.wait_for_bucket, 0, 5, 1, 30.0)]
    threads = [threading.Thread(target=wait, args=arguments, daemon=True) for arguments in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    progress.stop()
    for thread in threads:
        thread.join(10.0)
    assert sorted(errors) == ["it has left the weight sync", "the trainer has abandoned the weight sync"]
