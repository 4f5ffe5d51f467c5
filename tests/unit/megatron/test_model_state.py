"""Pieces of a saved state that a rank reads straight into its own buffers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.checkpoints.formats import safetensors as safetensors_file
from megatron_dapo.checkpoints.formats.saved_model import OtherModelError, SavedModel, index_file, rank_file
from megatron_dapo.checkpoints.store import CheckpointStore, CheckpointWriter, newest_valid, save_checkpoint
from megatron_dapo.files.durable import HERE
from megatron_dapo.megatron import model_state
from megatron_dapo.megatron.actor import ActorSettings
from megatron_dapo.megatron.model_config import ModelSettings
from megatron_dapo.megatron.model_state import _check_tensors, transfers_in_place
from megatron_dapo.parallel.layout import ParallelLayout
from megatron_dapo.reshard.layout import Shard, TensorSpec
from megatron_dapo.reshard.planner import Transfer
from megatron_dapo.reshard.slices import Slice
from tests.unit.checkpoints.saved_states import random_state, save_states


def _transfer(rows: tuple[int, int], of: tuple[int, int], source: int, local: str) -> Transfer:
    """Rows of a 4 x 2 tensor from a piece that has rows `of`, into a buffer of all four."""
    bounds = Slice((rows[0], 0), (rows[1] - rows[0], 2))
    piece = Shard("w", (of[0], 0), (of[1] - of[0], 2), f"{of}", (0,))
    return Transfer("w", bounds, source, 0, piece, Shard("w", (0, 0), (4, 2), local, (0, 0)))


def test_a_whole_piece_of_the_rank_itself_is_read_in_place_once():
    first = _transfer((0, 2), (0, 2), 0, "a")
    again = _transfer((0, 2), (0, 2), 0, "b")
    buffers = {name: torch.zeros(4, 2) for name in "ab"}
    assert transfers_in_place([first, again], 0, buffers, lambda tensor: torch.float32) == {"(0, 2)": first}


def test_parts_and_pieces_of_others_and_other_memory_are_not_read_in_place():
    part, other = _transfer((0, 1), (0, 2), 0, "a"), _transfer((2, 4), (2, 4), 1, "a")
    strided, half = _transfer((0, 2), (0, 2), 0, "strided"), _transfer((2, 4), (2, 4), 0, "half")
    buffers = {
        "a": torch.zeros(4, 2),
        "strided": torch.zeros(4, 4)[:, :2],
        "half": torch.zeros(4, 2, dtype=torch.bfloat16),
    }
    assert transfers_in_place([part, other, strided, half], 0, buffers, lambda tensor: torch.float32) == {}


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"v": ((2, 4), torch.bfloat16)}, "2 tensors differ, first v: saved none, here (2, 4) bfloat16"),
        ({"w": ((2, 5), torch.bfloat16)}, "1 tensors differ, first w: saved (2, 4) bfloat16, here (2, 5) bfloat16"),
        ({"w": ((2, 4), torch.float32)}, "1 tensors differ, first w: saved (2, 4) bfloat16, here (2, 4) float32"),
    ],
    ids=["another tensor", "another shape", "another type"],
)
def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path, own: dict, told: str):
    state = random_state({"w": torch.zeros(2, 4, dtype=torch.bfloat16)})
    directory = save_states(tmp_path, 1, {"policy": state})
    tensors = SimpleNamespace(tensors={name: TensorSpec(*spec) for name, spec in own.items()})
    architecture = SimpleNamespace(is_float32=lambda name: False)
    model = SimpleNamespace(trained_tensors=tensors, adapter_description=lambda: None, architecture=architecture)
    with SavedModel(directory) as saved, pytest.raises(OtherModelError) as caught:
        _check_tensors(saved, model)
    message = str(caught.value)
    assert f"{directory}: policy is another model: {told}; set model.path" in message and "\n" not in message


def test_a_checkpoint_of_one_type_is_read_by_a_model_whose_tensors_have_several(
    single_process: None, references: str, tmp_path: Path
):
    """Releases before saved the decay of a gated delta net in bf16, with its values in fp32 as a main param."""
    from actor_checks import Reference, build_actor, differing, snapshot, train

    reference, layout = Reference.read(references, "qwen3.5"), ParallelLayout(dist.get_world_size())
    settings = ActorSettings(model=ModelSettings("bfloat16"))
    model = build_actor(reference, layout, settings)
    train(model, [11])
    tensors, index = model.saved_state.tensors(), model.saved_state.index("policy")
    assert index is not None and index["version"] == 3
    wide = [name for name, code in index["types"].items() if code == "F32"]
    assert len(wide) == 3 and all(name.endswith("linear_attn.A_log") for name in wide)
    old = {key: value for key, value in index.items() if key != "types"} | {"version": 2}
    for key in [key for key in tensors if key.startswith("parameter/") and key[10:].partition("[")[0] in wide]:
        assert tensors[key].dtype == torch.float32 and f"master/{key[10:]}" not in tensors
        tensors[f"master/{key[10:]}"], tensors[key] = tensors[key], tensors[key].bfloat16()
    HERE.write_tensors(tmp_path / rank_file("policy", 0), tensors)
    HERE.write_json(tmp_path / index_file("policy"), old)
    other = build_actor(reference, layout, settings)
    other.saved_state.load(tmp_path, "policy")
    assert differing(snapshot(model), snapshot(other)) == []


def test_many_rounds_past_the_page_cache_bring_every_bit_and_find_a_wrong_one(
    single_process: None, references: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Checkpoints of a trained model of one rank; each read of any size past the cache, a round ahead."""
    from actor_checks import Reference, build_actor, differing, snapshot, train

    monkeypatch.setattr(safetensors_file, "_MIN_DIRECT_BYTES", 1)
    monkeypatch.setattr(model_state, "ROUND_ELEMENTS", 3_000)
    reference, layout = Reference.read(references, "qwen2"), ParallelLayout(dist.get_world_size())
    model = build_actor(reference, layout, ActorSettings())
    store = CheckpointStore(tmp_path, keep=2)

    def write(writer: CheckpointWriter) -> None:
        writer.save_tensors(rank_file("policy", 0), model.saved_state.tensors())
        writer.save_json(index_file("policy"), model.saved_state.index("policy"))

    states = []
    for step in (1, 2):
        train(model, [10 + step])
        save_checkpoint(store, step, write)
        states.append(snapshot(model))
    for step in (2, 1):
        other = build_actor(reference, layout, ActorSettings())
        found = newest_valid(
            store, lambda each, other=other: other.saved_state.load(each.directory, "policy", each.checksums)
        )
        assert found is not None and found.step == step
        assert differing(states[step - 1], snapshot(other)) == []
        file = store.path(2) / rank_file("policy", 0)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
