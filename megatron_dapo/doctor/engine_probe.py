"""Libraries of the engines' environment, imported by its interpreter: python -m megatron_dapo.doctor.engine_probe.

Needs nothing but the standard library before SGLang. Writes one line to standard output, MARK and the answer as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, field

from megatron_dapo.doctor.probes import MARK

# A server on a GPU fails without these at its start, or at the first request that needs one.
GPU_MODULES = ("sgl_kernel", "sgl_kernel.flash_attn", "flashinfer", "torch_memory_saver")


@dataclass(frozen=True)
class EngineLibraries:
    """Libraries of the engines' environment, as its interpreter sees them."""

    error: str = ""  # reason SGLang cannot be imported; the other fields are then unknown
    torch: str = ""
    cuda: str | None = None  # toolkit that torch was built with; None: a CPU build
    nccl: str | None = None
    has_gpu: bool = False
    has_compiler: bool = False  # nvcc, which compiles FlashInfer's kernels at their first use
    failures: dict[str, str] = field(default_factory=dict)  # module of GPU_MODULES, tried if there is a GPU -> reason


def examine() -> EngineLibraries:
    """Import SGLang as a server does, then the modules of GPUs one by one. Runs in the engines' interpreter."""
    from megatron_dapo.engines.sglang.cpu import prepare_imports

    prepare_imports()  # The import needs stand-ins on a CPU.
    importlib.import_module("sglang")
    import torch

    has_gpu = torch.cuda.is_available()
    failures = {}
    for module in GPU_MODULES if has_gpu else ():
        try:
            importlib.import_module(module)
        except Exception as error:  # a library for another torch or GPU fails with whatever its loader raises
            failures[module] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    return EngineLibraries("", torch.__version__, torch.version.cuda, nccl, has_gpu, compiler is not None, failures)


if __name__ == "__main__":
    sys.stdout.write(f"\n{MARK}{json.dumps(asdict(examine()))}\n")
