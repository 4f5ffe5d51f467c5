"""A collector's state in two parts: nothing is lost, and the document is small."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.checkpoints.store import CheckpointStore, save_checkpoint
from megatron_dapo.engines.base import completion_from_json
from megatron_dapo.rollout.serialization import join_state, split_state
from megatron_dapo.token_support import WHOLE
from megatron_dapo.trainer.checkpointing import collector_state
from megatron_dapo.types import Completion


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value after a round trip through JSON."""
    return json.loads(json.dumps(state, default=np.ndarray.tolist))


def through_files(state: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Saved as a run saves it, and read back."""
    document, tensors = split_state(state)
    store = CheckpointStore(directory, keep=1)

    def write(writer: Any) -> None:
        writer.save_json("collector.json", document)
        writer.save_tensors("collector.safetensors", tensors)

    save_checkpoint(store, 1, write)
    return collector_state(store.open(1))


def test_windows_are_restored_exactly_and_continue(tmp_path: Path) -> None:
    import window_world

    world = window_world.make_window_world([0.5] * 60)
    for _ in range(3):
        batch = world.collector.collect(5)
    world.collector.give_back(batch)
    state = world.collector.state_dict()
    read = through_files(state, tmp_path)
    assert plain(read) == plain(state) and read["pool"] and read["given_back"]
    resumed = world.restart(json.dumps({"collector": plain(read), "version": 0}))
    again = world.restart(world.checkpoint())
    for _ in range(4):
        assert resumed.collector.collect(5) == again.collector.collect(5)


def test_groups_and_unfinished_ones_are_restored_exactly(tmp_path: Path, make_world: Callable) -> None:
    world = make_world([0.5] * 200, oversample=3.0, max_staleness=3, partial_rollout=True, filter_groups=False)
    world.collector.collect(4)
    state = world.collector.state_dict()
    assert state["open_groups"] and state["buffer"]["groups"]
    assert plain(through_files(state, tmp_path)) == plain(state)


def response(token_ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"request_id": "g/0", "token_ids": token_ids, "logprobs": logprobs, "versions": [{"start": 0}]}


def test_no_number_stands_in_the_document() -> None:
    state = {"pool": [{"completions": {"0": response([7, 8, 9], [-0.5, -0.25, 0.0]), "1": response([], [])}}], "n": [1]}
    document, tensors = split_state(state)
    completions = document["pool"][0]["completions"]
    assert completions["0"] == {"request_id": "g/0", "versions": [{"start": 0}], "token_span": [0, 3]}
    assert completions["1"]["token_span"] == [3, 3] and document["n"] == [1]
    assert tensors["token_ids"].tolist() == [7, 8, 9] and tensors["token_ids"].dtype == torch.int32
    assert tensors["logprobs"].dtype == torch.float32 and plain(join_state(document, tensors)) == state


def test_a_state_without_responses() -> None:
    document, tensors = split_state({"version": 1, "stream": {"order": ["a", "b"]}})
    assert not any(tensor.numel() for tensor in tensors.values())
    assert all(tensor.view(torch.uint8).numel() == 0 for tensor in tensors.values()), "writable as bytes"
    assert join_state(document, tensors) == {"version": 1, "stream": {"order": ["a", "b"]}}


def test_parts_of_two_checkpoints_are_refused() -> None:
    document, _ = split_state({"held": response([1, 2, 3], [-1.0] * 3)})
    _, others = split_state({"held": response([1, 2], [-1.0] * 2)})
    with pytest.raises(
        ValueError, match=r"tokens \[0, 3\), the tensors hold 2 tokens and 2 log-probs: .* one checkpoint"
    ):
        join_state(document, others)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_routing_comes_back_in_its_type_and_shape(tmp_path: Path, dtype: type) -> None:
    draws = np.random.default_rng(0)
    routing = {name: draws.integers(0, 200, (rows, 3, 2)).astype(dtype) for name, rows in (("0", 4), ("2", 2))}
    responses = {
        "0": {**response([7, 8], [-0.5, -0.25]), "routing": routing["0"]},
        "1": response([9], [-1.0]),  # begun before the run replayed the routing
        "2": {**response([3], [-2.0]), "routing": routing["2"]},
    }
    document, tensors = split_state({"pool": [{"completions": responses}]})
    assert "7, 8" not in json.dumps(document) and tensors["routing"].numel() == 4 * 6 + 2 * 6
    read = through_files({"pool": [{"completions": responses}]}, tmp_path)["pool"][0]["completions"]
    assert all(
        read[name]["routing"].dtype == dtype and (read[name]["routing"] == routing[name]).all() for name in routing
    )
    assert "routing" not in read["1"] and completion_of(read["1"]).routing is None
    assert (completion_of(read["2"]).routing == routing["2"]).all()
    with pytest.raises(ValueError, match=r"a response's routing is \[24, 36\), the tensor holds 30 numbers"):
        join_state(document, {**tensors, "routing": tensors["routing"][:30]})


def completion_of(value: Mapping[str, Any]) -> Completion:
    return completion_from_json({**value, "finish_reason": "stop", "versions": ()})


def test_supports_come_back_with_those_who_have_them(tmp_path: Path) -> None:
    supports = {"0": np.array([4, ~7, 8, 1, ~2], np.int32), "2": np.array([WHOLE], np.int32)}
    completions = {
        "0": {**response([7, 8], [-0.5, -0.25]), "support": supports["0"]},
        "1": response([9], [-1.0]),
        "2": {**response([3], [-2.0]), "support": supports["2"]},
    }
    document, tensors = split_state({"pool": completions})
    assert "7" not in json.dumps(document) and tensors["support"].tolist() == [4, ~7, 8, 1, ~2, WHOLE]
    read = through_files({"pool": completions}, tmp_path)["pool"]
    for name in supports:
        assert (completion_of(read[name]).support == supports[name]).all()
    assert completion_of(read["1"]).support is None
