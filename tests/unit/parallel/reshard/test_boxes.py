"""Box arithmetic against sets of indices, and the golden flat-range decompositions."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch

from megatron_dapo.parallel.reshard.boxes import Box, flat_range_boxes, intersect, subtract, uncovered, whole

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "golden.json").read_text())["systems"][
    "irregular_decomposition"
]


def _elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offset, box.shape))))


def _random_box(generator: random.Random, ndim: int) -> Box:
    offset = tuple(generator.randrange(4) for _ in range(ndim))
    return Box(offset, tuple(generator.randrange(1, 4) for _ in range(ndim)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


@pytest.mark.parametrize("example", GOLDEN["examples (offsets,lengths)"])
def test_flat_range_golden(example):
    """Keys are like "(3, 4)[2:11)": a shape and a range."""
    shape, flat = (_numbers(part) for part in example.split("["))
    boxes = [[list(box.offset), list(box.shape)] for box in flat_range_boxes(shape, *flat)]
    assert boxes == GOLDEN["examples (offsets,lengths)"][example]


@pytest.mark.parametrize(
    ("shape", "max_boxes"),
    [(_numbers(shape), bound["max_boxes"]) for shape, bound in GOLDEN["max_boxes"].items()] + [((7,), 1), ((), 1)],
)
def test_flat_range_exhaustive(shape, max_boxes):
    """Every range of every listed shape: disjoint, complete, in memory order, at most 2 ndim - 1 boxes."""
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    most = 0
    for start, stop in itertools.combinations(range(values.numel() + 1), 2):
        boxes = flat_range_boxes(shape, start, stop)
        parts = [values[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape))].reshape(-1) for b in boxes]
        assert torch.cat(parts).tolist() == list(range(start, stop))
        most = max(most, len(boxes))
    assert most == max_boxes <= max(1, 2 * len(shape) - 1)


def test_flat_range_empty_and_outside():
    assert flat_range_boxes((3, 4), 5, 5) == ()
    with pytest.raises(ValueError, match=r"\[5, 13\).*12 elements"):
        flat_range_boxes((3, 4), 5, 13)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_intersection_and_difference_against_sets(ndim):
    generator = random.Random(ndim)
    for _ in range(300):
        a, b = _random_box(generator, ndim), _random_box(generator, ndim)
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
        boxes = [_random_box(generator, 2) for _ in range(generator.randrange(8))]
        holes = uncovered(target, boxes)
        expected = _elements(target) - set().union(*map(_elements, boxes))
        assert sum(hole.volume for hole in holes) == len(expected)
        assert set().union(*map(_elements, holes)) == expected


def test_scalar():
    assert whole(()).volume == 1
    assert intersect(whole(()), whole(())) == whole(())
    assert uncovered(whole(()), [whole(())]) == ()
    assert uncovered(whole(()), []) == (whole(()),)
