"""Findings about machines of made-up facts."""

from __future__ import annotations

import pytest

from megatron_dapo.config.process_limits import ProcessLimits
from megatron_dapo.doctor import machine
from megatron_dapo.doctor.machine import (
    ApexFacts,
    Device,
    Finding,
    Support,
    TorchFacts,
    TransformerEngineFacts,
    conflict,
    first_conflict,
    ok,
    warning,
)
from megatron_dapo.rounding import GIB

H200 = Device("NVIDIA H200", 139 * GIB, 138 * GIB, (9, 0))
V100 = Device("Tesla V100", 32 * GIB, 32 * GIB, (7, 0))
CPU = TorchFacts(version="2.13.0+cpu")
GPU = TorchFacts(version="2.11.0+cu130", cuda="13.0", devices=(H200,) * 8, nccl="2.28.9", driver="580.95.05")


def test_only_what_is_ok_goes_without_a_fix() -> None:
    with pytest.raises(AssertionError):
        Finding("x", "conflict", "wrong")


def test_the_first_conflict_is_first() -> None:
    findings = [ok("a", ""), warning("b", "", "f"), conflict("c", "", "f"), conflict("d", "", "f")]
    assert first_conflict(findings) is findings[2] and first_conflict(findings[:2]) is None


def test_torch_that_cannot_be_imported() -> None:
    finding = machine.torch_finding(TorchFacts(error="ImportError: libcudart.so.13"))
    assert finding.verdict == "conflict" and "libcudart" in finding.detail
    assert machine.torch_finding(GPU).detail == "2.11.0+cu130, CUDA 13.0"
    assert "CPU build" in machine.torch_finding(CPU).detail


def test_gpus() -> None:
    finding = machine.gpu_finding(GPU)
    assert finding.verdict == "ok"
    assert finding.detail == "8 x NVIDIA H200, 139 GiB, driver 580.95.05, CUDA 13.0"


@pytest.mark.parametrize(
    "facts, verdict, words",
    [
        (CPU, "ok", "CPU"),
        (TorchFacts(version="2", cuda="13.0"), "warning", "CUDA 13.0"),
        (TorchFacts(version="2", driver="580.1"), "conflict", "torch is a CPU build"),
        (TorchFacts(version="2", driver=""), "conflict", "unknown version"),
        (TorchFacts(version="2", cuda="13.0", driver="570.1", error="driver too old"), "conflict", "older than 580"),
        (TorchFacts(version="2", cuda="13.0", driver="580.1", error="ECC"), "conflict", "ECC"),
        (TorchFacts(version="2", cuda="13.0", driver="5", devices=(H200, V100)), "warning", "NVIDIA H200 and Tesla"),
        (
            TorchFacts(version="2", cuda="13", devices=(H200, Device("NVIDIA H200", 139 * GIB, 9 * GIB, (9, 0)))),
            "warning",
            "GPU 1: 9 GiB free",
        ),
    ],
)
def test_unsuitable_gpus(facts: TorchFacts, verdict: str, words: str) -> None:
    finding = machine.gpu_finding(facts)
    assert finding.verdict == verdict and words in finding.detail


def test_nccl() -> None:
    assert machine.nccl_finding(GPU) == ok("nccl", "2.28.9")
    assert machine.nccl_finding(CPU).verdict == "ok"
    without = TorchFacts(version="2", cuda="13", devices=(H200,))
    assert machine.nccl_finding(without).verdict == "conflict"


def test_precision() -> None:
    assert machine.bfloat16_finding((V100,), "float32").verdict == "ok"
    assert machine.bfloat16_finding((H200,), "bfloat16").verdict == "ok"
    assert machine.bfloat16_finding((), "bfloat16").verdict == "ok"
    assert "sm_70" in machine.bfloat16_finding((H200, V100), "bfloat16").detail


def test_transformer_engine_says_itself_why_there_is_no_fp8() -> None:
    facts = TransformerEngineFacts("2.20.2", fp8=Support(True, ""), fp8_block_scaling=Support(False, "needs CUDA 12.9"))
    engine, fp8, blocks = machine.transformer_engine_findings(facts, True, "2.20.2")
    assert (engine.verdict, fp8.verdict, blocks.verdict) == ("ok", "ok", "warning")
    assert "needs CUDA 12.9" in blocks.detail


@pytest.mark.parametrize(
    "facts, has_gpu, verdict, words",
    [
        (TransformerEngineFacts(), False, "ok", "not installed"),
        (TransformerEngineFacts(), True, "warning", "own layers"),
        (TransformerEngineFacts("2.20.2", error="undefined symbol"), True, "conflict", "broken: undefined symbol"),
        (TransformerEngineFacts("2.20.2", error="undefined symbol"), False, "conflict", "undefined symbol"),
        (TransformerEngineFacts("2.20.2"), False, "ok", "without a GPU"),
    ],
)
def test_transformer_engine(facts: TransformerEngineFacts, has_gpu: bool, verdict: str, words: str) -> None:
    (finding,) = machine.transformer_engine_findings(facts, has_gpu, "2.20.2")
    assert finding.verdict == verdict and words in finding.detail
    assert verdict == "ok" or "==2.20.2" in finding.fix


@pytest.mark.parametrize(
    "facts, verdict, words",
    [
        (ApexFacts(), "ok", "optional"),
        (ApexFacts(True, False, False, "0.9.10.dev0"), "warning", "web applications"),
        (ApexFacts(True, True, False, "0.1"), "warning", "amp_C"),
        (ApexFacts(True, True, True, "0.1"), "ok", "with CUDA extensions"),
    ],
)
def test_apex(facts: ApexFacts, verdict: str, words: str) -> None:
    finding = machine.apex_finding(facts, has_gpu=True)
    assert finding.verdict == verdict and words in finding.detail


def test_triton_and_psutil() -> None:
    assert [machine.triton_finding(*facts).verdict for facts in (("3.6", True), (None, False), (None, True))] == [
        "ok",
        "ok",
        "warning",
    ]
    assert machine.psutil_finding("7").verdict == "ok"
    missing = machine.psutil_finding(None)
    assert missing.verdict == "conflict" and "hangs" in missing.detail


@pytest.mark.parametrize(
    "answer, num_bf16_layers, verdict, words",
    [
        ({"recipe": "bf16", "name": "torch", "reason": "the model is in bfloat16"}, 0, "ok", "bf16, by torch"),
        (
            {"recipe": "fp8_blockwise", "name": "Transformer Engine", "reason": "requested"},
            2,
            "ok",
            "fp8_blockwise, 2 layers in model.dtype, by Transformer Engine",
        ),
        (
            {"recipe": "fp8_blockwise", "name": "emulation in fp32", "reason": "no device"},
            0,
            "warning",
            "by emulation in fp32 (no device)",
        ),
        ({"problem": "precision: fp8_current cannot run here: ..."}, 0, "conflict", "fp8_current cannot run here"),
    ],
)
def test_linear_products(answer: dict[str, str], num_bf16_layers: int, verdict: str, words: str) -> None:
    finding = machine.linear_products_finding(answer, num_bf16_layers)
    assert finding.verdict == verdict and words in finding.detail
    assert (verdict == "ok") == (finding.fix == "")


def test_a_job_of_one_core_and_little_memory_is_reported_with_the_fix() -> None:
    """The default of many Slurm sites: one core a task, memory by the core."""
    limits = ProcessLimits(1, 128, 4 * GIB, 1024 * GIB, "Slurm job 7")
    cores, memory = machine.cores_finding(limits), machine.memory_finding(limits)
    assert (
        cores.verdict == "warning" and "1 of the machine's 128 cores" in cores.detail and "Slurm job 7" in cores.detail
    )
    assert "--cpus-per-task" in cores.fix and "--exclusive" in cores.fix
    assert memory.verdict == "warning" and "4.0 of the machine's 1024 GiB" in memory.detail and "--mem=0" in memory.fix


@pytest.mark.parametrize(
    "limits",
    [
        ProcessLimits(128, 128, None, 1024 * GIB),
        ProcessLimits(1, 1, None, 4 * GIB),  # a small machine is not a job that was cut
        ProcessLimits(16, 128, 200 * GIB, 1024 * GIB),
    ],
)
def test_a_job_with_its_share_is_ok(limits: ProcessLimits) -> None:
    assert machine.cores_finding(limits).verdict == machine.memory_finding(limits).verdict == "ok"
