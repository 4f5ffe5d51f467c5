"""Selection of the head's implementation, by one rule, with the reason.

`auto` is `triton` if a 16-bit model is on a device of compute capability 8.0 or more and Triton can be imported, and
`chunked` otherwise. The others are slower or less exact and only run on request. A requested implementation that
cannot run is an error; no other one takes its place.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

import torch

from megatron_dapo.ops.lm_head import bf16_products, fp8_logits
from megatron_dapo.ops.lm_head.compat import import_failure

AUTO, REFERENCE, CHUNKED, TE_FP8 = "auto", "reference", "chunked", "te_fp8"
TRITON, TRITON_TUNED, CHUNKED_BF16 = "triton", "triton_tuned", "chunked_bf16"
_PACKAGE = "megatron_dapo.ops.lm_head"
# Modules of `lm_head`. Those of Triton are imported when they are selected: Triton may not be installed.
_MODULES = MappingProxyType(
    {
        CHUNKED: "chunked",
        CHUNKED_BF16: "bf16_products",
        TRITON: "fused",
        TRITON_TUNED: "fused_tuned",
        TE_FP8: "fp8_logits",
    }
)
# `reference` is one differentiable function and has no such module.
IMPLEMENTATIONS = (REFERENCE, *_MODULES)
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Choice:
    """`name` computes the head, because of `reason`."""

    name: str
    reason: str


@dataclass(frozen=True)
class HeadSpec:
    """Device and shape of a head: `dtype` is what hidden states and weight promote to, `width` the hidden size, `rows`
    this rank's rows of the weight."""

    device: torch.device
    dtype: torch.dtype
    width: int
    rows: int

    @classmethod
    def of(cls, hidden: torch.Tensor, weight: torch.Tensor) -> HeadSpec:
        return cls(hidden.device, torch.promote_types(hidden.dtype, weight.dtype), hidden.size(1), weight.size(0))


def choose(requested: str, spec: HeadSpec) -> Choice:
    """Return the implementation for `requested`, a name or "auto". ValueError for an unknown name, and for one that
    cannot run here, with the reason."""
    if requested == AUTO:
        return _by_rule(spec)
    if requested not in IMPLEMENTATIONS:
        raise ValueError(
            f"log-prob head: no implementation {requested!r}; choose one of {AUTO}, {', '.join(IMPLEMENTATIONS)}"
        )
    obstacle = None
    if requested in (TRITON, TRITON_TUNED):
        obstacle = _triton_obstacle(spec)
    elif requested == CHUNKED_BF16:
        obstacle = bf16_products.obstacle(spec.device, spec.dtype)
    elif requested == TE_FP8:
        obstacle = fp8_logits.obstacle(spec.device, spec.dtype, spec.width, spec.rows)
    if obstacle is not None:
        raise ValueError(f"log-prob head: {requested} cannot run here: {obstacle}")
    products = f"; its products by {fp8_logits.backend_name(spec.device)}" if requested == TE_FP8 else ""
    return Choice(requested, f"requested{products}")


def kernels_of(name: str) -> ModuleType:
    """Return the module of an implementation other than `reference`."""
    return importlib.import_module(f"{_PACKAGE}.{_MODULES[name]}")


def _by_rule(spec: HeadSpec) -> Choice:
    if spec.device.type != "cuda":
        return Choice(CHUNKED, f"the device is {spec.device.type}")
    # Tensor cores take 10 bits of an fp32 factor: probabilities of old and new policy would differ by more than a step.
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return Choice(CHUNKED, f"the model is in {spec.dtype}, which tensor cores would round")
    obstacle = _triton_obstacle(spec)
    if obstacle is not None:
        return Choice(CHUNKED, f"not {TRITON}: {obstacle}")
    return Choice(TRITON, f"{spec.dtype} on compute capability {_capability(spec.device)}")


def _triton_obstacle(spec: HeadSpec) -> str | None:
    if spec.dtype == torch.float64:
        return "its sums are fp32 and the inputs fp64; chunked and reference sum in fp64"
    failure = import_failure(f"{_PACKAGE}.fused")
    if failure is not None:
        return f"Triton cannot be imported: {failure}"
    if importlib.import_module(f"{_PACKAGE}.fused_kernels").IS_INTERPRETED:
        return None if spec.device.type == "cpu" else "TRITON_INTERPRET is set, which is for a CPU"
    if spec.device.type != "cuda":
        return f"the device is {spec.device.type}; there, only Triton's interpreter (TRITON_INTERPRET=1) can run it"
    if torch.cuda.get_device_capability(spec.device) < MIN_CAPABILITY:
        return f"compute capability {_capability(spec.device)} is below {'.'.join(map(str, MIN_CAPABILITY))}"
    return None


def _capability(device: torch.device) -> str:
    return ".".join(map(str, torch.cuda.get_device_capability(device)))
