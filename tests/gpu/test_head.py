"""The log-prob head on a device, against fp64.

    pytest tests/gpu -m gpu -rs

One command; what is skipped is listed with its reason.
"""

from __future__ import annotations

import pytest
import torch
from fp8_bounds import logprob_error_bound
from lm_head_cases import exact, exact_outputs, make, relative_norm, run, run_in_shards

from megatron_dapo.ops.fp8 import quantize_hidden, quantize_weight
from megatron_dapo.ops.lm_head.inputs import Tiles
from megatron_dapo.ops.lm_head.select import HeadSpec, choose
from megatron_dapo.ops.logprob import vocab_parallel_logprobs
from megatron_dapo.rounding import GIB

pytestmark = pytest.mark.gpu

IMPLEMENTATIONS = ("reference", "chunked", "triton")
# tokens, width, true vocabulary, rows: one and no token, one off every block size, a width no block divides.
SHAPES = (
    (0, 64, 37, 37),
    (1, 64, 37, 37),
    (127, 96, 257, 384),
    (129, 100, 1009, 1024),
    (300, 896, 32003, 32128),
)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_bf16_against_fp64(available, device, name, shape, temperature) -> None:
    num_tokens, width, vocab_size, rows = shape
    scale = width**-0.5
    inputs = make(num_tokens, width, vocab_size, rows, scale=scale, dtype=torch.bfloat16, device=device)
    found = run(inputs, vocab_size=vocab_size, temperature=temperature, implementation=available(name))
    right = exact(inputs, vocab_size=vocab_size, temperature=temperature)
    if num_tokens:
        assert (found.logprobs.double() - right.logprobs).abs().max() <= 2e-3
        assert (found.entropy.double() - right.entropy).abs().max() <= 2e-3
        assert found.logprobs.max() <= 0 and found.entropy.min() >= 0
    assert relative_norm(found.to_hidden, right.to_hidden) <= 1e-2
    assert relative_norm(found.to_weight, right.to_weight) <= 1e-2
    assert not found.to_weight[vocab_size:].any()


@pytest.mark.parametrize("name", ["chunked", "triton", "te_fp8"])
@pytest.mark.parametrize("shape", [(0, 128, 40, 128), (129, 128, 1009, 1024), (300, 896, 32003, 32128)])
def test_kept_logits_give_the_gradients_of_those_computed_again(available, device, name, shape) -> None:
    num_tokens, width, vocab_size, rows = shape
    available(name, width=width, rows=rows)
    inputs = make(num_tokens, width, vocab_size, rows, scale=width**-0.5, dtype=torch.bfloat16, device=device)
    kept = run(inputs, vocab_size=vocab_size, implementation=name, temperature=0.7, keep_bytes=GIB)
    again = run(inputs, vocab_size=vocab_size, implementation=name, temperature=0.7)
    assert torch.equal(kept.logprobs, again.logprobs) and torch.equal(kept.entropy, again.entropy)
    assert relative_norm(kept.to_hidden, again.to_hidden) <= 3e-3
    assert relative_norm(kept.to_weight, again.to_weight) <= 3e-3


@pytest.mark.parametrize("keep_bytes", [0, GIB])
def test_tuned_blocks_compute_the_same(available, device, keep_bytes) -> None:
    """All candidates are compiled and measured, unless Triton's cache has the choice."""
    inputs = make(300, 512, 32003, 32128, scale=0.05, dtype=torch.bfloat16, device=device)
    name = available("triton_tuned", width=512, rows=32128)
    found = run(inputs, vocab_size=32003, implementation=name, keep_bytes=keep_bytes)
    right = exact(inputs, vocab_size=32003)
    assert (found.logprobs.double() - right.logprobs).abs().max() <= 2e-3
    assert relative_norm(found.to_hidden, right.to_hidden) <= 1e-2
    assert relative_norm(found.to_weight, right.to_weight) <= 1e-2


@pytest.mark.parametrize("tokens", [300, 9000])  # one tile of tokens, and more
@pytest.mark.parametrize("name", ["chunked", "triton", "te_fp8"])
def test_the_weights_gradient_is_added_to_main_grad(available, device, name, tokens) -> None:
    available(name, width=256, rows=1024)
    hidden, weight, targets = make(tokens, 256, 1000, 1024, scale=0.1, dtype=torch.bfloat16, device=device)
    parameter = torch.nn.Parameter(weight)
    parameter.main_grad = torch.full(weight.shape, 0.5, device=device)
    for _ in range(2):
        settings = {"vocab_size": 1000, "implementation": name, "adds_to_main_grad": True}
        vocab_parallel_logprobs(hidden, parameter, targets, **settings)[0].sum().backward()
        assert parameter.grad is not None and parameter.grad_added_to_main_grad
        parameter.grad = None
    leaf = weight.clone().requires_grad_()
    vocab_parallel_logprobs(hidden, leaf, targets, vocab_size=1000, implementation=name)[0].sum().backward()
    assert relative_norm((parameter.main_grad - 0.5) / 2, leaf.grad) <= 3e-3


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_targets_in_every_column(available, device, name) -> None:
    hidden, weight, _ = make(1030, 64, 1030, 1152, scale=0.125, dtype=torch.bfloat16, device=device)
    inputs = hidden, weight, torch.arange(1030, device=device)
    found, right = run(inputs, vocab_size=1030, implementation=available(name)), exact(inputs, vocab_size=1030)
    assert (found.logprobs.double() - right.logprobs).abs().max() <= 2e-3
    assert relative_norm(found.to_weight, right.to_weight) <= 1e-2


@pytest.mark.parametrize("name", ["chunked", "triton"])
@pytest.mark.parametrize("vocab_size", [1000, 300])
def test_four_shards_match_one(available, device, name, vocab_size) -> None:
    inputs = make(200, 128, vocab_size, 1024, scale=0.1, dtype=torch.bfloat16, device=device)
    found = run_in_shards(
        inputs, vocab_size=vocab_size, implementation=available(name), num_shards=4, tiles=Tiles(64, 128)
    )
    right = exact(inputs, vocab_size=vocab_size)
    assert (found.logprobs.double() - right.logprobs).abs().max() <= 2e-3
    assert relative_norm(found.to_hidden, right.to_hidden) <= 1e-2
    assert relative_norm(found.to_weight, right.to_weight) <= 1e-2


@pytest.mark.parametrize("name", ["chunked", "triton", "te_fp8"])
def test_no_race_thirty_runs_are_the_same_bit_for_bit(available, device, name) -> None:
    available(name, width=512, rows=5120)
    inputs = make(1000, 512, 5003, 5120, scale=0.05, dtype=torch.bfloat16, device=device)
    first = run(inputs, vocab_size=5003, implementation=name)
    for _ in range(30):
        again = run(inputs, vocab_size=5003, implementation=name)
        assert all(torch.equal(one, other) for one, other in zip(first.parts(), again.parts(), strict=True))


@pytest.mark.parametrize("name", ["chunked", "triton", "te_fp8"])
def test_another_stream_and_memory_full_of_nan_change_nothing(available, device, name) -> None:
    available(name, width=256, rows=1024)
    inputs = make(500, 256, 1000, 1024, scale=0.1, dtype=torch.bfloat16, device=device)
    first = run(inputs, vocab_size=1000, implementation=name)
    poison = [torch.full((size,), float("nan"), device=device) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24)]
    del poison  # the allocator hands these bytes out next
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = run(inputs, vocab_size=1000, implementation=name)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(one, other) for one, other in zip(first.parts(), again.parts(), strict=True))


@pytest.mark.parametrize("name", ["chunked", "triton", "te_fp8"])
def test_nothing_waits_for_the_device(available, device, name) -> None:
    available(name, width=256, rows=1024)
    inputs = make(500, 256, 1000, 1024, scale=0.1, dtype=torch.bfloat16, device=device)
    leaves = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    upstream = torch.ones(500, device=device)

    def step() -> None:
        outputs = vocab_parallel_logprobs(*leaves, inputs[2], vocab_size=1000, implementation=name)
        torch.autograd.backward(outputs, (upstream, upstream))

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("real_gpu")
@pytest.mark.parametrize("name", ["chunked", "triton", "te_fp8"])
def test_memory_is_far_from_the_logits(available, device, name) -> None:
    num_tokens, width, vocab_size = 8192, 1024, 131072
    available(name, width=width, rows=vocab_size)
    inputs = make(num_tokens, width, vocab_size, scale=0.03, dtype=torch.bfloat16, device=device)
    leaves = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = vocab_parallel_logprobs(*leaves, inputs[2], vocab_size=vocab_size, implementation=name)
    forward = torch.cuda.max_memory_allocated() - before
    logprobs.sum().backward()
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    whole = torch.cuda.max_memory_allocated() - before - gradients
    logits = num_tokens * vocab_size * 4
    assert forward < 0.1 * logits, f"{forward / GIB:.2f} GiB forward"
    assert whole < 0.2 * logits, f"{whole / GIB:.2f} GiB beyond the gradients"


def test_a_weight_of_more_than_two_to_the_31_elements(available, device) -> None:
    width, rows = 16384, 135168  # 2.2e9 elements
    available("triton", width=width, rows=rows)
    weight = torch.randn(rows, width, device=device, dtype=torch.bfloat16).mul_(0.01)
    hidden = torch.randn(64, width, device=device, dtype=torch.bfloat16)
    targets = torch.arange(rows - 64, rows, device=device)
    settings = {"vocab_size": rows, "implementation": "triton"}
    ours = vocab_parallel_logprobs(hidden.requires_grad_(), weight, targets, **settings)
    chunked = vocab_parallel_logprobs(hidden, weight, targets, vocab_size=rows, implementation="chunked")
    torch.testing.assert_close(ours[0], chunked[0], rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(ours[1], chunked[1], rtol=1e-3, atol=2e-3)
    (gradient,) = torch.autograd.grad(ours[0].sum(), hidden)
    (other,) = torch.autograd.grad(chunked[0].sum(), hidden)
    assert relative_norm(gradient, other) <= 1e-2


@pytest.mark.parametrize("name", ["chunked", "triton", "te_fp8"])
def test_a_target_outside_the_vocabulary_is_nan_only_in_its_row(real_gpu, available, device, name) -> None:
    available(name, width=128, rows=128)
    hidden, weight, targets = make(6, 128, 37, 128, dtype=torch.bfloat16, device=device)
    targets[2], targets[4] = -1, 37
    logprobs, entropy = vocab_parallel_logprobs(hidden, weight, targets, vocab_size=37, implementation=name)
    assert torch.isnan(logprobs).tolist() == [False, False, True, False, True, False]
    assert torch.isfinite(entropy).all()


@pytest.mark.parametrize("name", ["chunked", "triton", "te_fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_stay_visible_in_their_row_alone(available, device, name, bad) -> None:
    available(name, width=128, rows=128)
    hidden, weight, targets = make(6, 128, 37, 128, dtype=torch.bfloat16, device=device)
    hidden[2, 3] = bad
    found = run((hidden, weight, targets), vocab_size=37, implementation=name)
    others = torch.arange(6, device=device) != 2
    assert not torch.isfinite(found.logprobs[2]) and torch.isfinite(found.logprobs[others]).all()
    assert not torch.isfinite(found.to_hidden[2]).any() and torch.isfinite(found.to_hidden[others]).all()


def test_fp32_models_are_not_rounded_by_tensor_cores(available, device) -> None:
    inputs = make(100, 256, 1000, 1024, scale=0.1, device=device)
    found = run(inputs, vocab_size=1000, implementation=available("triton", torch.float32))
    right = exact(inputs, vocab_size=1000)
    assert (found.logprobs.double() - right.logprobs).abs().max() <= 2e-5
    assert relative_norm(found.to_hidden, right.to_hidden) <= 1e-5


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_fp8_is_within_its_bound_and_that_of_its_quantized_values(available, device, temperature) -> None:
    name = available("te_fp8", width=1024, rows=5120)
    inputs = make(300, 1024, 5003, 5120, scale=0.02, dtype=torch.bfloat16, device=device)
    found = run(inputs, vocab_size=5003, temperature=temperature, implementation=name)
    right, _ = exact_outputs(*inputs, temperature, 5003)
    bound = logprob_error_bound(*inputs, temperature=temperature, vocab_size=5003)
    assert ((found.logprobs.double() - right).abs() <= bound + 1e-3).all()
    quantized = quantize_hidden(inputs[0]).widened(), quantize_weight(inputs[1]).widened(), inputs[2]
    logprobs, entropy = exact_outputs(*quantized, temperature, 5003)
    # The same values as the emulation: only the order of sums and the 14 bits of FP8 accumulation differ.
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-3, atol=5e-3)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-3, atol=5e-3)


def test_transformer_engine_quantizes_as_the_emulation_does(device) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    from megatron_dapo.ops.lm_head.fp8_logits import TransformerEngine

    engine = TransformerEngine()
    values = torch.randn(256, 512, device=device).mul(torch.logspace(-6, 4, 256, device=device)[:, None]).bfloat16()
    values[7] = 0
    assert torch.equal(engine.hidden(values).dequantize().float(), quantize_hidden(values).widened())
    assert torch.equal(engine.weight(values).dequantize().float(), quantize_weight(values).widened())


def test_scaled_mm_and_the_emulation_multiply_the_same(real_gpu, device) -> None:
    from megatron_dapo.ops.lm_head import fp8_logits

    obstacle = fp8_logits._hardware_obstacle(torch.device(device)) or fp8_logits._scaled_mm_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    hidden, weight, _ = make(200, 640, 384, scale=0.1, dtype=torch.bfloat16, device=device)
    by_torch, emulated = fp8_logits.ScaledMatmul(), fp8_logits.Emulated()
    logits = by_torch.logits(by_torch.hidden(hidden), by_torch.weight(weight))[:200]
    torch.testing.assert_close(
        logits, emulated.logits(emulated.hidden(hidden), emulated.weight(weight)), rtol=1e-3, atol=5e-3
    )


def test_auto_takes_triton_here(device) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"compute capability {torch.cuda.get_device_capability()} is below 8.0")
    chosen = choose("auto", HeadSpec(torch.device(device), torch.bfloat16, 128, 128))
    assert chosen.name == "triton", chosen.reason
