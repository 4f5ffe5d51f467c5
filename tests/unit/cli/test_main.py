"""The command line: exit codes, what is printed, and what the workers are told."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from megatron_dapo.cli.main import PANELS, app
from megatron_dapo.config import load_config
from megatron_dapo.files.durable import HERE
from megatron_dapo.run import start as whole_run
from megatron_dapo.run.derive import pretraining_config
from megatron_dapo.run.start import WORKER
from megatron_dapo.run.worker import parse_arguments
from megatron_dapo.telemetry.summary import RunSummary, write_summary
from megatron_dapo.watch.failure import Failure, write_failures

runner = CliRunner()
SUMMARY = RunSummary("run", "TP2", "finished", 7, 28, 0.1, 0.9, 60.0, 70.0, 5.0, 100.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], int, Path]]:
    """Calls of the launcher, which here only writes a summary."""
    calls = []

    def launch(module: str, arguments: list[str], num_processes: int, run_directory: Path, restarts: int, attempt: int) -> int:
        assert restarts == 0
        calls.append((module, list(arguments), num_processes, run_directory))
        write_summary(run_directory / "summary.json", SUMMARY, HERE)
        return 0

    monkeypatch.setattr(whole_run, "launch_workers", launch)
    return calls


def test_train_starts_the_requested_workers(whole_recipe: Path, tmp_path: Path, started: list) -> None:
    directory = tmp_path / "run"
    result = runner.invoke(
        app, ["train", str(whole_recipe), "--set", "run.seed=5", "--layout", "tp2", "--output-dir", str(directory)]
    )
    assert result.exit_code == 0, result.output
    ((module, arguments, num_processes, run_directory),) = started
    assert (module, num_processes, run_directory) == (WORKER, 2, directory)
    assert (
        arguments[:3] == [str(whole_recipe), "--set", "run.seed=5"]
        and "parallel.tp_size=2" in arguments
        and f"run.output_dir={directory}" in arguments
    )
    assert "TP2" in result.output and "held-out accuracy" in result.output and "0.900" in result.output


PRETRAIN = ["--set", "algorithm.name=vapo", "--set", "rollout.filter_groups=false"]


@pytest.mark.parametrize("given", [False, True])
def test_workers_pretrain_in_the_directory_that_is_watched(
    given: bool, whole_recipe: Path, tmp_path: Path, started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "given" if given else Path("runs/run/value_pretraining")
    result = runner.invoke(
        app, ["pretrain-value", str(whole_recipe), *PRETRAIN, *(["--output-dir", str(directory)] if given else [])]
    )
    assert result.exit_code == 0, result.output
    ((_, arguments, _, run_directory),) = started
    told = parse_arguments(arguments)
    config = load_config(told.recipe, told.overrides).config
    assert run_directory == directory
    assert (
        pretraining_config(config, Path(told.pretrain_value) if told.pretrain_value else None).run.output_dir
        == directory
    )
    assert "20 to 150 train steps" in result.output and f"output: {directory}" in result.output


def test_pretraining_is_checked_as_what_it_is(recipe: Path, started: list) -> None:
    """The policy's schedule over fewer steps than its warm-up says nothing; the critic's does."""
    few = ["--set", "value_pretraining.min_steps=2", "--set", "value_pretraining.max_steps=2"]
    policy = ["--set", "optimizer.schedule=linear", "--set", "optimizer.warmup_steps=4"]
    result = runner.invoke(app, ["pretrain-value", str(recipe), *PRETRAIN, *few, *policy, "--dry-run", "--no-inputs"])
    assert result.exit_code == 0 and started == [], result.output
    critic = ["--set", "critic.optimizer.schedule=linear", "--set", "critic.optimizer.warmup_steps=4"]
    result = runner.invoke(app, ["pretrain-value", str(recipe), *PRETRAIN, *few, *critic, "--dry-run", "--no-inputs"])
    assert result.exit_code == 2 and "set critic.optimizer.warmup_steps below 2" in result.output


@pytest.mark.parametrize("changed", [{"num_hidden_layers": 2}, {"head_dim": 16}, None])
def test_a_critic_of_another_model_is_refused_before_anything_starts(
    changed: dict | None, recipe: Path, tmp_path: Path, started: list
) -> None:
    facts = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "config.json").write_text(json.dumps({**facts, **changed} if changed else []))
    critic = ["--set", f"critic.path={tmp_path / 'critic'}"]
    result = runner.invoke(app, ["train", str(recipe), *PRETRAIN, *critic])
    assert result.exit_code == 2 and started == [] and str(tmp_path / "critic") in result.output
    if changed:
        assert ("num_layers of critic and policy = (2, 4)" in result.output) == ("num_hidden_layers" in changed)
        assert ("head_dim of critic and policy = (16, 8)" in result.output) == ("head_dim" in changed)


def test_without_a_critic_there_is_nothing_to_pretrain(recipe: Path, started: list) -> None:
    result = runner.invoke(app, ["pretrain-value", str(recipe)])
    assert result.exit_code == 2 and started == [] and "has no critic; set ppo, vapo or tppo" in result.output


def test_refusal_lists_everything_and_starts_nothing(recipe: Path, started: list) -> None:
    result = runner.invoke(
        app, ["train", str(recipe), "--set", "rollout.top_k=1", "--set", "training.mini_batch_prompts=3"]
    )
    assert result.exit_code == 2 and started == []
    assert (
        "2 problems" in result.output
        and "rollout.top_k" in result.output
        and "training.mini_batch_prompts" in result.output
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported; supported are default, linear, llama3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_a_process_starts(
    change: dict[str, object], words: str, recipe: Path, started: list
) -> None:
    file = recipe.parent / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    result = runner.invoke(app, ["train", str(recipe)])
    assert result.exit_code == 2 and words in result.output and started == [], result.output


def test_a_refusal_says_the_reason_and_with_verbose_the_rule(recipe: Path, started: list) -> None:
    arguments = ["train", str(recipe), "--set", "rollout.group_size=1", "--set", "training.micro_batch_tokens=8"]
    for verbose in ((), ("--verbose",)):
        result = runner.invoke(app, [*arguments, *verbose])
        assert result.exit_code == 2 and started == []
        assert (
            "  - rollout.group_size = 1: responses are compared within their group. Fix: set rollout.group_size = 8 or more\n"
            in result.output
        )
        assert (
            "  - training.micro_batch_tokens = 8: a micro-batch holds the longest sequence, padded to the layout's multiple "
            "(data.max_prompt_tokens = 64, rollout.max_response_tokens = 128, multiple = 1). Fix: set "
            "training.micro_batch_tokens = 192 or more\n" in result.output
        )
        assert ("      rule: expected rollout.group_size >= 2 if rollout.filter_groups or" in result.output) == bool(verbose)


@pytest.mark.parametrize("arguments", [["--layout", "zz3"], ["--set", "rollout.groop_size=3"], ["--set", "nonsense"]])
def test_bad_flags_are_refused(recipe: Path, started: list, arguments: list[str]) -> None:
    result = runner.invoke(app, ["train", str(recipe), *arguments])
    assert result.exit_code == 2 and started == [] and "error:" in result.output


def test_a_recipe_of_model_and_data_is_valid(recipe: Path) -> None:
    """Every other key has a default that fits."""
    facts = json.loads((recipe.parent / "model" / "config.json").read_text())
    (recipe.parent / "model" / "config.json").write_text(json.dumps({**facts, "max_position_embeddings": 4096}))
    recipe.write_text('[model]\npath = "model"\n[data]\ntrain_paths = ["train.jsonl"]\n')
    result = runner.invoke(app, ["train", str(recipe), "--dry-run", "--no-inputs"])
    assert result.exit_code == 0, result.output
    assert "512 prompts x 16 responses" in result.output


def test_dry_run_starts_nothing(recipe: Path, started: list) -> None:
    result = runner.invoke(app, ["train", str(recipe), "--dry-run", "--no-inputs"])
    assert result.exit_code == 0 and started == [] and "train step" in result.output


@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_the_first_root_cause_is_the_last_line(
    layout: str, whole_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes print it as well: of one process it is their last line, of several others may follow."""
    directory = tmp_path / "run"
    write_failures(directory, [Failure(rank=9, cause="exception", message="of an earlier attempt")], "node_0")
    write_summary(directory / "summary.json", SUMMARY, HERE)

    def launch(module: str, arguments: list[str], num_processes: int, run_directory: Path, restarts: int, attempt: int) -> int:
        assert not (run_directory / "summary.json").exists(), "an earlier run's summary would be taken for this one's"
        cause = Failure(
            rank=1, cause="exception", message="ValueError: bad gold", node="node1", phase="score", exit_code=1
        )
        consequence = Failure(rank=0, cause="connection lost", message="closed", is_consequence=True)
        write_failures(run_directory, [cause, consequence], "node_0")
        return 1

    monkeypatch.setattr(whole_run, "launch_workers", launch)
    result = runner.invoke(app, ["train", str(whole_recipe), "--output-dir", str(directory), "--layout", layout])
    assert result.exit_code == 1
    line = "first failure: attempt 1, rank 1 (node1), phase score: ValueError: bad gold; to do: "
    assert result.output.strip().splitlines()[-1].startswith(line) == (layout == "dp2")


@pytest.mark.parametrize(("number", "name"), [(2, "SIGINT"), (15, "SIGTERM")])
def test_a_signal_before_training_began_is_named(
    number: int, name: str, whole_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_run, "launch_workers", lambda *_: 128 + number)
    result = runner.invoke(app, ["train", str(whole_recipe), "--output-dir", str(tmp_path / "run")])
    words = f"stopped by a signal ({name}) before training began; the same command starts it"
    assert result.exit_code == 75 and words in result.output


def test_an_export_of_a_missing_checkpoint_is_one_line(tmp_path: Path) -> None:
    result = runner.invoke(app, ["export", str(tmp_path / "step_1"), str(tmp_path / "model")])
    assert result.exit_code == 2 and len(result.output.strip().splitlines()) == 1
    assert "step_1 does not exist" in result.output


NOTHING_HELD_OUT = ("data.eval_paths=[]", "data.held_out_share=0")


def test_eval_refuses_without_data(whole_recipe: Path) -> None:
    switches = [f"evaluation.{name}=false" for name in ("at_start", "at_end")]
    result = runner.invoke(
        app,
        ["eval", str(whole_recipe), *(part for one in (*switches, *NOTHING_HELD_OUT) for part in ("--set", one))],
    )
    assert result.exit_code == 2 and "data.eval_paths is empty" in result.output


def test_eval_does_not_ask_for_the_critic(whole_recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_dapo.run.evaluate", types.ModuleType("evaluate"))

    def reached(*arguments: object) -> None:
        raise ValueError("it evaluates")

    sys.modules["megatron_dapo.run.evaluate"].evaluate_model = reached
    critic = ["--set", "critic.parallel.tp_size=2", "--set", "critic.path=/gone"]
    result = runner.invoke(app, ["eval", str(whole_recipe), *PRETRAIN, *critic])
    assert "error: it evaluates" in result.output, result.output


def test_the_shell_completes_commands() -> None:
    """As the script that --install-completion writes asks: the words so far, and the number of the last one."""
    asked = {"_MEGATRON_DAPO_COMPLETE": "complete_bash", "COMP_WORDS": "megatron-dapo convert hf", "COMP_CWORD": "2"}
    result = runner.invoke(app, [], prog_name="megatron-dapo", env=asked)
    assert result.output.split() == ["hf-to-megatron"]


def test_help_has_every_command_in_a_panel_and_no_types_of_switches() -> None:
    result = runner.invoke(app, ["--help"])
    lines = result.output.splitlines()
    panels = [line.split()[1] for line in lines if line.startswith("╭")]
    assert panels == ["Options", *PANELS] and "import" not in " ".join(lines[:5])
    shown = {line.split()[1] for line in lines if line.startswith("│ ") and line[2] not in " -"}
    assert shown == set(get_command(app).commands)  # type: ignore[attr-defined]
    train_help = runner.invoke(app, ["train", "--help"]).output
    assert "<bool>" not in result.output + train_help and "--dry-run" in train_help


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0 and "megatron-dapo 0." in result.output and "torch 2" in result.output


def test_no_command_waits_for_torch_that_does_not_need_it() -> None:
    modules = "sys, megatron_dapo.cli.main, megatron_dapo.cli.plan, megatron_dapo.run.start"
    program = f"import {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
