"""Triton's kernels compile to machine code for the devices they are meant for, which takes no device: they use the
tensor cores, fit the shared memory, and keep their sums in registers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may use
PRODUCTS = {(90, "bf16"): "wgmma", (80, "bf16"): "mma.sync"}
# A thread's, outside the loop over the width. On an H100 the blocks that spill 128 were the fastest: 67.2 ms forward and
# backward at 8,192 x 4,096 x 151,936, against 69.3 and 72.9 of the blocks that spill less.
MAX_SPILLED_BYTES = 160
# A tile that is kept is laid out anew for its way to memory: 64 steps of products stand against one such spill.
MAX_SPILLED_TO_KEEP = 900
# Of shapes that are measured before they are used.
MAX_SPILLED_BY_A_CANDIDATE = 640


@pytest.fixture(scope="module", params=["each", pytest.param("every", marks=pytest.mark.long)])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, ...], dict[str, str]]:
    """Compile each kernel once, or every one for every device, type and use, in a process without the interpreter."""
    directory = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(directory), "TRITON_INTERPRET": "0"}
    worker = Path(__file__).with_name("compile_kernels.py")
    finished = subprocess.run(
        [sys.executable, str(worker), request.param], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    rows = [dict(part.split("=", 1) for part in line.split("\t")) for line in finished.stdout.splitlines()]
    return {(row["kernel"], row["capability"], row["type"], row["use"], row["blocks"]): row for row in rows}


def test_all_kernels_compile(compiled, request: pytest.FixtureRequest) -> None:
    kernels = {key[0] for key in compiled}
    assert kernels == {"partial_sums", "logit_gradients", "sums_of_logits", "gradients_of_kept"}
    # 4 uses x 2 types x 2 devices in fixed blocks; those without products on both devices; candidates' sums and gradients:
    # the 3 on Hopper and 3 on Ampere that are not the fixed ones, and 4 with TMA.
    is_whole = request.node.callspec.params["compiled"] == "every"
    assert len(compiled) == (16 + 4 + 2 * (3 + 3 + 4) if is_whole else len(kernels))


def test_16_bit_products_are_those_of_the_tensor_cores(compiled) -> None:
    for (_, capability, kind, *_), row in compiled.items():
        expected = PRODUCTS.get((int(capability), kind)) if row["blocks"] else None
        assert expected is None or expected in row["products"].split(","), row
        assert ("tma" in row["products"].split(",")) == ("tma" in row["blocks"]), row


def test_shared_memory_is_enough_and_little_is_spilled(compiled) -> None:
    fixed = {(row["capability"], row["blocks"]) for row in compiled.values() if "KEEP=True" in row["use"]}
    for (_, capability, *_), row in compiled.items():
        assert int(row["shared"]) <= SHARED_MEMORY[int(capability)], row
        spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", row["assembler"])]
        is_fixed = (capability, row["blocks"]) in fixed or not row["blocks"]
        most = MAX_SPILLED_BYTES if is_fixed else MAX_SPILLED_BY_A_CANDIDATE
        assert spilled and max(spilled) <= (MAX_SPILLED_TO_KEEP if "KEEP=True" in row["use"] else most), row
