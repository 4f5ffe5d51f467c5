"""The attention trial against torch in float64, and that it sees what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_dapo.doctor import probes
from megatron_dapo.doctor.recipe import ATTENTION_TOLERANCE

LENGTHS = probes.PACKINGS["ragged sequences"]
SHAPE = (16, 6, 2)


def oracle(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = True) -> torch.Tensor:
    parts = []
    for q, k, v in zip(*(part.split(LENGTHS) for part in (query, key, value)), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        parts.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)


def test_the_reference_is_attention() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(sum(LENGTHS), heads, 16) for heads in (6, 2, 2)]
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    torch.testing.assert_close(probes.written_out_attention(*inputs, LENGTHS), oracle(*inputs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_own_attention_passes(dtype: str) -> None:
    results = probes.attention_results(16, 6, 2, dtype)
    default = [result for result in results if result["back_end"] == "default"]
    assert [result["packing"] for result in default] == list(probes.PACKINGS)
    assert all(result["error"] <= ATTENTION_TOLERANCE[dtype] / 3 for result in default)
    assert {"flash_attention", "math"} <= {result["back_end"] for result in results}


def tried(attend: Any) -> dict[str, Any]:
    return probes._try_attention(attend, LENGTHS, SHAPE, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v, bounds: oracle(q, k, v, is_causal=False),
        lambda q, k, v, bounds: oracle(q, k.flip(1), v),  # heads in another order
        lambda q, k, v, bounds: oracle(q, k, v) + 0 * q.sum() + 0.05 * oracle(q, k, v).roll(1, 0),
    ],
)
def test_wrong_attention_is_seen(attend: Any) -> None:
    assert tried(attend)["error"] > ATTENTION_TOLERANCE["bfloat16"]


def test_attention_that_fails_says_why() -> None:
    def fail(*inputs: Any) -> Any:
        raise NotImplementedError("no kernel for head_dim 16\nmore")

    assert tried(fail) == {"failure": "NotImplementedError: no kernel for head_dim 16"}
    assert tried(lambda q, k, v, bounds: oracle(q, k, v) / 0) == {"failure": "not a finite result"}


def test_a_transformer_engine_that_cannot_tell() -> None:
    class Engine:
        @staticmethod
        def is_fp8_available(return_reason: bool) -> tuple[bool, str]:
            return False, "Device compute capability 8.9 or higher required for FP8 execution."

    assert probes._support(Engine, "is_fp8_available")[1].startswith("Device compute capability")
    assert probes._support(Engine, "is_other") == [False, "this version has no is_other"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="answers of a CPU")
def test_the_trainer_s_rule_says_what_multiplies() -> None:
    asked = {
        "recipe": "fp8_blockwise",
        "num_layers_at_start_in_bf16": 0,
        "num_layers_at_end_in_bf16": 0,
        "fp8_param": False,
    }
    assert probes.precision_answer("bfloat16", asked)["name"] == "emulation in fp32"
    problem = probes.precision_answer("bfloat16", {**asked, "recipe": "fp8_delayed"})["problem"]
    assert "fp8_delayed cannot run here: there is no CUDA device" in problem
    assert "model in bfloat16" in probes.precision_answer("float32", {**asked, "recipe": "bf16"})["problem"]


def test_the_table_is_of_the_requested_head() -> None:
    rows = {row["op"]: row["name"] for row in probes.implementation_table(None, "float32", {}, "reference")}
    assert rows["log-prob head"] == "own reference" and rows["precision"] == "fp32"
    # The decoder that stands in for a model that is missing suits every recipe of precision.
    rows = {
        row["op"]: row["name"]
        for row in probes.implementation_table(None, "bfloat16", {"recipe": "fp8_blockwise"}, "te_fp8")
    }
    assert "fp8" in rows["precision"] and "fp8" in rows["log-prob head"].lower(), rows
