"""The rule that chooses an implementation, on devices as torch would describe them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.ops.lm_head import select
from megatron_dapo.ops.lm_head.compat import import_failure
from megatron_dapo.ops.lm_head.select import HeadSpec, choose
from megatron_dapo.ops.logprob import vocab_parallel_logprobs


def place(device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> HeadSpec:
    return HeadSpec(torch.device(device), dtype, 128, 128)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def describe(capability: tuple[int, int], failure: str | None = None, is_interpreted: bool = False) -> None:
        kernels = SimpleNamespace(IS_INTERPRETED=is_interpreted)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(select, "import_failure", lambda module: failure)
        monkeypatch.setattr(select, "importlib", SimpleNamespace(import_module=lambda name: kernels))

    return describe


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_16_bits_on_tensor_cores_take_triton(machine, capability) -> None:
    machine(capability)
    chosen = choose("auto", place())
    assert chosen.name == "triton" and f"compute capability {capability[0]}.{capability[1]}" in chosen.reason


@pytest.mark.parametrize(
    ("where", "capability", "failure", "reason"),
    [
        (place("cpu"), (9, 0), None, "the device is cpu"),
        (place(dtype=torch.float32), (9, 0), None, "the model is in torch.float32"),
        (place(), (7, 5), None, "compute capability 7.5 is below 8.0"),
        (place(), (9, 0), "ModuleNotFoundError: No module named 'triton'", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_everything_else_takes_chunked_and_says_why(machine, where, capability, failure, reason) -> None:
    machine(capability, failure)
    chosen = choose("auto", where)
    assert chosen.name == "chunked" and reason in chosen.reason


@pytest.mark.parametrize(
    ("where", "failure", "is_interpreted", "reason"),
    [
        (place("cpu"), None, False, "only Triton's interpreter"),
        (place(), "RuntimeError: broken", False, "cannot be imported: RuntimeError: broken"),
        (place(), None, True, "TRITON_INTERPRET is set, which is for a CPU"),
        (place(dtype=torch.float64), None, False, "its sums are fp32 and the inputs fp64"),
    ],
)
def test_requesting_triton_where_it_cannot_run_is_an_error(machine, where, failure, is_interpreted, reason) -> None:
    machine((9, 0), failure, is_interpreted)
    with pytest.raises(ValueError, match=f"triton cannot run here: .*{reason}"):
        choose("triton", where)


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_portable_implementations_run_on_every_device(name) -> None:
    assert choose(name, place("cpu", torch.float64)) == select.Choice(name, "requested")


def test_a_package_that_breaks_on_import_is_reported_with_its_error(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_package_of_this_test.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_failure("broken_package_of_this_test") == "OSError: libcuda.so.1: cannot open"


def test_the_function_refuses_before_it_computes() -> None:
    with pytest.raises(
        ValueError,
        match="no implementation 'liger'; choose one of auto, reference, chunked, chunked_bf16, triton, triton_tuned, te_fp8",
    ):
        vocab_parallel_logprobs(
            torch.zeros(1, 4),
            torch.zeros(4, 4),
            torch.zeros(1, dtype=torch.int64),
            vocab_size=4,
            implementation="liger",
        )
