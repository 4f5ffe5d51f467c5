"""Storages that are emptied and filled again, with views that stay views."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron_dapo.megatron import host_memory
from megatron_dapo.megatron.host_memory import HostMemory, own_memory


def test_every_view_of_a_storage_moves_with_it() -> None:
    host, buffer = HostMemory(), torch.randn(1000)
    want = buffer.clone()
    parameter = torch.nn.Parameter(buffer[40:100].view(6, 10))
    shard = buffer[64:80]
    host.offload([parameter])
    assert buffer.untyped_storage().nbytes() == 0 and host.is_offloaded(shard) and not host.is_empty
    host.onload([shard])
    assert torch.equal(buffer, want) and torch.equal(parameter, want[40:100].view(6, 10))
    with torch.no_grad():
        parameter.zero_()
    assert not shard.any() and host.is_empty, "the views are views of one memory again"
    assert (host.moved.offloaded, host.moved.onloaded) == (4000, 4000) and host.moved.seconds > 0


def test_offloaded_tensors_keep_their_shape_and_type() -> None:
    host = HostMemory()
    for tensor in (torch.randn(4, 6, dtype=torch.bfloat16).t(), torch.arange(30).view(5, 6)[1:, 2:4], torch.randn(3)):
        want = tensor.clone()
        host.offload([tensor])
        assert torch.equal(host.read(tensor), want) and host.read(tensor).shape == want.shape
        host.onload([tensor])
        assert host.read(tensor) is tensor and torch.equal(tensor, want)


def test_twice_away_moves_once_and_the_second_time_takes_the_new_numbers() -> None:
    host, tensor = HostMemory(), torch.ones(8)
    host.offload([tensor, tensor[2:]])
    host.offload([tensor])
    assert host.moved.offloaded == 32
    host.onload([tensor])
    host.onload([tensor])
    tensor.fill_(3.0)
    host.offload([tensor])
    assert host.read(tensor).tolist() == [3.0] * 8 and host.moved.onloaded == 32


def test_discarded_tensors_return_as_zeros() -> None:
    host, gradients = HostMemory(), torch.ones(16)
    host.discard([gradients[4:8]])
    assert gradients.untyped_storage().nbytes() == 0
    host.onload([gradients])
    assert gradients.tolist() == [0.0] * 16 and host.moved.offloaded == host.moved.onloaded == 0


def test_copies_take_their_size_in_whole_pages_and_one_is_locked_until_no_copy_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: dict[int, int] = {}
    calls = SimpleNamespace(
        cudaHostRegister=lambda pointer, size, flags: int(locked.setdefault(pointer, size) != size),
        cudaHostUnregister=locked.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    block = host_memory._Block({1: 5000, 2: 1, 3: 70000}, is_locked=True)
    [(pointer, size)] = locked.items()
    assert pointer % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 and size < 5000 + 1 + 70000 + 2 * 512 + mmap.PAGESIZE
    places = sorted((copy.data_ptr(), copy.numel()) for copy in block.copies.values())
    assert [copy.numel() for copy in block.copies.values()] == [5000, 1, 70000]
    assert all(begin + length <= following for (begin, length), (following, _) in pairwise(places))
    assert places[0][0] >= pointer and sum(places[-1]) <= pointer + size
    del block
    gc.collect()
    assert not locked


def test_a_copy_whose_storage_has_grown_gets_another_place_and_others_are_forgotten() -> None:
    host, kept, other = HostMemory(), torch.ones(4), torch.ones(4)
    host.offload([kept, other])
    host.onload([kept, other])
    kept.resize_(6).fill_(2.0)
    host.offload([kept, other])
    assert host.read(kept).tolist() == [2.0] * 6
    host.forget_others([kept])
    assert host.is_offloaded(kept) and not host.is_offloaded(other)
    host.onload([kept])
    assert kept.tolist() == [2.0] * 6


def test_touching_offloaded_memory_ends_the_process() -> None:
    """A test that ends well has therefore touched no offloaded memory."""
    program = """
import os
import torch
from megatron_dapo.megatron.host_memory import HostMemory
tensor = torch.ones(100000)
HostMemory().offload([tensor[:7]])
for touch in ("tensor.sum()", "tensor.add_(1)", "tensor[5:9].clone()", ""):
    child = os.fork()
    if child == 0:
        exec(touch)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *touched, untouched = map(int, done.stdout.split())
    assert len(touched) == 3 and all(touched) and untouched == 0, done.stdout


def test_memory_that_numpy_looks_into_stays() -> None:
    host, parameter = HostMemory(), torch.nn.Parameter(torch.ones(8))
    view = parameter.detach().numpy()
    host.offload([parameter])
    assert host.is_empty and parameter.untyped_storage().nbytes() == 32 and view.sum() == 8
    own_memory([parameter])
    host.offload([parameter])
    assert host.is_offloaded(parameter) and view.sum() == 8
