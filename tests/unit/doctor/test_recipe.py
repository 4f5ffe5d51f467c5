"""Findings about the needs of a recipe, from made-up facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dapo.checkpoints.disk_space import CheckpointSpace
from megatron_dapo.config import Violation
from megatron_dapo.config.sglang_schema import SglangConfig
from megatron_dapo.doctor import recipe
from megatron_dapo.doctor.engine_probe import GPU_MODULES, EngineLibraries
from megatron_dapo.doctor.machine import Device, TorchFacts
from megatron_dapo.doctor.recipe import AttentionResult, SglangFacts

PYTHON = Path("/engines/bin/python")
DIRECTORY = Path("/runs/x")


def test_violations_are_conflicts_with_numbers_and_fix() -> None:
    (finding,) = recipe.violation_findings([Violation("a.b", "a.b % 2 == 0", "set a.b = 4", {"a.b": 3})])
    assert (finding.name, finding.verdict, finding.fix) == ("recipe a.b", "conflict", "set a.b = 4")
    assert finding.detail == "expected a.b % 2 == 0; have a.b = 3"
    (fine,) = recipe.violation_findings([])
    assert fine.verdict == "ok"


@pytest.mark.parametrize("needed, devices, verdict", [(8, 0, "ok"), (8, 8, "ok"), (128, 8, "warning")])
def test_processes(needed: int, devices: int, verdict: str) -> None:
    assert recipe.processes_finding(needed, devices).verdict == verdict


@pytest.mark.parametrize(
    "facts, verdicts, words",
    [
        (SglangFacts(PYTHON, error="no such file"), ["conflict"], "no such file"),
        (SglangFacts(PYTHON), ["conflict"], "not installed"),
        (SglangFacts(PYTHON, version="0.5.16"), ["conflict"], "older"),
        (
            SglangFacts(PYTHON, version="0.6.0"),
            ["warning"],
            "0.6.0 for /engines/bin/python; tested are 0.5.17 to 0.5.23: servers are probed",
        ),
        (SglangFacts(PYTHON, version="0.5.17"), ["ok"], "0.5.17"),
        (SglangFacts(PYTHON, version="0.5.23.post1"), ["ok"], "0.5.23.post1"),
    ],
)
def test_sglang(facts: SglangFacts, verdicts: list[str], words: str) -> None:
    findings = recipe.sglang_findings(facts)
    assert [finding.verdict for finding in findings] == verdicts and words in findings[-1].detail


@pytest.mark.parametrize(("version", "verdicts"), [("0.5.20", ["ok", "conflict"]), ("0.5.21", ["ok"])])
def test_a_server_that_does_not_say_what_tokens_are_drawn_from(version: str, verdicts: list[str]) -> None:
    findings = recipe.sglang_findings(SglangFacts(PYTHON, version=version), is_restricted=True)
    assert [finding.verdict for finding in findings] == verdicts
    assert len(findings) == 1 or (findings[1].name, "0.5.21" in findings[1].detail) == ("rollout.top_k", True)


GPU = TorchFacts(version="2.11.0+cu130", cuda="13.0", nccl="2.28.9", devices=(Device("H100", 80, 80, (9, 0)),))
LIBRARIES = EngineLibraries(torch=GPU.version, cuda=GPU.cuda, nccl=GPU.nccl, has_gpu=True, has_compiler=True)
HOPPER = SglangConfig(placement="colocated", attention_backend="fa3", sampling_backend="flashinfer")


def verdicts_of(
    libraries: EngineLibraries, settings: SglangConfig = HOPPER, trainer: TorchFacts | None = GPU
) -> dict[str, str]:
    return {f.name: f.verdict for f in recipe.engine_library_findings(libraries, settings, trainer)}


def test_engine_libraries_that_agree() -> None:
    assert verdicts_of(LIBRARIES) == {"engine nccl": "ok", "engine torch": "ok"}
    assert verdicts_of(LIBRARIES, trainer=None) == {} == verdicts_of(EngineLibraries(error="ImportError"))


@pytest.mark.parametrize("module", GPU_MODULES)
def test_a_library_that_the_layout_names_and_the_engines_lack(module: str) -> None:
    libraries = replace(LIBRARIES, failures={module: "ImportError: no such file"})
    (finding,) = recipe.engine_library_findings(libraries, HOPPER, None)
    assert (finding.name, finding.verdict) == (f"engine {module}", "conflict") and "no such file" in finding.detail
    plain = SglangConfig(placement="disaggregated", attention_backend="triton", sampling_backend="pytorch")
    assert bool(verdicts_of(libraries, plain, None)) == (module == "sgl_kernel")


def test_engines_with_other_versions_than_the_trainer() -> None:
    other = replace(LIBRARIES, nccl="2.30.7", torch="2.14.1+cu130")
    assert verdicts_of(other) == {"engine nccl": "warning", "engine torch": "warning"}
    p2p = HOPPER.model_copy(update={"weight_sync_transport": "p2p"})
    assert verdicts_of(other, p2p)["engine nccl"] == "conflict"
    assert verdicts_of(replace(LIBRARIES, cuda=None)) == {"engine torch": "conflict"}
    assert verdicts_of(replace(LIBRARIES, has_compiler=False))["engine nvcc"] == "warning"


def test_the_disk_of_checkpoints() -> None:
    assert recipe.checkpoint_storage(CheckpointSpace(DIRECTORY, 48_000, 48_000, "3 x 16 kB")).verdict == "ok"
    short = recipe.checkpoint_storage(CheckpointSpace(DIRECTORY, 48_000, 47_999, "3 x 16 kB"))
    assert short.verdict == "conflict" and f"{recipe.size(47_999)} free, needed 48 kB = 3 x 16 kB" in short.detail


def test_exports_and_checkpoints_on_one_disk_add_up() -> None:
    assert "needed 4 kB = 2 exports" in recipe.export_storage(DIRECTORY, 0, 1000, 2, 0).detail
    both = recipe.export_storage(DIRECTORY, 0, 1000, 2, 48_000).detail
    assert "needed 52 kB" in both and "48 kB of checkpoints" in both


def test_shared_memory_is_two_buckets_a_rank() -> None:
    needed = recipe.size(4 * 2 * 256 << 20)
    for model_bytes in (5 << 30, None):
        finding = recipe.shared_memory_storage(Path("/dev/shm"), 64 << 20, 4, 256, model_bytes)
        assert finding.verdict == "conflict"
        assert f"needed {needed} = 4 engine ranks here x 2 buckets x 256 MiB" in finding.detail
    assert "needed 8 kB" in recipe.shared_memory_storage(Path("/dev/shm"), 0, 4, 256, 1000).detail


def attention(results: list[AttentionResult], dtype: str = "bfloat16") -> dict[str, str]:
    findings = recipe.attention_findings(results, dtype, "head_dim 128")
    return {finding.name: finding.verdict for finding in findings}


def test_attention_is_rated_by_its_worst_arrangement() -> None:
    close, wrong = AttentionResult("default", "one", 0.005), AttentionResult("default", "ragged", 0.9)
    assert attention([close]) == {"attention default": "ok"}
    assert attention([close, wrong]) == {"attention default": "conflict"}
    assert attention([close], "float32") == {"attention default": "conflict"}
    assert attention([AttentionResult("default", "one", float("nan"))]) == {"attention default": "conflict"}


def test_only_the_default_back_end_has_to_run() -> None:
    results = [
        AttentionResult("default", "one", 0.005),
        AttentionResult("cudnn", "one", failure="no kernel"),
        AttentionResult("flash", "one", 0.9),
    ]
    assert attention(results) == {"attention default": "ok", "attention cudnn": "ok", "attention flash": "warning"}
    assert attention([AttentionResult("default", "all", failure="crashed")]) == {"attention default": "conflict"}
