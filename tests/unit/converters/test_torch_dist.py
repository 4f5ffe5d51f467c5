"""torch_dist checkpoints that cannot be converted are refused in one line, and nothing is left behind; those of newer versions of
megatron-core are converted while they can be read; a run's checkpoint becomes one."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from safetensors.torch import load_file
from typer.main import get_command
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.megatron import torch_dist
from tests.unit.checkpoints.saved_states import random_state, save_states


def convert(*arguments: str) -> int:
    """Run `megatron-dapo convert` in this process and return its exit code."""
    return get_command(app).main(["convert", *arguments], standalone_mode=False) or 0


_MADE: dict[str, Path] = {}


@pytest.fixture
def model(make_model_directory: Callable[..., Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of("model", lambda: make_model_directory("qwen3_moe", dtype=torch.bfloat16), tmp_path, tmp_path_factory)


@pytest.fixture
def stored(model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the model, as Megatron-LM's directory."""

    def make() -> Path:
        assert convert("hf-to-megatron", str(model), str(tmp_path / "stored"), "--format", "torch_dist") == 0
        return tmp_path / "stored"

    return copy_of("stored", make, tmp_path, tmp_path_factory)


def copy_of(name: str, make: Callable[[], Path], directory: Path, kept: pytest.TempPathFactory) -> Path:
    """Return a directory that a test may change, made once for all tests of this file."""
    if name not in _MADE:
        _MADE[name] = Path(shutil.copytree(make(), kept.mktemp("made") / name))
    return Path(shutil.copytree(_MADE[name], directory / name, dirs_exist_ok=True))


def test_a_model_comes_back_with_experts_and_types(model: Path, stored: Path, tmp_path: Path) -> None:
    assert convert("megatron-to-hf", str(stored / "release"), str(tmp_path / "back"), "--model", str(model)) == 0
    assert convert("verify", str(model), str(tmp_path / "back")) == 0


@pytest.mark.parametrize("common", ["", "data", "common.pt"])
def test_what_all_ranks_share_may_be_anywhere(
    common: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core 0.16 writes common.pt, 0.19 an object in the data; the model needs neither."""
    write = torch_dist.write_torch_dist

    def in_data(directory: Path, tensors: Any, states: Any, common: Any) -> None:
        shared = ShardedObject("common_state", dict(common), (1,), (0,), replica_id=0)
        write(directory, tensors, states, {"common_state": shared})

    if common == "data":
        monkeypatch.setattr(torch_dist, "write_torch_dist", in_data)
    stored, back = tmp_path / "stored", tmp_path / "back"
    assert convert("hf-to-megatron", str(model), str(stored), "--format", "torch_dist") == 0
    file = stored / "release/common.pt"
    file.unlink(missing_ok=True)
    if common == "common.pt":
        torch.save({"iteration": 0}, file)
    assert (common == "data") <= (b"common_state" in (stored / "release/.metadata").read_bytes())
    assert convert("megatron-to-hf", str(stored), str(back), "--model", str(model)) == 0
    assert convert("verify", str(model), str(back)) == 0


VERSIONS = "version 7 of torch_dist; megatron-core 0.16.1 to 0.19.2, the tested ones, write version 1"


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_newer_version_of_the_format_is_named_and_read_if_it_can_be(
    is_readable: bool,
    model: Path,
    stored: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = stored / "release/metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sharded_backend_version": 7}))
    if not is_readable:
        (stored / "release/.metadata").write_bytes(pickle.dumps(Fraction(1, 2)))  # a record that this program does not know
    capsys.readouterr()
    code = convert("megatron-to-hf", str(stored), str(tmp_path / "back"), "--model", str(model))
    error = capsys.readouterr().err
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("megatron_dapo")]
    if is_readable:
        assert code == 0 and convert("verify", str(model), str(tmp_path / "back")) == 0
        assert [VERSIONS in warning and "\n" not in warning for warning in warnings] == [True]
    else:
        assert code == 2 and VERSIONS in error and "fractions.Fraction" in error and error.count("\n") == 1
        assert not warnings and not (tmp_path / "back").exists()


def legacy(inside: Path) -> None:
    (inside / "mp_rank_00").mkdir()


def truncated(inside: Path) -> None:
    part = inside / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1000])


def lost_part(inside: Path) -> None:
    max(inside.glob("*.distcp")).unlink()


def flipped_metadata(inside: Path) -> None:
    (inside / ".metadata").write_bytes(b"\x00" + (inside / ".metadata").read_bytes()[1:])


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code of the checkpoint ran",)


def harmful_metadata(inside: Path) -> None:
    (inside / ".metadata").write_bytes(pickle.dumps(Harmful()))


def another_format(inside: Path) -> None:
    (inside / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def no_number(inside: Path) -> None:
    (inside.parent / "latest_checkpointed_iteration.txt").write_text("../../etc")


DAMAGES = {
    legacy: "--ckpt-convert-format torch_dist",
    truncated: "__0_0.distcp: has",
    lost_part: ".distcp: is missing",
    flipped_metadata: ".metadata: cannot be read",
    harmful_metadata: "builtins.print, which is no record of a checkpoint",
    another_format: "format 'zarr'",
    no_number: "not the number of an iteration",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named_in_one_line(
    damage: Callable[[Path], None], model: Path, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(stored / "release")
    capsys.readouterr()
    assert convert("megatron-to-hf", str(stored), str(tmp_path / "back"), "--model", str(model)) == 2
    output = capsys.readouterr()
    assert DAMAGES[damage] in output.err and output.err.count("\n") == 1 and not output.out
    assert not list(tmp_path.glob("*back*"))


@pytest.mark.parametrize(
    "family, sizes, reason",
    [
        ("qwen3_moe", {"moe_intermediate_size": 24}, "has shape (8, 40, 32), the model of"),
        ("qwen3_moe", {"num_hidden_layers": 3}, "which the model of"),
        ("qwen3_moe", {"num_hidden_layers": 5}, "which the model of"),
        ("qwen3_moe", {"vocab_size": 10_000}, "embedding.word_embeddings.weight has shape"),
        ("qwen3", {}, "the model of"),
    ],
)
def test_another_model_is_refused(
    family: str,
    sizes: dict[str, int],
    reason: str,
    stored: Path,
    make_model_directory: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = make_model_directory(family, dtype=torch.bfloat16, name="other", **sizes)
    capsys.readouterr()
    assert convert("megatron-to-hf", str(stored), str(tmp_path / "back"), "--model", str(other)) == 2
    error = capsys.readouterr().err
    assert reason in error and "--model" in error and error.count("\n") == 1


def test_a_model_directory_has_to_be_named(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("megatron-to-hf", str(stored), str(tmp_path / "back")) == 2
    assert "name a Hugging Face directory of the same model with --model" in capsys.readouterr().err


def test_a_runs_checkpoint_becomes_an_iteration(model: Path, tmp_path: Path) -> None:
    weights = {name: each for file in model.glob("*.safetensors") for name, each in load_file(file).items()}
    checkpoint = save_states(tmp_path / "checkpoints", 12, {"policy": random_state(weights)})
    command = ["export", str(checkpoint), str(tmp_path / "out"), "--format", "torch_dist", "--model", str(model)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "12"
    assert (tmp_path / "out/iter_0000012/.metadata").is_file()
    assert convert("megatron-to-hf", str(tmp_path / "out"), str(tmp_path / "back"), "--model", str(model)) == 0
    assert convert("verify", str(model), str(tmp_path / "back")) == 0
    refused = CliRunner().invoke(app, [*command, "--critic"])
    assert refused.exit_code == 2
