"""Segments of changed elements: what goes in comes out, and nothing else is accepted."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.bridge.protocol.deltas import (
    BLOCK,
    Change,
    apply,
    areas,
    bits,
    change,
    decode,
    encode,
    encoded_bytes,
)
from megatron_dapo.bridge.protocol.messages import Bucket
from tests.examples import examples
from tests.unit.reshard.test_checksum import DTYPES, filled


def flipped(values: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """A copy with one bit of `count` elements changed."""
    changed = values.clone()
    octets = changed.view(-1, 1).view(torch.uint8)
    for element in random.Random(seed).sample(range(values.numel()), min(count, values.numel())):
        octets[element, 0] ^= 1
    return changed


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_changes_of_several_chunks_survive_the_wire(data):
    old, new = [], []
    for number in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        old.append(filled(shape or (1,), data.draw(st.sampled_from(DTYPES)), number).view(shape))
        new.append(flipped(old[-1], data.draw(st.integers(0, 9)), number))
    changes = [change(after, before) for before, after in zip(old, new)]
    segment = encode([(tensor.shape, changed) for tensor, changed in zip(old, changes)])
    sizes = [encoded_bytes(t.shape, c.positions.numel(), t.dtype.itemsize) for t, c in zip(old, changes)]
    assert segment.numel() == sum(sizes)
    surplus = torch.cat([segment, torch.full((24,), 255, dtype=torch.uint8)])  # the rest of an area
    decoded, size = decode(surplus, [(tensor.shape, tensor.dtype) for tensor in old])
    assert size == segment.numel()
    for before, after, changed in zip(old, new, decoded):
        # In place, and as columns of a wider parameter.
        wide = before.new_zeros((*before.shape[:-1], before.shape[-1] + 3)) if before.dim() else before.clone()
        for target in (before.clone(), wide.narrow(-1, 2, before.shape[-1]) if before.dim() else wide):
            bits(target).copy_(bits(before))
            apply(target, changed)
            assert torch.equal(bits(target), bits(after))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 60, 400, 3000])
def test_every_difference_is_found(dtype, count):
    """Few, by compiled code, and more than it has room for."""
    old = filled((60, 50), dtype)
    new = flipped(old, count, count)
    expected = (bits(new) != bits(old)).reshape(-1).nonzero().view(-1)
    assert torch.equal(change(new, old).positions, expected) and len(expected) == count
    turned = change(new.t(), old.t().contiguous())
    assert len(turned.positions) == count and same(turned.values, new.t().reshape(-1)[turned.positions])


def same(values: torch.Tensor, others: torch.Tensor) -> bool:
    return torch.equal(values.view(torch.uint8), others.view(torch.uint8))


def test_positions_beyond_one_block():
    old = torch.zeros(3, BLOCK // 2 + 5, dtype=torch.bfloat16)
    new = old.clone()
    for position in (0, BLOCK - 1, BLOCK, old.numel() - 1):
        new.view(-1)[position] = 1.0
    changed = change(new, old)
    (decoded,), size = decode(encode([(old.shape, changed)]), [(old.shape, old.dtype)])
    assert decoded.positions.tolist() == [0, BLOCK - 1, BLOCK, old.numel() - 1] and size == 8 + 8 + 8


@pytest.mark.parametrize(("share", "most"), [(0.02, 0.041), (0.005, 0.011)])
def test_bytes_over_all_of_a_bf16_parameter(share, most):
    old = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    new = old.masked_fill(torch.rand(old.shape, generator=torch.Generator().manual_seed(0)) < share, 1.0)
    assert encode([(old.shape, change(new, old))]).numel() <= most * old.nbytes


def _segment(counts: list[int], places: list[int], num_values: int) -> torch.Tensor:
    arrays = [torch.tensor(counts, dtype=torch.int32), torch.tensor(places).to(torch.int16), torch.ones(num_values)]
    padded = [torch.nn.functional.pad(a.view(torch.uint8), (0, -a.nbytes % 8)) for a in arrays]
    return torch.cat(padded)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (_segment([2], [3, 3], 2), "outside its chunk of shape .12,., or twice"),
        (_segment([2], [4, 3], 2), "or twice"),
        (_segment([1], [12], 1), "outside its chunk"),
        (_segment([1], [-1], 1), "outside its chunk"),
        (_segment([-1], [], 0), "no such counts"),
        (_segment([BLOCK + 1], [], 0), "no such counts"),
        (_segment([9], [0], 1), "ends inside its segment"),
        (torch.zeros(3, dtype=torch.uint8), "ends inside its segment"),
    ],
)
def test_what_is_no_segment_is_refused(segment, message):
    with pytest.raises(ValueError, match=message):
        decode(segment, [((12,), torch.float32)])


@settings(max_examples=examples(100), deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_segment_or_refused(data):
    try:
        changes, _ = decode(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8), [((40,), torch.bfloat16)])
    except ValueError:
        return
    apply(torch.zeros(40, dtype=torch.bfloat16), changes[0])


def test_areas_lie_apart_inside_the_slot():
    bucket = Bucket(0, 1000, (), {3: (0, 640), 0: (640, 704), 2: (704, 1000)})
    found = areas(bucket, 512)
    assert list(found) == [3, 0, 2]
    assert [area.start for area in found.values()] == [0, *(area.stop for area in list(found.values())[:-1])]
    assert found[2].stop <= 512 and all(area.stop - area.start >= 64 and area.start % 64 == 0 for area in found.values())


def test_no_change_is_a_change_too():
    values = torch.ones(5)
    changed = change(values, values.clone())
    assert changed.positions.numel() == 0
    apply(values, Change(changed.positions, changed.values))
    assert torch.equal(values, torch.ones(5))
