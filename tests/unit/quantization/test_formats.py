from __future__ import annotations

import pytest

from megatron_dapo.quantization.formats import FORMATS, check_shapes
from megatron_dapo.quantization.stored import ALGORITHMS


def test_every_format_can_be_read_back() -> None:
    assert set(FORMATS) == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("name", "shape", "what"),
    [
        ("fp8_blockwise", (192, 128), "x has 192 rows, which is no multiple of 128"),
        ("fp8_blockwise", (128, 96), "x has 96 columns, which is no multiple of 128"),
        ("int4_awq", (128, 64), "x has 64 columns, which is no multiple of 128"),
        ("fp8", (24, 32), "x has 24 rows, which is no multiple of 16"),
    ],
)
def test_a_shape_that_does_not_fit_is_named_with_the_multiple(name: str, shape: tuple[int, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        check_shapes(FORMATS[name], {"fits": (256, 256), "x": shape})
