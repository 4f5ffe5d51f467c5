from __future__ import annotations

import pytest
import torch

from megatron_dapo.quantization.formats import FORMATS, check_device, check_shapes, format_of
from megatron_dapo.quantization.stored import ALGORITHMS


def test_every_format_can_be_read_back() -> None:
    assert set(FORMATS) == set(ALGORITHMS)


def test_an_unknown_format_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown format 'fp7', choose one of fp8, fp8_blockwise, int4_awq, nvfp4"):
        format_of("fp7")


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


def test_a_format_that_needs_a_gpu_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="nvfp4.*kernels for cuda.*device is cpu"):
        check_device(FORMATS["nvfp4"], torch.device("cpu"))
    check_device(FORMATS["fp8"], torch.device("cpu"))
