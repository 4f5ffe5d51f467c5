"""The compiled decoding step against transformers' own, and its draws against exact distributions."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from megatron_dapo.engines import compiled_decoder, embedded
from megatron_dapo.engines.compiled_decoder import CompiledDecoder, _Decoder, library
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.engines.sampling import signed_seed, uniforms
from megatron_dapo.ops import native
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams
from tests.examples import examples

pytestmark = pytest.mark.skipif(library(8, torch.float32) is None, reason="there is no C compiler")

HEAD_DIMS = (4, 8, 20, 24)  # less than, equal to and no multiple of the eight lanes
SAMPLING = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 1.0, 0.7]),
    top_k=st.sampled_from([0, 0, 5]),
    stop_token_ids=st.sampled_from([(), (2,), (2, 5, 7)]),
)


@st.composite
def models(draw: st.DrawFn) -> torch.nn.Module:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    sizes = {
        "vocab_size": draw(st.sampled_from([60, 64, 130])),
        "hidden_size": draw(st.sampled_from([16, 24])),
        "intermediate_size": draw(st.sampled_from([20, 32])),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": 64,
    }
    torch.manual_seed(draw(st.integers(0, 99)))
    model = AutoModelForCausalLM.from_config(draw(st.sampled_from([Qwen2Config, Qwen3Config]))(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than the initialization; biases and norms that matter
            parameter.mul_(5.0).add_(0.1 * torch.randn_like(parameter))
    return model


def run(
    model: torch.nn.Module, requests: list[GenerationRequest], num_slots: int, compiled: bool
) -> dict[str, Completion]:
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(embedded, "compiled_for", lambda *unused: None)
        engine = EmbeddedEngine(model.config, EmbeddedEngineSettings(max_slots=num_slots, max_length=64))
    assert isinstance(engine._decoder, CompiledDecoder) == compiled
    source = dict(model.named_parameters())
    for name, tensor in engine.parameters_by_name().items():
        tensor.copy_(source[name].detach())
    engine.set_policy_version(0)
    engine.submit(requests)
    completions = {}
    while engine.num_unfinished:
        completions |= {done.request_id: done for done in engine.poll()}
    return completions


# Fixed examples: a number within rounding of the border between two tokens may give either.
@settings(max_examples=examples(40), derandomize=True)
@given(data=st.data())
def test_a_compiled_step_equals_transformers(data: st.DataObject) -> None:
    """Rows that join and leave, with separate and shared prompts, with any sampling parameters."""
    model = data.draw(models())
    prompts = data.draw(st.lists(st.lists(st.integers(8, 59), min_size=1, max_size=30), min_size=1, max_size=4))
    requests = [
        GenerationRequest(str(index), tuple(data.draw(st.sampled_from(prompts))), data.draw(SAMPLING), seed=index)
        for index in range(data.draw(st.integers(1, 12)))
    ]
    num_slots = data.draw(st.sampled_from([1, 3, 8]))
    expected, actual = (run(model, requests, num_slots, compiled) for compiled in (False, True))
    for request_id, completion in expected.items():
        assert actual[request_id].token_ids.tolist() == completion.token_ids.tolist()
        assert actual[request_id].finish_reason == completion.finish_reason
        assert actual[request_id].logprobs == pytest.approx(completion.logprobs, abs=1e-4)


def draw_once(
    logits: torch.Tensor, seeds: list[int], temperature: float, position: int = 5
) -> tuple[int, list[int], list[float]]:
    """decode.c's draw for rows of `logits` with a prompt of `position` tokens."""
    num_rows, vocabulary = logits.shape
    integers = torch.zeros(6, num_rows, dtype=torch.int64)
    integers[2], integers[3], integers[4] = 9, position, torch.tensor([signed_seed(seed) for seed in seeds])
    floats, masses = torch.full((num_rows,), temperature), torch.zeros(vocabulary)
    stops, done = torch.full((num_rows, 1), -1), torch.zeros(num_rows, dtype=torch.bool)
    tokens, logprobs = torch.zeros(num_rows, 3, dtype=torch.int64), torch.zeros(num_rows, 3)
    names = ("token", "column", "limit", "prefix_length", "seed")
    fields = _Decoder(
        vocabulary=vocabulary, stop_width=1, response_columns=3, temperature=floats.data_ptr(), stops=stops.data_ptr(),
        tokens=tokens.data_ptr(), logprobs=logprobs.data_ptr(), done=done.data_ptr(),
        **{name: row.data_ptr() for name, row in zip(names, integers)},
    )  # fmt: skip
    functions = library(8, torch.float32)
    assert functions is not None
    count = functions.draw(ctypes.byref(fields), logits.data_ptr(), masses.data_ptr(), num_rows)
    return count, tokens[:, 0].tolist(), logprobs[:, 0].tolist()


@settings(max_examples=examples(200))
@given(data=st.data())
def test_a_draw_inverts_the_distribution(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 63, 64, 65, 128, 300]))
    scale = data.draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(4, size, generator=generator) * scale
    logits[:, : data.draw(st.integers(0, size - 1))] = -math.inf
    seeds = data.draw(st.lists(st.integers(0, 2**70), min_size=4, max_size=4))
    temperature = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    count, tokens, logprobs = draw_once(logits, seeds, temperature)
    assert count == 0
    exact = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    numbers = uniforms(torch.tensor([signed_seed(seed) for seed in seeds]), torch.full((4,), 6)).tolist()
    for row, (token, logprob, number) in enumerate(zip(tokens, logprobs, numbers)):
        assert logprob == pytest.approx(float(exact[row, token]), rel=1e-5, abs=1e-5)
        if temperature == 0.0:
            assert token == int(logits[row].argmax())
            continue
        cumulative = exact[row].exp().cumsum(-1)
        before = float(cumulative[token - 1]) if token else 0.0
        assert logits[row, token] > -math.inf
        assert before - 1e-6 <= number <= float(cumulative[token]) + 1e-6


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 64, 99])
def test_logits_that_are_not_finite_are_found(value: float, place: int) -> None:
    logits = torch.zeros(3, 100)
    assert draw_once(logits, [0, 1, 2], 1.0)[0] == 0
    logits[1, place] = value
    assert draw_once(logits, [0, 1, 2], 1.0)[0] == -1


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}])  # fmt: skip
def test_layers_of_another_kind_take_the_general_step(change: dict[str, object]) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    built = [
        isinstance(
            EmbeddedEngine(Qwen2Config(**sizes, **heads, **more), EmbeddedEngineSettings())._decoder, CompiledDecoder
        )
        for more in ({}, change)
    ]
    assert built == [True, False]


def test_without_a_compiler_transformers_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert compiled_decoder.library.__wrapped__(8, torch.float32) is None
