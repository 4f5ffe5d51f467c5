"""Slice arithmetic against sets of indices, and the golden flat-range decompositions."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch

from megatron_dapo.reshard.slices import Slice, flat_range_slices, intersect, subtract, uncovered, whole

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "golden.json").read_text())["systems"][
    "irregular_decomposition"
]


def _elements(bounds: Slice) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(bounds.offset, bounds.shape))))


def _random_slice(generator: random.Random, ndim: int) -> Slice:
    offset = tuple(generator.randrange(4) for _ in range(ndim))
    return Slice(offset, tuple(generator.randrange(1, 4) for _ in range(ndim)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


@pytest.mark.parametrize("example", GOLDEN["examples (offsets,lengths)"])
def test_flat_range_golden(example):
    """Keys are like "(3, 4)[2:11)": a shape and a range."""
    shape, flat = (_numbers(part) for part in example.split("["))
    slices = [[list(bounds.offset), list(bounds.shape)] for bounds in flat_range_slices(shape, *flat)]
    assert slices == GOLDEN["examples (offsets,lengths)"][example]


@pytest.mark.parametrize(
    ("shape", "max_slices"),
    [(_numbers(shape), bound["max_boxes"]) for shape, bound in GOLDEN["max_boxes"].items()] + [((7,), 1), ((), 1)],
)
def test_flat_range_exhaustive(shape, max_slices):
    """All ranges of all listed shapes: disjoint, complete, in memory order, at most 2 ndim - 1 slices."""
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    most = 0
    for start, stop in itertools.combinations(range(values.numel() + 1), 2):
        slices = flat_range_slices(shape, start, stop)
        parts = [values[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape))].reshape(-1) for b in slices]
        assert torch.cat(parts).tolist() == list(range(start, stop))
        most = max(most, len(slices))
    assert most == max_slices <= max(1, 2 * len(shape) - 1)


def test_flat_range_empty_and_outside():
    assert flat_range_slices((3, 4), 5, 5) == ()
    with pytest.raises(ValueError, match=r"\[5, 13\).*12 elements"):
        flat_range_slices((3, 4), 5, 13)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_intersection_and_difference_against_sets(ndim):
    generator = random.Random(ndim)
    for _ in range(300):
        a, b = _random_slice(generator, ndim), _random_slice(generator, ndim)
        common = intersect(a, b)
        assert (_elements(common) if common else set()) == _elements(a) & _elements(b)
        parts = subtract(a, b)
        assert sum(part.volume for part in parts) == len(_elements(a) - _elements(b))
        assert set().union(*map(_elements, parts)) == _elements(a) - _elements(b)
        assert len(parts) <= 2 * ndim


def test_uncovered_against_sets():
    generator = random.Random(7)
    for _ in range(100):
        target = whole((5, 6))
        slices = [_random_slice(generator, 2) for _ in range(generator.randrange(8))]
        holes = uncovered(target, slices)
        expected = _elements(target) - set().union(*map(_elements, slices))
        assert sum(hole.volume for hole in holes) == len(expected)
        assert set().union(*map(_elements, holes)) == expected


def test_scalar():
    assert whole(()).volume == 1
    assert intersect(whole(()), whole(())) == whole(())
    assert uncovered(whole(()), [whole(())]) == ()
    assert uncovered(whole(()), []) == (whole(()),)
