"""The command: order, exit code, last line, and one whole run of it on this machine."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megatron_dapo.cli.main import app
from megatron_dapo.config.process_limits import ProcessLimits
from megatron_dapo.doctor import gather, report
from megatron_dapo.doctor.gather import ProbeFailure
from megatron_dapo.doctor.machine import Device, TorchFacts, TransformerEngineFacts
from megatron_dapo.doctor.recipe import AttentionResult

RECIPE = gather.ROOT / "examples" / "quickstart" / "quickstart.toml"
H200 = Device("NVIDIA H200", 139 << 30, 139 << 30, (9, 0))
ROW = {"op": "attention", "name": "Transformer Engine TEDotProductAttention", "reason": "it is installed"}

PRODUCTS = {"recipe": "fp32", "name": "torch", "reason": "the model is in float32"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A sound CPU machine of made-up facts."""
    monkeypatch.setattr(gather, "torch_facts", lambda: TorchFacts(version="2.13.0+cpu"))
    monkeypatch.setattr(gather, "implementation_rows", lambda config: [dict(ROW)])
    monkeypatch.setattr(gather, "precision_answer", lambda config: dict(PRODUCTS))
    monkeypatch.setattr(
        gather, "attention_results", lambda shape, dtype, engine: [AttentionResult("default", "one", 1e-7)]
    )
    return monkeypatch


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def in_directory(tmp_path: Path) -> tuple[str, ...]:
    return (str(RECIPE), "--set", f"run.output_dir={tmp_path / 'run'}")


def test_a_sound_machine(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = doctor(*in_directory(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("no conflict")
    assert "TEDotProductAttention  (it is installed)" in result.output and not (tmp_path / "run").exists()


def test_a_job_of_one_core_is_warned_about(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(report, "process_limits", lambda: ProcessLimits(1, 64, None, 512 << 30))
    result = doctor(*in_directory(tmp_path))
    assert result.exit_code == 0 and "warning   cores: 1 of the machine's 64 cores" in result.output
    assert "--cpus-per-task" in result.output and result.output.splitlines()[-1] == "no conflict, 1 warning"


def test_the_last_line_is_the_first_conflict_with_its_fix(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = doctor(*in_directory(tmp_path), "--set", "rollout.top_k=1", "--set", "training.mini_batch_prompts=3")
    assert result.exit_code == 1
    last = result.output.rstrip().splitlines()[-1]
    assert last.startswith("first conflict: recipe ") and "Fix: " in last
    assert "recipe rollout.top_k" in result.output and "recipe training.mini_batch_prompts" in result.output


def test_json_is_one_object_with_everything(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = doctor(*in_directory(tmp_path), "--layout", "tp3", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 1 and answer["ok"] is False
    assert answer["first_conflict"]["name"] == "recipe parallel.tp_size"
    names = [finding["name"] for finding in answer["findings"]]
    assert names.index("python") < names.index("gpus") < names.index("recipe parallel.tp_size")
    assert "package torch" in names and "checkpoint disk" not in names  # a layout that does not exist has no size
    assert answer["implementations"] == [ROW] and answer["facts"]["torch"]["version"] == "2.13.0+cpu"


@pytest.mark.parametrize("arguments", [("nowhere.toml",), (str(RECIPE), "--set", "rollout.groop_size=3")])
def test_a_recipe_that_cannot_be_read_is_a_conflict(machine: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    for probe in ("torch_facts", "transformer_engine_facts", "implementation_rows", "precision_answer"):
        machine.setattr(gather, probe, lambda *_: pytest.fail("the recipe is checked first"))
    result = doctor(*arguments)
    assert result.exit_code == 1 and result.output.rstrip().splitlines()[-1].startswith("first conflict: recipe")


def test_a_layout_that_cannot_be_read_is_refused(machine: pytest.MonkeyPatch) -> None:
    assert doctor(str(RECIPE), "--layout", "zz3").exit_code == 2


def test_probes_run_at_the_same_time(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None of them ends before all have begun."""
    together = threading.Barrier(4, timeout=60)
    for name in ("torch_facts", "transformer_engine_facts", "implementation_rows", "precision_answer"):
        answer = getattr(gather, name)
        machine.setattr(gather, name, lambda *arguments, answer=answer: (together.wait(), answer(*arguments))[1])
    assert doctor(*in_directory(tmp_path)).exit_code == 0


def test_without_torch_no_further_facts_are_reported(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(gather, "torch_facts", lambda: TorchFacts(error="ImportError: libc10.so"))
    machine.setattr(gather, "implementation_rows", lambda config: pytest.fail("used"))
    result = doctor(str(RECIPE))
    assert result.exit_code == 1 and "libc10.so" in result.output.rstrip().splitlines()[-1]


def test_a_broken_transformer_engine_on_a_gpu(machine: pytest.MonkeyPatch) -> None:
    facts = TorchFacts(version="2.11.0", cuda="13.0", devices=(H200,), nccl="2.28", driver="580.95")
    machine.setattr(gather, "torch_facts", lambda: facts)
    machine.setattr(gather, "required_packages", dict)
    machine.setattr(
        gather, "transformer_engine_facts", lambda installed: TransformerEngineFacts("2.20.2", error="undefined symbol")
    )

    def fail(config: object) -> list[dict[str, str]]:
        raise ProbeFailure("ImportError: undefined symbol")

    machine.setattr(gather, "implementation_rows", fail)
    answer = json.loads(doctor("--json").stdout)
    assert answer["facts"]["lock"].startswith("cuda-")
    assert answer["first_conflict"]["name"] == "transformer engine"
    assert answer["findings"][-1]["name"] == "implementations"


def test_fp8_that_cannot_run_comes_before_what_follows_from_it(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problem = "precision: fp8_current cannot run here: Transformer Engine says: compute capability 8.9 is too low"
    machine.setattr(gather, "precision_answer", lambda config: {"problem": problem})

    def fail(config: object) -> list[dict[str, str]]:
        raise ProbeFailure(problem)

    machine.setattr(gather, "implementation_rows", fail)
    answer = json.loads(doctor(*in_directory(tmp_path), "--json").stdout)
    assert answer["first_conflict"]["name"] == "linear products" and "8.9" in answer["first_conflict"]["detail"]
    assert "precision.recipe" in answer["first_conflict"]["fix"] and answer["facts"]["precision"] == {
        "problem": problem
    }


def test_every_back_end_of_transformer_engine_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(name: str, environment: dict[str, str], **arguments: object) -> list[dict[str, object]]:
        asked.append((arguments.get("back_end"), environment))
        if environment.get("NVTE_UNFUSED_ATTN") == "1":
            raise ProbeFailure("the process crashed (SIGSEGV)")
        return [{"back_end": arguments.get("back_end", "default"), "packing": "one", "error": 0.0}]

    monkeypatch.setattr(gather, "ask", answer)
    results = gather.attention_results((128, 8, 2), "bfloat16", by_transformer_engine=True)
    assert [name for name, _ in asked] == [None, "flash", "fused", "unfused"] and asked[0][1] == {}
    assert asked[1][1] == {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
    assert results[-1] == AttentionResult("unfused", "all", failure="the process crashed (SIGSEGV)")


@pytest.mark.long  # it starts a process for each probe; test_probes.py calls them here
def test_the_quickstart_on_this_machine(tmp_path: Path) -> None:
    answer = json.loads(doctor(*in_directory(tmp_path), "--json").stdout)
    verdicts = {finding["name"]: finding["verdict"] for finding in answer["findings"]}
    assert (
        verdicts["recipe"] == verdicts["input"] == verdicts["attention default"] == verdicts["checkpoint disk"] == "ok"
    )
    ops = [row["op"] for row in answer["implementations"]]
    assert ops[0] == "layers" and {"attention", "optimizer", "log-prob head", "rms norm", "rollout engine"} <= set(ops)
