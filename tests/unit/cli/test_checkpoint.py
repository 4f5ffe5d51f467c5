"""Checkpoints through the command: export of any step, inspection, comparison, and what is wrong with bad ones in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.models.config_json import read_architecture
from tests.unit.checkpoints.saved_states import State, random_state, save_states

runner = CliRunner()


def command(*arguments: object) -> tuple[int, str]:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


@pytest.fixture
def source(make_model_directory: Callable[..., Path]) -> Path:
    return make_model_directory("qwen2", tied=True)


@pytest.fixture
def state(source: Path) -> State:
    stored = load_file(source / "model.safetensors")
    names = read_architecture(source).shapes()
    return random_state({name: stored[name] + 1 for name in names})


@pytest.fixture
def run(tmp_path: Path, state: State) -> Path:
    directory = tmp_path / "run"
    save_states(directory / "checkpoints", 3, {"policy": state}, num_files=3)
    return directory


def test_the_model_of_a_step(run: Path, source: Path, state: State, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step_000003"
    code, output = command("export", checkpoint, tmp_path / "out", "--model", source)
    assert code == 0, output
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in state["parameter"].items())
    assert written.keys() == load_file(source / "model.safetensors").keys()
    for name in ("config.json", "tokenizer.json"):
        assert not (source / name).is_file() or (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    # The converter's command does the same with a run's checkpoint.
    assert command("convert", "verify", checkpoint, source)[0] == 2
    code, output = command("export", checkpoint, tmp_path / "out", "--model", source)
    assert code == 2 and "exists already" in output and "Traceback" not in output


def test_the_critic_of_a_step(source: Path, state: State, tmp_path: Path) -> None:
    architecture = read_architecture(source).with_value_head()
    critic = {
        name: state["parameter"].get(name, torch.full(shape, 0.5)) for name, shape in architecture.shapes().items()
    }
    save_states(tmp_path / "checkpoints", 3, {"policy": state, "critic": random_state(critic)})
    checkpoint = tmp_path / "checkpoints" / "step_000003"
    code, output = command("export", checkpoint, tmp_path / "critic", "--critic", "--model", source)
    assert code == 0, output
    written = load_file(tmp_path / "critic" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in critic.items())
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"] and config["id2label"] == {"0": "value"}


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda c: flip(c / "policy_00001.safetensors"), "policy_00001.safetensors changed since"),
    "truncated": (lambda c: (c / "policy_00001.safetensors").write_bytes(b"short"), "has 5 bytes, the manifest says"),
    "missing file": (lambda c: (c / "policy_00002.safetensors").unlink(), "policy_00002.safetensors is missing"),
    "missing manifest": (lambda c: (c / "manifest.json").unlink(), "no manifest.json"),
    "manifest of another step": (
        lambda c: (c / "manifest.json").write_text((c / "manifest.json").read_text().replace('"step": 3', '"step": 4')),
        "manifest.json is not readable",
    ),
    "not there": (shutil.rmtree, "does not exist"),
    "empty": (lambda c: [file.unlink() for file in c.iterdir()], "no manifest.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_checkpoint_is_refused_in_one_line_and_nothing_is_left(
    fault: str, run: Path, source: Path, tmp_path: Path
) -> None:
    checkpoint = run / "checkpoints" / "step_000003"
    damage, words = FAULTS[fault]
    damage(checkpoint)
    code, output = command("export", checkpoint, tmp_path / "out", "--model", source)
    assert code == 2 and words in output and len(output.strip().splitlines()) == 1, output
    assert not list(tmp_path.glob("out*"))
    code, output = command("checkpoint", "inspect", checkpoint, "--verify")
    assert code == 2 and words in output and len(output.strip().splitlines()) == 1, output


def test_what_does_not_belong_together_is_named(
    run: Path, source: Path, state: State, tmp_path: Path, make_model_directory: Callable[..., Path]
) -> None:
    checkpoint = run / "checkpoints" / "step_000003"
    other = make_model_directory("qwen3", tied=True)
    code, output = command("export", checkpoint, tmp_path / "out", "--model", other)
    assert code == 2 and "is a checkpoint of another model than" in output
    code, output = command("export", checkpoint, tmp_path / "out", "--critic", "--model", source)
    assert code == 2 and "no critic; it holds policy" in output
    code, output = command("export", checkpoint, tmp_path / "out")
    assert code == 2 and "is not in its run's directory" in output and "--model" in output
    code, output = command("export", run, tmp_path / "out", "--model", source)
    assert code == 2 and "holds checkpoints of steps [3]; name a directory such as" in output
    assert command("export", checkpoint)[0] == 2
    assert not (tmp_path / "out").exists()


def test_inspection_lists_steps_with_what_is_wrong(run: Path, state: State) -> None:
    save_states(run / "checkpoints", 6, {"policy": state})
    (run / "checkpoints" / "step_000003" / "policy.json").unlink()
    code, output = command("checkpoint", "inspect", run, "--json")
    facts = json.loads(output)
    assert code == 1 and [one["step"] for one in facts["checkpoints"]] == [3, 6]
    assert "policy.json is missing" in facts["checkpoints"][0]["problem"]
    code, output = command("checkpoint", "inspect", run / "checkpoints" / "step_000006", "--verify")
    assert code == 0 and "every byte verified" in output and "model.norm.weight" in output
    facts = json.loads(command("checkpoint", "inspect", run / "checkpoints" / "step_000006", "--json")[1])
    expected = sum(tensor.numel() for tensor in state["parameter"].values())
    assert facts["models"]["policy"]["num_parameters"] == expected
    code, output = command("checkpoint", "inspect", run / "nothing")
    assert code == 2 and "holds no checkpoint" in output


def test_states_in_other_pieces_are_equal_and_one_number_is_found(run: Path, state: State) -> None:
    first, second = (run / "checkpoints" / f"step_00000{step}" for step in (3, 4))
    save_states(run / "checkpoints", 4, {"policy": state}, num_files=2)
    code, output = command("checkpoint", "inspect", first, second)
    assert (code, output.splitlines()[-1]) == (0, "equal")

    state["exp_avg"]["model.norm.weight"][5] += 0.25
    state["step"]["model.norm.weight"] += 1
    save_states(run / "checkpoints", 5, {"policy": state})
    code, output = command("checkpoint", "inspect", first, run / "checkpoints" / "step_000005", "--json")
    [*kinds] = json.loads(output)["models"]["policy"]
    assert code == 1 and [one["kind"] for one in kinds if one["first"]] == ["exp_avg", "step"]
    moment = next(one for one in kinds if one["kind"] == "exp_avg")
    assert moment["num_different"] == 1 and moment["largest"] == pytest.approx(0.25, abs=1e-6)
    assert moment["first"].startswith("model.norm.weight[5]: ")
