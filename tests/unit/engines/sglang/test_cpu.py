"""The hash behind seeded sampling, against MurmurHash3 written from its definition; stand-ins for kernels."""

from __future__ import annotations

import struct

import pytest
import torch

from megatron_dapo.engines.sglang.cpu import _kernel_package, murmur_hash32

MASK = 0xFFFFFFFF


def murmur3_x86_32(data: bytes) -> int:
    """MurmurHash3 of a whole number of words, seed 0."""
    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & MASK
        word = (word << 15 | word >> 17) & MASK
        state ^= word * 0x1B873593 & MASK
        state = (state << 13 | state >> 19) & MASK
        state = (state * 5 + 0xE6546B64) & MASK
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & MASK
    return state ^ state >> 16


def test_the_definition_gives_a_published_value() -> None:
    assert murmur3_x86_32(b"hello, world") == 0x149BBB7F


def test_is_the_hash_of_seed_position_and_column() -> None:
    seeds = [0, 1, 42, 2**31, 2**32 + 5, 2**62 + 7, 2**63 - 1]
    positions, columns = [0, 1, 7, 4095, 131072, 2, 3], [0, 1, 299, 151935]
    found = murmur_hash32(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3_x86_32(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found.tolist() == expected


def test_kernels_for_cpus_can_be_imported_but_not_called() -> None:
    package = _kernel_package()
    with pytest.raises(NotImplementedError, match="sgl_kernel.a_kernel_cpu: SGLang's kernels for CPUs are not installed"):
        package.a_kernel_cpu(1, out=2)
    assert not hasattr(package, "a_kernel")  # SGLang's question whether a kernel for GPUs is there
