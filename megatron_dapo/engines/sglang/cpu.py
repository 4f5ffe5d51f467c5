"""Stand-ins that let a stock SGLang import and sample on a node without CUDA. With CUDA they change nothing.

SGLang has a CPU mode of plain torch layers ("native"), taken when the CPU build of its kernel package is missing. Some
modules nevertheless import names of that package, and of a torchvision built for CUDA, when they are imported. The
stand-ins here let those imports pass and raise when called; none of them does arithmetic. There are three exceptions:
sampling by a seed per request, whose random numbers SGLang computes with a Triton kernel, so that the same hash is
given in torch; layers in FP8 (`cpu_fp8`); and gated delta nets (`cpu_gated_delta`). Memory that SGLang pins for copies from a GPU is plain memory here.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_dapo.engines.sglang import cpu_fp8, cpu_gated_delta

# Operators whose schema torchvision's Python half needs when sglang imports it (transformers' image processors do).
TORCHVISION_STAND_INS = ("nms", "qnms")
_HASH_MODULE = "sglang.kernels.ops.sampling.murmur_hash"
_WORD = 0xFFFFFFFF


def is_needed() -> bool:
    """Return True if this node has no CUDA device."""
    return not torch.cuda.is_available()


def prepare_imports() -> None:
    """Make `import sglang` possible. Call before it, in every process of the engine."""
    if is_needed():
        _declare_torchvision_operators()
        _install(_kernel_package())
        _install(cpu_gated_delta.module())
        cpu_gated_delta.define_operators()
        _install(_hash_module())


def apply_to_sglang() -> None:
    """Let a seed per request count on a CPU, and FP8 run (imports sglang). Call in every process of the engine.

    SGLang listens to seeds only in its deterministic mode, which accepts no CPU attention backend and swaps matrix
    products for Triton kernels. torch's products on a CPU differ only by rounding between batch sizes, so they stay.
    """
    if not is_needed():
        return
    from sglang.srt import batch_invariant_ops, server_args
    from sglang.srt.models.deepseek_common import attention_backend_handler as latent_attention
    from sglang.srt.state_capturer import base as state_capturer

    server_args.add_deterministic_attention_backend_choices(["torch_native"])
    server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = _keep_torch_products
    state_capturer.BaseHostCache.__init__ = _keep_in_plain_memory
    _pin_nothing()
    # Its own way to attend to a prompt does not read the cache, which is all that this backend reads.
    latent_attention.AttentionBackendRegistry.register("torch_native", latent_attention._dispatch_mla_subtype)
    cpu_fp8.apply_to_sglang()
    cpu_gated_delta.apply_to_sglang()


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) of the 16 bytes (seed, position, column), as SGLang's kernel computes it.

    seed [n], positions [n], col_indices [m], any integer type -> [n, m] int64 with values in [0, 2**32).
    """
    seed = seed.to(torch.int64)
    rows = torch.zeros_like(seed)
    for word in (seed & _WORD, (seed >> 32) & _WORD, positions.to(torch.int64) & _WORD):
        rows = _mix(rows, word)
    hashed = _mix(rows[:, None], col_indices.to(torch.int64)[None, :]) ^ 16
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _WORD
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _WORD
    return hashed ^ (hashed >> 16)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _rotate((word * 0xCC9E2D51) & _WORD, 15)
    state = _rotate(state ^ ((word * 0x1B873593) & _WORD), 13)
    return (state * 5 + 0xE6546B64) & _WORD


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD


def _keep_torch_products(enable_bmm: bool = True) -> None:
    """In place of SGLang's switch to batch-invariant Triton kernels."""


def _keep_in_plain_memory(
    cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str, device: str = "cpu"
) -> None:
    """Initialize the host's copy of what layers chose for each token, which SGLang wants in pinned memory."""
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name


def _pin_nothing() -> None:
    """Let torch give plain memory if SGLang's adapters ask for pinned memory, which needs an accelerator."""
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def plain(*arguments: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        return make(*arguments, **keywords)

    return plain


def _hash_module() -> types.ModuleType:
    module = types.ModuleType(_HASH_MODULE)
    vars(module)["murmur_hash32"] = murmur_hash32
    return module


def _kernel_package() -> types.ModuleType:
    package = types.ModuleType("sgl_kernel")
    vars(package).update(__path__=[], __version__="0.0.0", __getattr__=_kernel)
    return package


def _kernel(name: str) -> Callable[..., None]:
    """Return a stand-in for a kernel for CPUs, all of whose names end alike. AttributeError for other names.

    Which ones SGLang imports differs between versions; all belong to speculative decoding, which is never on, or to
    copies within the cache.
    """
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}")

    def raise_missing(*arguments: object, **keywords: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}: SGLang's kernels for CPUs are not installed")

    raise_missing.__name__ = name
    return raise_missing


def _install(module: types.ModuleType) -> None:
    if "." in module.__name__ or importlib.util.find_spec(module.__name__) is None:
        is_package = hasattr(module, "__path__")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=is_package)
        sys.modules[module.__name__] = module


def _declare_torchvision_operators() -> None:
    for name in TORCHVISION_STAND_INS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
