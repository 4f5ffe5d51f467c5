"""Which implementation of the head runs, by one rule, and why.

`auto` is `triton` where a 16-bit model is on a device of compute capability 8.0 or more and Triton can be imported, else
`chunked`. The others, which are slower or less exact, run where they are asked for by name; what is asked for and cannot
run is an error, never another implementation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dapo.ops.lm_head import chunked, fp8_logits
from megatron_dapo.ops.lm_head.compat import import_failure
from megatron_dapo.ops.lm_head.inputs import Kernels

AUTO, REFERENCE, CHUNKED, TRITON, TE_FP8 = "auto", "reference", "chunked", "triton", "te_fp8"
_FUSED = "megatron_dapo.ops.lm_head.fused"
LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Choice:
    """`name` computes the head, because of `reason`."""

    name: str
    reason: str


@dataclass(frozen=True)
class HeadSpec:
    """Where the head runs: the device, the type that hidden states and weight promote to, the hidden size, and this
    rank's rows of the weight."""

    device: torch.device
    dtype: torch.dtype
    width: int
    rows: int

    @classmethod
    def of(cls, hidden: torch.Tensor, weight: torch.Tensor) -> HeadSpec:
        return cls(hidden.device, torch.promote_types(hidden.dtype, weight.dtype), hidden.size(1), weight.size(0))


def choose(asked: str, spec: HeadSpec) -> Choice:
    """ValueError for a name that does not exist and for one that cannot run here, with what is in its way."""
    if asked == AUTO:
        return _by_rule(spec)
    if asked not in IMPLEMENTATIONS:
        raise ValueError(f"log-prob head: no implementation {asked!r}; there are {AUTO}, {', '.join(IMPLEMENTATIONS)}")
    obstacle = _OBSTACLES[asked](spec)
    if obstacle is not None:
        raise ValueError(f"log-prob head: {asked} cannot run here: {obstacle}")
    return Choice(asked, f"asked for{_DETAILS.get(asked, _no_detail)(spec)}")


def _by_rule(spec: HeadSpec) -> Choice:
    if spec.device.type != "cuda":
        return Choice(CHUNKED, f"the device is {spec.device.type}")
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return Choice(CHUNKED, f"the model is in {spec.dtype}, which tensor cores would round")
    obstacle = _in_the_way_of_triton(spec)
    if obstacle is not None:
        return Choice(CHUNKED, f"not {TRITON}: {obstacle}")
    return Choice(TRITON, f"{spec.dtype} on compute capability {_capability(spec.device)}")


def _no_detail(spec: HeadSpec) -> str:
    return ""


def _multiplier_of_fp8(spec: HeadSpec) -> str:
    return f"; its products by {fp8_logits.multiplier_name(spec.device)}"


def _nothing(spec: HeadSpec) -> str | None:
    return None


def _in_the_way_of_triton(spec: HeadSpec) -> str | None:
    if spec.dtype == torch.float64:
        return "its sums are fp32 and the inputs fp64; chunked and reference sum in fp64"
    failure = import_failure(_FUSED)
    if failure is not None:
        return f"Triton cannot be imported: {failure}"
    if importlib.import_module("megatron_dapo.ops.lm_head.fused_kernels").IS_INTERPRETED:
        return None if spec.device.type == "cpu" else "TRITON_INTERPRET is set, which is for a CPU"
    if spec.device.type != "cuda":
        return f"the device is {spec.device.type}; there, only Triton's interpreter (TRITON_INTERPRET=1) can run it"
    capability = torch.cuda.get_device_capability(spec.device)
    if capability < LEAST_CAPABILITY:
        return f"compute capability {_capability(spec.device)} is below {_dotted(LEAST_CAPABILITY)}"
    return None


def _capability(device: torch.device) -> str:
    return _dotted(torch.cuda.get_device_capability(device))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _in_the_way_of_fp8(spec: HeadSpec) -> str | None:
    return fp8_logits.obstacle(spec.device, spec.dtype, spec.width, spec.rows)


def _load_triton() -> Kernels:
    fused = importlib.import_module(_FUSED)
    return Kernels(fused.sums, fused.gradients)


_OBSTACLES: dict[str, Callable[[HeadSpec], str | None]] = {
    REFERENCE: _nothing,
    CHUNKED: _nothing,
    TRITON: _in_the_way_of_triton,
    TE_FP8: _in_the_way_of_fp8,
}
_DETAILS: dict[str, Callable[[HeadSpec], str]] = {TE_FP8: _multiplier_of_fp8}
_KERNELS: dict[str, Callable[[], Kernels]] = {
    CHUNKED: lambda: Kernels(chunked.sums, chunked.gradients),
    TRITON: _load_triton,
    TE_FP8: lambda: Kernels(fp8_logits.sums, fp8_logits.gradients),
}
IMPLEMENTATIONS = tuple(_OBSTACLES)


def kernels_of(name: str) -> Kernels:
    """Of any implementation but `reference`, which is one function of autograd."""
    return _KERNELS[name]()
