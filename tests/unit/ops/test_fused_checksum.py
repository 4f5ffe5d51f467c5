"""The fused checksums against Python integers in Triton's interpreter; their kernel is compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from megatron_dapo.bridge.protocol.checksums import CountedSlice, fused_sums
from megatron_dapo.reshard.checksum import signed, slice_checksum
from megatron_dapo.reshard.layout import slice_view
from megatron_dapo.reshard.slices import Slice, whole
from tests.examples import examples
from tests.unit.ops.test_lm_head import interpreter_is_broken
from tests.unit.reshard.test_checksum import DTYPES, filled, oracle

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off: TRITON_INTERPRET=1")


def part(values: torch.Tensor) -> CountedSlice:
    shape = tuple(values.shape)
    return CountedSlice(values, whole(shape), shape)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_follows_the_definition(dtype):
    shapes = [(1,), (7,), (3, 5), (4, 16), (2, 3, 12), (1, 1), (2, 2, 2, 3, 8), (9, 1030)]
    tensors = [filled(shape, dtype) for shape in shapes]
    assert fused_sums([part(tensor) for tensor in tensors]).tolist() == [oracle(tensor) for tensor in tensors]


@interpreted
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_slices_of_several_types_in_one_call(data):
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)))
        start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        bounds = Slice(start, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, start)))
        whole_tensor = filled(shape, data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 9)))
        # In place, or copied as it travels: other strides and another alignment.
        values = slice_view(whole_tensor, bounds)
        parts.append(CountedSlice(values.clone() if data.draw(st.booleans()) else values, bounds, shape))
    assert fused_sums(parts).tolist() == [slice_checksum(*each) for each in parts]


@interpreted
def test_parts_add_up_and_empty_slices_count_nothing():
    values = filled((6, 10), torch.bfloat16)
    cuts = [Slice((0, 0), (6, 3)), Slice((0, 3), (4, 7)), Slice((4, 3), (2, 7)), Slice((6, 0), (0, 10))]
    sums = fused_sums([CountedSlice(slice_view(values, bounds), bounds, (6, 10)) for bounds in cuts])
    assert signed(sum(sums.tolist())) == oracle(values) and int(sums[-1]) == 0
    turned = filled((8, 6), torch.float32).t()
    scalar = torch.tensor(1.5)
    assert fused_sums([part(turned), part(scalar)]).tolist() == [
        oracle(turned.contiguous()),
        slice_checksum(scalar, Slice((), ()), ()),
    ]


@interpreted
def test_every_bit_counts():
    values = filled((2, 5), torch.bfloat16)
    before, bits = oracle(values), values.view(-1).view(torch.int16)
    flipped = []
    for index in range(bits.numel()):
        for bit in range(16):
            other = bits.clone()
            other[index] ^= 1 << bit if bit < 15 else -(1 << 15)
            flipped.append(part(other.view(torch.bfloat16).view(2, 5)))
    assert before not in fused_sums(flipped).tolist()


@pytest.mark.skipif(INTERPRETED, reason="this is the process with the interpreter")
@pytest.mark.skipif(interpreter_is_broken(), reason="Triton below 3.7 has an interpreter that NumPy 2.4 breaks")
def test_the_cases_above_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "not compiles"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout[-6000:]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_dapo.ops import fused_checksum as fused
from megatron_dapo.reshard.checksum import COLUMN_SEED, MULTIPLIERS, ROW_SEED
numbers = fused.constants(fused.Factors(ROW_SEED, COLUMN_SEED, MULTIPLIERS))
for capability in (80, 90):
    for bits in (8, 16, 32, 64):
        constants = {"BITS": bits, "BLOCK_ROWS": fused.BLOCK_ROWS, "BLOCK_COLUMNS": fused.BLOCK_COLUMNS, **numbers}
        signature = {"table": "*i64", "sums": "*i64", "splits": "i32", **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(fused.partial_sums, signature, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert ".local" not in compiled.asm["ptx"] and len(compiled.asm["cubin"]) > 0
        print(capability, bits)
"""


def test_the_kernel_compiles_for_gpus(tmp_path: Path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 8
