"""Compile the head's kernels without a device; one line of key=value a kernel. Started by test_fused_compile.py.

    python compile_kernels.py every|each

`every`: all uses, types and blocks for sm_80 and sm_90. `each`: every kernel once, as sm_90 trains in bf16 with the fixed blocks.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_dapo.ops.lm_head import fused, fused_kernels, fused_tuned
from megatron_dapo.ops.lm_head.fused import Blocks
from megatron_dapo.plan.memory import KEPT_GROUP

ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
OF_THE_MODEL = ("hidden", "weight", "gradients")
IN_FP32 = ("logits", "maxima", "sums", "kept_largest", "one_over_totals", "constants", "slopes", "to_targets")
SUMS, GRADIENTS = fused_kernels.partial_sums, fused_kernels.logit_gradients
# Every use of the kernels with products: for log-probs and for training with logits kept; without a slope and with one.
USES: tuple[tuple[Any, dict[str, bool]], ...] = (
    (SUMS, {"KEEP": False}),
    (SUMS, {"KEEP": True}),
    (GRADIENTS, {"HAS_SLOPE": False}),
    (GRADIENTS, {"HAS_SLOPE": True}),
)


@dataclass(frozen=True)
class Case:
    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    kind: str  # the model's
    capability: int
    blocks: str = ""


def cases() -> Iterator[Case]:
    chosen = [
        (kind, blocks, *key) for key, blocks in fused._BLOCKS.items() for kind in [{2: "bf16", 4: "fp32"}[key[0]]]
    ]
    tuned = [("bf16", blocks, 2, is_hopper) for blocks in fused_tuned.CANDIDATES for is_hopper in (True, False)]
    for kind, blocks, size, is_hopper in chosen + [row for row in tuned if row[3] or not row[1].has_tma]:
        for kernel, use in USES:
            if blocks != fused._BLOCKS[size, is_hopper] and use in ({"KEEP": True}, {"HAS_SLOPE": False}):
                continue  # a candidate is compiled as it is measured
            constants = {
                **blocks.meta(),
                **use,
                "PRECISION": "ieee" if kind == "fp32" else "tf32",
                "WIDEN": False,
                "GROUP": KEPT_GROUP,
            }
            name = describe(blocks)
            yield Case(kernel, constants, blocks.num_warps, blocks.num_stages, kind, 90 if is_hopper else 80, name)
    for capability in (80, 90):
        yield Case(fused_kernels.sums_of_logits, {"BLOCK_TOKENS": 4, "BLOCK_COLUMNS": 1024}, 4, 3, "fp32", capability)
        constants = {"BLOCK_TOKENS": 32, "GROUP": KEPT_GROUP, "HAS_SLOPE": True}
        yield Case(fused_kernels.gradients_of_kept, constants, 4, 3, "bf16", capability)


def is_trained(case: Case) -> bool:
    """Whether a case is a kernel of training in bf16 on Hopper, in the blocks that are not measured first."""
    use = {"KEEP": True, "HAS_SLOPE": True}
    is_fixed = case.blocks in ("", describe(fused._BLOCKS[2, True]))
    return case.capability == 90 and is_fixed and all(use.get(name, value) == value for name, value in case.constants.items())


def describe(blocks: Blocks) -> str:
    return (
        f"{blocks.tokens}x{blocks.columns}x{blocks.width},{blocks.num_warps} warps,{blocks.num_stages} stages"
        f"{',tma' * blocks.has_tma}{',flat' * blocks.is_flattened}"
    )


def signature_of(name: str, kind: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name == "kept":
        return "*fp32" if kind == "fp32" else "*fp16"
    if name in OF_THE_MODEL:
        return f"*{kind}"
    if name in IN_FP32:
        return "*fp32"
    return {"target_columns": "*i64", "one_over_temperature": "fp32"}.get(name, "i32")


def compile_case(case: Case) -> dict[str, Any]:
    kernel, names = case.kernel, case.kernel.arg_names
    constants = {name: value for name, value in case.constants.items() if name in names}
    signature = {name: signature_of(name, case.kind, constants) for name in names}
    # As at the sizes of a model: all but the temperature is divisible by 16.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name] == "i32" or signature[name].startswith("*")
    }
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", case.capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    words = {"wgmma": "wgmma", "mma.sync": "mma.sync", "fma.rn.f32": "fma", "cp.async.bulk.tensor": "tma"}
    return {
        "kernel": kernel.__name__,
        "capability": case.capability,
        "type": case.kind,
        "use": ",".join(f"{name}={case.constants.get(name)}" for name in ("KEEP", "HAS_SLOPE") if name in names),
        "blocks": case.blocks,
        "shared": compiled.metadata.shared,
        "products": ",".join(name for word, name in words.items() if word in ptx),
        "assembler": assembled(ptx, case.capability),
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
    for case in filter({"every": None, "each": is_trained}[sys.argv[1]], cases()):
        print("\t".join(f"{key}={value}" for key, value in compile_case(case).items()), flush=True)
