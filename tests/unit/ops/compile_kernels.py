"""Compile the head's kernels for sm_80 and sm_90 without a device; one line of key=value a kernel. Started by
test_fused_compile.py."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_dapo.ops.lm_head import fused, fused_kernels

ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
OF_THE_MODEL = ("hidden", "weight", "gradients")
IN_FP32 = ("logits", "maxima", "sums", "one_over_totals", "constants", "slopes", "to_targets")
USES = (
    (fused_kernels.partial_sums, False),
    (fused_kernels.logit_gradients, False),
    (fused_kernels.logit_gradients, True),
)


def cases() -> Iterator[tuple[Any, bool, fused.Blocks, str, int]]:
    for (size, is_hopper), blocks in fused._BLOCKS.items():
        for kernel, has_slope in USES:
            yield kernel, has_slope, blocks, {2: "bf16", 4: "fp32"}[size], 90 if is_hopper else 80
    for capability in (80, 90):
        blocks = fused.Blocks(4, 1024, 0, num_warps=4, num_stages=3)
        yield fused_kernels.sums_of_logits, False, blocks, "fp32", capability


def signature_of(name: str, kind: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in OF_THE_MODEL:
        return f"*{kind}"
    if name in IN_FP32:
        return "*fp32"
    return {"target_columns": "*i64", "one_over_temperature": "fp32"}.get(name, "i32")


def compile_case(kernel: Any, has_slope: bool, blocks: fused.Blocks, kind: str, capability: int) -> dict[str, Any]:
    names = kernel.arg_names
    asked = {**blocks.arguments("ieee" if kind == "fp32" else "tf32"), "HAS_SLOPE": has_slope}
    constants = {name: value for name, value in asked.items() if name in names}
    signature = {name: signature_of(name, kind, constants) for name in names}
    # As at the sizes of a model: all but the temperature is divisible by 16.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name] == "i32" or signature[name].startswith("*")
    }
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "type": kind,
        "slope": has_slope,
        "shared": compiled.metadata.shared,
        "products": ",".join(word for word in ("wgmma", "mma.sync", "fma.rn.f32") if word in ptx),
        "assembler": assembled(ptx, capability),
    }


def assembled(ptx: str, capability: int) -> str:
    """Return the assembler's report of registers and spills; raise CalledProcessError if it refuses the code."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        target = f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(ASSEMBLER), "-v", target, file.name, "-o", "/dev/null"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr.replace("\n", " ")


if __name__ == "__main__":
    for case in cases():
        print("\t".join(f"{key}={value}" for key, value in compile_case(*case).items()))
