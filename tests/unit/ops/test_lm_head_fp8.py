"""The head with FP8 logits: exact emulation, the bound on its error, and what it refuses."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from fp8_bounds import logit_error_bound, logprob_error_bound
from lm_head_cases import exact, exact_outputs, make, relative_norm, run, run_in_shards

from megatron_dapo.ops.fp8 import quantize_hidden, quantize_weight
from megatron_dapo.ops.lm_head import compat, fp8_logits
from megatron_dapo.ops.lm_head.inputs import Tiles
from megatron_dapo.ops.lm_head.select import HeadSpec, choose
from megatron_dapo.ops.logprob import vocab_parallel_logprobs

SETTINGS = {"implementation": "te_fp8", "chunk_tokens": 16, "chunk_columns": 100}


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(("width", "vocab_size", "rows"), [(128, 37, 128), (256, 300, 384)])
def test_logprobs_are_within_the_bound_and_exactly_those_of_the_quantized_values(
    temperature, width, vocab_size, rows
) -> None:
    inputs = make(40, width, vocab_size, rows, scale=0.1, dtype=torch.bfloat16)
    found = run(inputs, vocab_size=vocab_size, temperature=temperature, **SETTINGS)
    right, _ = exact_outputs(*inputs, temperature, vocab_size)
    bound = logprob_error_bound(*inputs, temperature=temperature, vocab_size=vocab_size)
    error = (found.logprobs.double() - right).abs()
    assert (error <= bound + 1e-5).all()
    assert error.max() > 1e-3, "nothing was rounded"
    quantized = quantize_hidden(inputs[0]).widened(), quantize_weight(inputs[1]).widened(), inputs[2]
    logprobs, entropy = exact_outputs(*quantized, temperature, vocab_size)
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)


def test_the_bound_holds_for_values_of_very_different_sizes_and_is_reached_to_a_few_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(16, 128, generator=generator) * 10.0 ** torch.randint(-6, 2, (16, 128), generator=generator)
    weight = torch.randn(128, 128, generator=generator) * 10.0 ** torch.randint(-6, 2, (128, 128), generator=generator)
    exact_logits = hidden.double() @ weight.double().T
    logits = quantize_hidden(hidden).widened().double() @ quantize_weight(weight).widened().double().T
    share = (logits - exact_logits).abs() / logit_error_bound(hidden, weight)
    assert 0.1 < share.max() <= 1.0


def test_gradients_are_of_the_fp8_probabilities_through_the_model_s_own_values() -> None:
    hidden, weight, targets = make(40, 128, 200, 256, scale=0.1)
    found = run((hidden, weight, targets), vocab_size=200, temperature=0.8, **SETTINGS)
    h, w = hidden.double(), weight.double()
    logits = quantize_hidden(hidden).widened().double() @ quantize_weight(weight).widened().double().T
    logits = (logits[:, :200] / 0.8).requires_grad_()
    log_p = torch.log_softmax(logits, 1)
    upstream = torch.randn(2, 40, generator=torch.Generator().manual_seed(1)).double()
    (
        upstream[0] * log_p.gather(1, targets[:, None])[:, 0] - upstream[1] * (log_p.exp() * log_p).sum(1)
    ).sum().backward()
    assert relative_norm(found.to_hidden, logits.grad @ w[:200] / 0.8) < 1e-5
    assert relative_norm(found.to_weight[:200], logits.grad.T @ h / 0.8) < 1e-5
    assert not found.to_weight[200:].any()
    exact_gradients = exact((hidden, weight, targets), vocab_size=200, temperature=0.8)
    assert relative_norm(found.to_hidden, exact_gradients.to_hidden) < 0.1


def test_tiles_and_shards_change_nothing() -> None:
    inputs = make(40, 128, 300, 512, scale=0.1)
    whole = run(inputs, vocab_size=300, implementation="te_fp8")
    tiled = run(inputs, vocab_size=300, **SETTINGS)
    shards = run_in_shards(inputs, vocab_size=300, implementation="te_fp8", num_shards=4, tiles=Tiles(7, 50))
    for one, other, third in zip(whole.parts(), tiled.parts(), shards.parts(), strict=True):
        assert (one - other).abs().max() <= 1e-6 * one.abs().max().clamp(min=1.0)
        torch.testing.assert_close(one.double(), third.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_no_token_and_one_token(num_tokens) -> None:
    found = run(make(num_tokens, 128, 37, 128), vocab_size=37, implementation="te_fp8")
    assert found.logprobs.shape == (num_tokens,) and torch.isfinite(found.to_weight).all()
    assert (found.logprobs <= 0).all()


def test_probabilities_sum_to_one() -> None:
    hidden, weight, _ = make(3, 128, 37, 128)
    logprobs, _ = vocab_parallel_logprobs(
        hidden.repeat_interleave(37, 0), weight, torch.arange(37).repeat(3), vocab_size=37, implementation="te_fp8"
    )
    assert logprobs.max() <= 0.0
    torch.testing.assert_close(logprobs.view(3, 37).exp().sum(1), torch.ones(3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_stay_visible_in_their_row_alone(bad) -> None:
    hidden, weight, targets = make(6, 128, 37, 128)
    hidden[2, 3] = bad
    found = run((hidden, weight, targets), vocab_size=37, implementation="te_fp8")
    others = torch.arange(6) != 2
    assert not torch.isfinite(found.logprobs[2]) and torch.isfinite(found.logprobs[others]).all()
    assert not torch.isfinite(found.to_hidden[2]).any() and torch.isfinite(found.to_hidden[others]).all()


@pytest.mark.parametrize(
    ("width", "rows", "message"),
    [
        (192, 128, r"the hidden size, 192, must be a multiple of 128"),
        (128, 200, r"this rank's rows of the output matrix, 200, must be a multiple of 128"),
    ],
)
def test_shapes_without_whole_blocks_are_errors(width, rows, message) -> None:
    hidden, weight, targets = make(4, width, 37, rows)
    with pytest.raises(ValueError, match=f"te_fp8 cannot run here: {message}"):
        vocab_parallel_logprobs(hidden, weight, targets, vocab_size=37, implementation="te_fp8")


DEVICE = HeadSpec(torch.device("cuda", 0), torch.bfloat16, 256, 256)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch):
    """A device as torch and the import system would describe it."""

    def describe(capability: tuple[int, int], cuda: str = "13.0", engine: object = None) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = None if engine is None else ModuleSpec("transformer_engine", None)
        monkeypatch.setattr(fp8_logits, "find_spec", lambda name: found)
        monkeypatch.setattr(compat, "importlib", SimpleNamespace(import_module=lambda name: load(engine)))

    return describe


def load(engine: object) -> object:
    if isinstance(engine, Exception):
        raise engine
    return engine


def engine_that_says(available: bool, reason: str) -> object:
    return SimpleNamespace(is_fp8_block_scaling_available=lambda return_reason: (available, reason))


def test_the_products_are_transformer_engine_s_where_it_is_installed(device) -> None:
    device((9, 0), engine=engine_that_says(True, ""))
    assert choose("te_fp8", DEVICE).reason == "requested; its products by Transformer Engine"


def test_the_products_are_torch_s_where_it_is_not(device) -> None:
    device((9, 0))
    assert choose("te_fp8", DEVICE).reason == "requested; its products by torch scaled_mm"


@pytest.mark.parametrize(
    ("capability", "cuda", "engine", "message"),
    [
        ((8, 9), "13.0", None, "compute capability 8.9 is below 9.0"),
        ((8, 0), "13.0", engine_that_says(True, ""), "compute capability 8.0 is below 9.0"),
        ((9, 0), "12.8", None, "built with CUDA 12.8, below 12.9"),
        ((9, 0), "12.8", engine_that_says(False, "needs CUDA >= 12.9"), "Transformer Engine says: needs CUDA >= 12.9"),
        (
            (9, 0),
            "13.0",
            OSError("libcudnn.so.9: cannot open shared object file"),
            "installed and does not work: OSError: libcudnn.so.9",
        ),
    ],
)
def test_a_product_that_cannot_run_is_an_error_with_the_reason(device, capability, cuda, engine, message) -> None:
    device(capability, cuda, engine)
    with pytest.raises(ValueError, match=f"te_fp8 cannot run here: .*{message}"):
        choose("te_fp8", DEVICE)
