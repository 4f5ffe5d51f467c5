"""The log-prob head by each implementation that runs here, over the same cases."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from lm_head_cases import exact, exact_outputs, make, relative_norm, run, run_in_shards, upstream_of
from packaging.version import Version

from megatron_dapo.ops.lm_head import chunked
from megatron_dapo.ops.lm_head.inputs import HeadInputs, Tiles, VocabShard, combine
from megatron_dapo.ops.lm_head.select import HeadSpec, choose, kernels_of
from megatron_dapo.ops.logprob import vocab_parallel_logprobs

TILES = {
    "reference": {},
    "chunked": {"chunk_tokens": 5, "chunk_columns": 8},
    "triton": {"chunk_tokens": 24, "chunk_columns": 40},
    "triton_tuned": {"chunk_tokens": 24, "chunk_columns": 40},
}
# Triton reads the variable when it is imported, which other tests of this process may have done before.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNNING = ["triton", "triton_tuned"] if IS_INTERPRETED else ["reference", "chunked"]


# Cases of the interpreter in `make test`: sums of shards, kept logits, those computed again, what is added to main_grad.
INTERPRETED = (
    "reduced_by_the_kernel or triton and not tuned and (shards_match_one and 37-2 or kept_logits_give and dtype1 and 37-129 "
    "or targets_in_every or awaits or no_token or added_to_main_grad and dtype1 or exceed_the_room)"
)


def interpreter_is_broken() -> bool:
    """NumPy 2.4 no longer makes a number of an array of one element, which Triton's interpreter did until 3.7."""
    versions = [Version(version(name)) for name in ("numpy", "triton") if find_spec(name) is not None]
    return len(versions) == 2 and versions[0] >= Version("2.4") and versions[1] < Version("3.7")


@pytest.fixture(params=RUNNING)
def settings(request: pytest.FixtureRequest) -> dict:
    """Small tiles if the implementation takes any, so that every case has several."""
    return {"implementation": request.param, **TILES[request.param]}


@pytest.mark.parametrize("vocab_size", [1, 2, 37])
def test_probabilities_are_at_most_one_and_sum_to_one(settings, vocab_size) -> None:
    hidden, weight, _ = make(3, vocab_size=vocab_size, scale=2.0)
    everything = torch.arange(vocab_size).repeat(3)
    logprobs, entropy = vocab_parallel_logprobs(
        hidden.repeat_interleave(vocab_size, 0), weight, everything, vocab_size=vocab_size, **settings
    )
    assert logprobs.max() <= 0.0 and entropy.min() >= 0.0
    torch.testing.assert_close(logprobs.view(3, -1).exp().sum(1), torch.ones(3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("vocab_size", "rows"), [(3, 3), (37, 48), (127, 128), (129, 256)])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_bf16_inputs_against_fp64(settings, vocab_size, rows, temperature) -> None:
    inputs = make(24, 64, vocab_size, rows, scale=0.125, dtype=torch.bfloat16)
    found = run(inputs, vocab_size=vocab_size, temperature=temperature, **settings)
    right = exact(inputs, vocab_size=vocab_size, temperature=temperature)
    assert (found.logprobs.double() - right.logprobs).abs().max() <= 2e-3
    assert (found.entropy.double() - right.entropy).abs().max() <= 2e-3
    assert relative_norm(found.to_hidden, right.to_hidden) <= 1e-2
    assert relative_norm(found.to_weight, right.to_weight) <= 1e-2
    assert found.to_hidden.dtype == found.to_weight.dtype == torch.bfloat16
    assert not found.to_weight[vocab_size:].any()


def test_targets_in_every_column_so_at_every_edge_of_a_tile(settings) -> None:
    hidden, weight, _ = make(37, vocab_size=37, rows=40)
    inputs = hidden, weight, torch.arange(37)
    for ours, right in zip(run(inputs, vocab_size=37, **settings).parts(), exact(inputs, vocab_size=37).parts()):
        torch.testing.assert_close(ours.double(), right.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token(settings, num_tokens) -> None:
    inputs = make(num_tokens)
    for ours, right in zip(run(inputs, vocab_size=37, **settings).parts(), exact(inputs, vocab_size=37).parts()):
        assert ours.shape == right.shape
        torch.testing.assert_close(ours.double(), right.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_logits_of_ten_thousand(settings, offset) -> None:
    weight = torch.full((20, 1), offset - 2e4)
    weight[[2, 9, 19], 0] = torch.tensor([offset, offset - 1.0, offset - 0.5])
    targets = torch.tensor([2, 9, 19, 0])
    inputs = torch.ones(4, 1), weight, targets
    found, right = run(inputs, vocab_size=20, **settings), exact(inputs, vocab_size=20)
    torch.testing.assert_close(found.logprobs.double(), right.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropy.double(), right.entropy, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.to_weight.double(), right.to_weight, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(found.to_hidden).all()


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("vocab_size", [37, 10])
def test_shards_match_one(settings, num_shards, vocab_size) -> None:
    if settings["implementation"] == "reference":
        pytest.skip("has no sums of its own; tests/distributed has it over real ranks")
    hidden, weight, _ = make(37, vocab_size=vocab_size, rows=40)
    edges = [t for k in range(num_shards) for t in (k * 40 // num_shards - 1, k * 40 // num_shards)]
    targets = torch.arange(37) % vocab_size
    targets[: len(edges)] = torch.tensor(edges).clamp(0, vocab_size - 1)
    inputs = hidden, weight, targets
    found = run_in_shards(
        inputs,
        vocab_size=vocab_size,
        implementation=settings["implementation"],
        num_shards=num_shards,
        temperature=0.8,
        tiles=Tiles(16, 7),
    )
    right = exact(inputs, vocab_size=vocab_size, temperature=0.8)
    for ours, oracle in zip(found.parts(), right.parts(), strict=True):
        torch.testing.assert_close(ours.double(), oracle, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_stay_visible_in_their_row_alone(settings, bad) -> None:
    hidden, weight, targets = make(6)
    clean = run((hidden, weight, targets), vocab_size=37, **settings)
    hidden[2, 3] = bad
    found = run((hidden, weight, targets), vocab_size=37, **settings)
    others = torch.arange(6) != 2
    for values, before in ((found.logprobs, clean.logprobs), (found.entropy, clean.entropy)):
        assert not torch.isfinite(values[2])
        torch.testing.assert_close(values[others], before[others], rtol=1e-6, atol=1e-6)
    assert not torch.isfinite(found.to_hidden[2]).any() and torch.isfinite(found.to_hidden[others]).all()
    assert not torch.isfinite(found.to_weight).all()


def test_forward_without_gradients_is_the_training_forward_bit_for_bit(settings) -> None:
    inputs = make(33, dtype=torch.bfloat16)
    with torch.no_grad():
        old = vocab_parallel_logprobs(*inputs, vocab_size=37, temperature=0.9, **settings)
    training = run(inputs, vocab_size=37, temperature=0.9, **settings)
    assert torch.equal(old[0], training.logprobs) and torch.equal(old[1], training.entropy)


# ---- logits kept for the backward pass


@pytest.fixture
def keeping(settings, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Settings with room for all logits; computing one of them again in the backward pass is an error."""
    if settings["implementation"] == "reference":
        pytest.skip("it has all logits anyway")
    kernels = kernels_of(settings["implementation"])
    gradients = kernels.gradients

    def without_products(*arguments):
        def fail(*_):
            raise AssertionError("logits were computed again")

        with monkeypatch.context() as patch:
            patch.setattr(chunked.TileLogits, "logits", fail)
            if IS_INTERPRETED:
                patch.setattr(importlib.import_module("megatron_dapo.ops.lm_head.fused"), "launch_gradients", fail)
            return gradients(*arguments)

    monkeypatch.setattr(kernels, "gradients", without_products)
    return {**settings, "keep_bytes": 1 << 30}


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "rows"), [(5, 3, 3), (200, 400, 512), (37, 129, 256), (0, 37, 37)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kept_logits_give_the_same_gradients(keeping, num_tokens, vocab_size, rows, dtype) -> None:
    inputs = make(num_tokens, 64, vocab_size, rows, scale=0.3, dtype=dtype)
    found = run(inputs, vocab_size=vocab_size, temperature=0.7, **keeping)
    right = exact(inputs, vocab_size=vocab_size, temperature=0.7)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative_norm(found.to_hidden, right.to_hidden) <= bound
    assert relative_norm(found.to_weight, right.to_weight) <= bound
    assert not found.to_weight[vocab_size:].any() and found.to_weight.dtype == dtype
    assert torch.equal(found.logprobs, run(inputs, vocab_size=vocab_size, temperature=0.7, **keeping).logprobs)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_rounding_of_kept_logits_is_lost_in_that_of_the_gradients(settings, scale) -> None:
    """Logits of up to 3, 30 and 300."""
    inputs = make(64, 64, 500, scale=scale, dtype=torch.bfloat16)
    right = exact(inputs, vocab_size=500)
    kept = run(inputs, vocab_size=500, keep_bytes=1 << 30, **settings)
    again = run(inputs, vocab_size=500, **settings)
    for name in ("to_hidden", "to_weight"):
        errors = [relative_norm(getattr(result, name), getattr(right, name)) for result in (kept, again)]
        assert errors[0] <= 1.1 * errors[1], (name, errors)


def test_logits_that_exceed_the_room_are_computed_again(settings, monkeypatch) -> None:
    if settings["implementation"] == "reference":
        pytest.skip("it has all logits anyway")
    inputs, kernels, asked = make(9), kernels_of(settings["implementation"]), []
    room, least = kernels.room, 9 * (37 * 4 + (4 if IS_INTERPRETED else 0))
    monkeypatch.setattr(kernels, "room", lambda *arguments: asked.append(room(*arguments)) or asked[-1])
    right = exact(inputs, vocab_size=37)
    for keep_bytes in (least - 1, least):
        found = run(inputs, vocab_size=37, keep_bytes=keep_bytes, **settings)
        torch.testing.assert_close(found.to_weight.double(), right.to_weight, rtol=2e-5, atol=2e-5)
    assert [kept is None for kept in asked] == [True, False]
    with torch.no_grad():  # nothing to keep them for
        vocab_parallel_logprobs(*inputs, vocab_size=37, keep_bytes=least, **settings)
    assert len(asked) == 2


def test_a_second_backward_pass_has_the_gradients_of_the_first(settings) -> None:
    inputs = make(21, vocab_size=75)
    hidden, weight = (tensor.requires_grad_() for tensor in inputs[:2])
    logprobs, _ = vocab_parallel_logprobs(hidden, weight, inputs[2], vocab_size=75, keep_bytes=1 << 20, **settings)
    first, second = (torch.autograd.grad(logprobs.sum(), (hidden, weight), retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# ---- gradients added to main_grad


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_is_added_to_main_grad(settings, dtype, keep_bytes) -> None:
    if settings["implementation"] == "reference":
        pytest.skip("autograd differentiates it")
    inputs = make(50, 64, 130, 256, scale=0.3, dtype=dtype)
    hidden, weight = inputs[0].requires_grad_(), torch.nn.Parameter(inputs[1])
    weight.main_grad, weight.grad_added_to_main_grad = torch.full((256, 64), 0.5), False
    for _ in range(2):  # micro-batches
        logprobs, entropy = vocab_parallel_logprobs(
            hidden, weight, inputs[2], vocab_size=130, keep_bytes=keep_bytes, adds_to_main_grad=True, **settings
        )
        upstream = upstream_of(50, hidden.device)
        (upstream[0] * logprobs + upstream[1] * entropy).sum().backward()
        # What a hook of data parallelism sees, and throws away.
        assert weight.grad is not None and weight.grad.shape == weight.shape and weight.grad_added_to_main_grad
        weight.grad = None
    right = exact((inputs[0].detach(), *inputs[1:]), vocab_size=130)
    found = (weight.main_grad - 0.5) / 2
    # In fp32 over both micro-batches, so not even the rounding of a 16-bit gradient is left.
    assert relative_norm(found, right.to_weight) <= (1e-5 if dtype == torch.float32 else 6e-3)
    assert not found[130:].any()
    assert relative_norm(hidden.grad / 2, right.to_hidden) <= (1e-5 if dtype == torch.float32 else 1e-2)


def test_the_gradient_of_an_embedding_with_the_same_weight_is_left_to_autograd(settings) -> None:
    if settings["implementation"] == "reference":
        pytest.skip("autograd differentiates it")
    _, weight, targets = make(9)
    weight = torch.nn.Parameter(weight)
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros_like(weight), False, True
    hidden = weight[targets]
    vocab_parallel_logprobs(hidden, weight, targets, vocab_size=37, adds_to_main_grad=True, **settings)[
        0
    ].sum().backward()
    oracle = weight.detach().double().requires_grad_()
    exact_outputs(oracle[targets], oracle, targets, 1.0, 37)[0].sum().backward()
    # As megatron-core's hook does it.
    torch.testing.assert_close((weight.main_grad + weight.grad).double(), oracle.grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("main_grad", [None, torch.zeros(37, 16, dtype=torch.bfloat16)])
def test_a_gradient_is_returned_where_no_fp32_one_awaits_it(settings, main_grad) -> None:
    hidden, weight, targets = make(9)
    weight = torch.nn.Parameter(weight)
    if main_grad is not None:
        weight.main_grad = main_grad
    outputs = vocab_parallel_logprobs(hidden, weight, targets, vocab_size=37, adds_to_main_grad=True, **settings)
    outputs[0].sum().backward()
    oracle = weight.detach().double().requires_grad_()
    exact_outputs(hidden, oracle, targets, 1.0, 37)[0].sum().backward()
    torch.testing.assert_close(weight.grad.double(), oracle.grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tiles", [(1, 1), (3, 61), (100, 7), (64, 16), (7, 60), (None, None)])
def test_chunked_does_not_depend_on_its_tiles(tiles) -> None:
    inputs = make(100, vocab_size=61)
    whole = run(inputs, vocab_size=61, temperature=0.9, chunk_tokens=100, chunk_columns=61)
    tiled = run(inputs, vocab_size=61, temperature=0.9, chunk_tokens=tiles[0], chunk_columns=tiles[1])
    for one, other in zip(whole.parts(), tiled.parts(), strict=True):
        assert (one - other).abs().max() <= 1e-6 * one.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("upstream", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_gradcheck_over_tiles_in_fp64(settings, upstream) -> None:
    if settings["implementation"] not in ("reference", "chunked"):
        pytest.skip("its sums are fp32")
    hidden, weight, targets = make(5, width=4, vocab_size=7, rows=9)
    tiles = {} if settings["implementation"] == "reference" else {"chunk_tokens": 2, "chunk_columns": 3}

    def weighted(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        outputs = vocab_parallel_logprobs(
            hidden, weight, targets, temperature=0.8, vocab_size=7, implementation=settings["implementation"], **tiles
        )
        return sum(factor * output for factor, output in zip(upstream, outputs, strict=True) if factor)

    assert torch.autograd.gradcheck(weighted, (hidden.double().requires_grad_(), weight.double().requires_grad_()))


def test_gradient_of_hidden_is_accumulated_in_fp32_over_64_tiles() -> None:
    inputs = make(16, 32, 64 * 8, scale=0.2, dtype=torch.bfloat16)
    right = exact(inputs, vocab_size=512).to_hidden
    found = run(inputs, vocab_size=512, implementation="chunked", chunk_columns=8).to_hidden
    # One rounding to bf16 at the end, at most 2^-8 of a value; fp32 sums show nothing next to it.
    assert ((found.double() - right).abs() <= 2**-8 * right.abs() + 1e-5).all()
    in_bf16 = _to_hidden_accumulated_in_bf16(inputs, 8)
    assert not ((in_bf16.double() - right).abs() <= 2**-8 * right.abs() + 1e-5).all(), "the bound sees no difference"


def _to_hidden_accumulated_in_bf16(inputs, columns: int) -> torch.Tensor:
    hidden, weight, targets = (tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
    logits = (hidden @ weight.T).requires_grad_()
    log_p = torch.log_softmax(logits, dim=1)
    upstream = torch.randn(2, hidden.size(0), generator=torch.Generator().manual_seed(1)).double()
    entropy = -(log_p.exp() * log_p).sum(1)
    (upstream[0] * log_p.gather(1, targets[:, None])[:, 0] + upstream[1] * entropy).sum().backward()
    total = torch.zeros_like(inputs[0])
    for start in range(0, weight.size(0), columns):
        part = slice(start, start + columns)
        total += (logits.grad[:, part] @ weight[part]).bfloat16()
    return total


def test_an_unknown_implementation_is_an_error_that_lists_them() -> None:
    with pytest.raises(
        ValueError, match=r"no implementation 'fast'; choose one of auto, reference, chunked, chunked_bf16, triton"
    ):
        choose("fast", HeadSpec(torch.device("cpu"), torch.float32, 16, 32))


def test_chunk_columns_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="chunk_columns 0 must be at least 1"):
        vocab_parallel_logprobs(*make(2), vocab_size=37, chunk_columns=0)


def test_the_oracle_of_the_cases_agrees_with_torch() -> None:
    hidden, weight, targets = make(9)
    logprobs, entropy = exact_outputs(hidden, weight, targets, 0.5, 37)
    distribution = torch.distributions.Categorical(logits=hidden.double() @ weight.double().T / 0.5)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets))
    torch.testing.assert_close(entropy, distribution.entropy())


@pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the process with the interpreter")
def test_tiles_of_another_product_are_reduced_by_the_kernel_as_by_torch() -> None:
    from megatron_dapo.ops.lm_head import fused

    hidden, weight, targets = make(21, vocab_size=75)
    inputs = HeadInputs(hidden, weight, targets, VocabShard(0, 75, 75, 0.7, None), Tiles(18, 40))
    source = chunked.TileLogits(inputs)
    source.accumulate = fused.accumulate
    by_kernel = combine(*chunked.sums(inputs, source=source), inputs.shard)
    by_torch = combine(*chunked.sums(inputs), inputs.shard)
    for one, other in zip(by_kernel, by_torch, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(IS_INTERPRETED, reason="this is the process with the interpreter")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(interpreter_is_broken(), reason="Triton below 3.7 has an interpreter that NumPy 2.4 breaks")
@pytest.mark.parametrize("chosen", [INTERPRETED, pytest.param("", marks=pytest.mark.long)], ids=["each path", "all"])
def test_triton_passes_the_same_cases_in_its_interpreter(chosen: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", __file__, "-k", chosen]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=400)
    assert finished.returncode == 0, finished.stdout[-6000:]
    assert re.search(r"^PASSED .*\[.*triton", finished.stdout, re.MULTILINE), finished.stdout
