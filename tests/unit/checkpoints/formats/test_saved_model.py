"""The index of a saved model: what it says is checked before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dapo.checkpoints.formats.saved_model import SavedModel, state_index
from megatron_dapo.files.durable import HERE
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import Shard, TensorSpec

SPECS = {"a": TensorSpec((4, 3), torch.bfloat16), "b": TensorSpec((5,), torch.bfloat16)}
PIECES = {
    "policy_00000.safetensors": [Shard("a", (0, 0), (2, 3), "", ()), Shard("b", (0,), (5,), "", ())],
    "policy_00001.safetensors": [Shard("a", (2, 0), (2, 3), "", ())],
}
FIRST, SECOND = PIECES
WHOLE = {
    "a": torch.arange(12, dtype=torch.bfloat16).view(4, 3),
    "b": torch.arange(5, dtype=torch.bfloat16),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of two tensors in two files; a moment is 10 times its parameter."""
    HERE.write_json(tmp_path / "policy.json", state_index(SPECS, ParallelLayout(2), True, PIECES))
    for file, slices in PIECES.items():
        tensors = {}
        for stored in slices:
            values = WHOLE[stored.tensor].narrow(0, stored.global_offset[0], stored.shape[0])
            for kind in ("parameter", "master", "exp_avg", "exp_avg_sq"):
                scaled = values if kind == "parameter" else values.float() * (10 if kind == "exp_avg" else 1)
                tensors[f"{kind}/{stored.tensor}{stored.bounds}"] = scaled
            if not any(stored.global_offset):
                tensors[f"step/{stored.tensor}"] = torch.tensor(7.0)
        HERE.write_tensors(tmp_path / file, {**tensors, "random/torch": torch.tensor([len(file)])})
    return tmp_path


def test_a_whole_tensor_is_read_from_all_files(directory: Path) -> None:
    with SavedModel(directory) as saved:
        assert saved.specs == SPECS and saved.layout["world_size"] == 2 and saved.distributed
        for name, values in WHOLE.items():
            assert torch.equal(saved.read_tensor(name), values)
            assert torch.equal(saved.read_tensor(name, "exp_avg"), 10 * values.float())
            assert saved.read_step(name, "policy_00000.safetensors") == 7.0
        assert list(saved.read_local(1)) == ["random/torch"]


def test_an_fp32_tensor_of_a_16_bit_model_has_no_main_param(tmp_path: Path) -> None:
    specs = {**SPECS, "b": TensorSpec((5,), torch.float32)}
    pieces = {FIRST: [Shard("a", (0, 0), (4, 3), "", ()), Shard("b", (0,), (5,), "", ())]}
    index = state_index(specs, ParallelLayout(1), True, pieces)
    assert (index["version"], index["kinds"]["parameter"], index["types"]) == (3, "BF16", {"b": "F32"})
    assert "types" not in (one := state_index(SPECS, ParallelLayout(1), True, pieces)) and one["version"] == 2
    values = torch.tensor([1 / 3, 2.0, 3.0, 4.0, 5.0])
    HERE.write_json(tmp_path / "policy.json", index)
    HERE.write_tensors(tmp_path / FIRST, {"parameter/b[0:5]": values, "exp_avg/b[0:5]": 2 * values})
    with SavedModel(tmp_path) as saved:
        assert saved.specs == specs and "master" in saved.kinds_of("a") and "master" not in saved.kinds_of("b")
        assert torch.equal(saved.read_tensor("b"), values) and torch.equal(saved.read_tensor("b", "exp_avg"), 2 * values)


def test_a_file_that_has_a_copy_elsewhere_is_read_there(directory: Path) -> None:
    copy = directory / "memory"
    (directory / "policy_00001.safetensors").rename(copy)
    with SavedModel(directory, find_copy={"policy_00001.safetensors": copy}.get) as saved:
        assert all(torch.equal(saved.read_tensor(name), values) for name, values in WHOLE.items())
        assert list(saved.read_local(1)) == ["random/torch"]


def set_field(*path: str, value: Any) -> Callable[[dict], None]:
    def change(document: dict) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


CHANGES: dict[str, tuple[Callable[[dict], Any], str]] = {
    "a version": (set_field("version", value=9), "version 9, this release reads"),
    "no kinds": (lambda document: document.pop("kinds"), "kinds"),
    "another kind": (set_field("kinds", "exp_avg", value="BF16"), "kinds are"),
    "an unknown type": (set_field("kinds", "parameter", value="F1"), "F1"),
    "a negative size": (set_field("tensors", "a", value=[-4, -3]), "no shape"),
    "a size of text": (set_field("tensors", "a", value="43"), "no shape"),
    "a file elsewhere": (lambda document: document["files"].update({"../x.safetensors": ["b[0:5]"]}), "no slice"),
    "an unknown tensor": (set_field("files", SECOND, value=["c[2:4, 0:3]"]), "no slice"),
    "a broken range": (set_field("files", SECOND, value=["a[2:x, 0:3]"]), "no slice"),
    "a range outside": (set_field("files", SECOND, value=["a[2:5, 0:3]"]), "not inside"),
    "a range of another rank": (set_field("files", SECOND, value=["a[2:4]"]), "not inside"),
    "a hole": (set_field("files", SECOND, value=[]), "slices of a have 6 elements, the tensor has 12"),
    "an overlap": (set_field("files", SECOND, value=["a[1:3, 0:3]"]), "overlap"),
    "types of no tensor": (set_field("types", value={"c": "F32"}), "types are"),
    "a tensor of a third type": (set_field("types", value={"a": "F16"}), "types are"),
    "types that are none": (set_field("types", value=7), "int"),
    "no files": (set_field("files", value=7), "int"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_index_is_one_line_that_names_it(change: str, directory: Path) -> None:
    apply, message = CHANGES[change]
    path = directory / "policy.json"
    document = json.loads(path.read_text())
    apply(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="policy.json") as raised:
        SavedModel(directory)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_model_that_is_not_there_says_how_to_go_on(directory: Path) -> None:
    with pytest.raises(ValueError, match="critic.json: missing: this checkpoint has no state of that model"):
        SavedModel(directory, "critic")


def test_a_file_of_another_checkpoint_or_cut_is_refused(directory: Path) -> None:
    (directory / SECOND).write_bytes((directory / FIRST).read_bytes())
    with SavedModel(directory) as saved, pytest.raises(ValueError, match=f"{SECOND}: parameter/a.2:4, 0:3. is missing"):
        saved.read_tensor("a")
    (directory / SECOND).write_bytes((directory / FIRST).read_bytes()[:-1])
    with SavedModel(directory) as saved, pytest.raises(ValueError, match=f"{SECOND}: truncated"):
        saved.read_tensor("a")
