"""The embedded engine against transformers' own forward pass and generation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from megatron_dapo.engines import embedded
from megatron_dapo.engines.base import PrefixReuse
from megatron_dapo.engines.embedded import EmbeddedEngine, EmbeddedEngineSettings
from megatron_dapo.engines.prefill import Prefill
from megatron_dapo.models.parts.experts import EXPERT_BIAS
from megatron_dapo.proof.oracle import stored_tensors
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams, VersionRange, num_distinct

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen2 tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2 untied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3 moe": lambda: Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    ),
    "llama3 rope": lambda: LlamaConfig(
        **{**SIZES, "num_key_value_heads": 4},
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, **GEMMA3),
    "qwen3.5": lambda: Qwen3_5TextConfig(**{**SIZES, **DELTA}, tie_word_embeddings=True),
    "qwen3 next": lambda: Qwen3NextConfig(**{**SIZES, **DELTA}, **EXPERTS, tie_word_embeddings=False),
    "deepseek": lambda: DeepseekV3Config(**{**SIZES, **DEEPSEEK}),
    "gpt oss": lambda: GptOssConfig(**SIZES, **GPT_OSS),
}
DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
}
CACHES = ["qwen2 tied", "qwen3.5"]  # keys and values only, and states
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
}
DEEPSEEK = {  # values have fewer dims than keys
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
GPT_OSS = {
    "head_dim": 16,
    "sliding_window": 7,  # shorter and longer than prompts and responses
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 7,  # shorter and longer than prompts and responses
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}


def reference_model(name: str = "qwen2 tied", seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than the default initialization, so that logits matter
            if parameter.dim() > 1:
                parameter.mul_(5.0)
        for bias in router_biases(model).values():
            bias.copy_(0.3 * torch.randn(bias.shape))
    return model


def router_biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(EXPERT_BIAS)}


def load(engine: EmbeddedEngine, model: torch.nn.Module) -> None:
    source = stored_tensors({**dict(model.named_parameters()), **router_biases(model)})
    destination = engine.parameters_by_name()
    assert set(source) == set(destination)
    for name, tensor in destination.items():
        tensor.copy_(source[name].detach())


def make_engine(model: torch.nn.Module, **sizes: int) -> EmbeddedEngine:
    engine = EmbeddedEngine(model.config, EmbeddedEngineSettings(**{"max_slots": 8, "max_length": 96, **sizes}))
    load(engine, model)
    engine.set_policy_version(0)
    return engine


def make_requests(num_groups: int, group_size: int = 4, seed: int = 0, **sampling: object) -> list[GenerationRequest]:
    rng = random.Random(seed)
    requests = []
    for group in range(num_groups):
        prompt = tuple(rng.randrange(3, 61) for _ in range(rng.randint(1, 30)))
        for index in range(group_size):
            params = SamplingParams(**{"max_new_tokens": rng.randint(1, 50), "stop_token_ids": (2, 5), **sampling})
            requests.append(GenerationRequest(f"{group}/{index}", prompt, params, seed=1000 * group + index))
    return requests


def drain(engine: EmbeddedEngine) -> dict[str, Completion]:
    completions: dict[str, Completion] = {}
    while engine.num_unfinished:
        for completion in engine.poll():
            assert completion.request_id not in completions
            completions[completion.request_id] = completion
    return completions


def check_against_forward(model: torch.nn.Module, request: GenerationRequest, completion: Completion) -> None:
    """Log-probs, stop and length rules of one completion, recomputed from a full forward pass without any cache."""
    start, response = len(request.prompt_ids), completion.token_ids
    tokens = torch.tensor([[*request.prompt_ids, *response]])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, start - 1 : -1].double()
    temperature = request.sampling.temperature or 1.0
    expected = (logits / temperature).log_softmax(-1).gather(-1, tokens[0, start:, None]).squeeze(-1)
    assert torch.allclose(torch.tensor(completion.logprobs).double(), expected, atol=2e-4, rtol=1e-4)
    stops = request.sampling.stop_token_ids
    assert not set(response[:-1]) & set(stops)
    if completion.finish_reason == "stop":
        assert response[-1] in stops
    else:
        assert completion.finish_reason == "length" and len(response) == request.sampling.max_new_tokens
        assert response[-1] not in stops


@pytest.fixture(params=["compiled", "transformers"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines decode by the compiled step, as far as it knows the model, or by transformers."""
    if request.param == "transformers":
        monkeypatch.setattr(embedded, "compiled_for", lambda *unused: None)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_equal_a_full_forward_pass(name: str) -> None:
    model = reference_model(name)
    engine = make_engine(model)
    requests = make_requests(6) + [
        replace(r, request_id="t" + r.request_id) for r in make_requests(2, seed=1, temperature=0.7)
    ]
    engine.submit(requests)
    completions = drain(engine)
    assert set(completions) == {request.request_id for request in requests}
    assert {completion.finish_reason for completion in completions.values()} == {"stop", "length"}
    for request in requests:
        check_against_forward(model, request, completions[request.request_id])
        assert completions[request.request_id].versions == (
            VersionRange(0, len(completions[request.request_id].token_ids), 0),
        )


def test_greedy_equals_generate() -> None:
    model = reference_model()
    engine = make_engine(model)
    requests = make_requests(6, group_size=1, temperature=0.0, max_new_tokens=24, stop_token_ids=(2,))
    engine.submit(requests)
    completions = drain(engine)
    for request in requests:
        with torch.no_grad():
            tokens = model.generate(
                torch.tensor([request.prompt_ids]), do_sample=False, max_new_tokens=24, eos_token_id=2, pad_token_id=0
            )
        assert completions[request.request_id].token_ids.tolist() == tokens[0, len(request.prompt_ids) :].tolist()


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("num_slots", [1, 3, 64])
@pytest.mark.parametrize("name", CACHES)
def test_a_sample_depends_on_its_seed_not_on_its_batch(name: str, num_slots: int) -> None:
    model = reference_model(name)
    requests = make_requests(5)
    expected = make_engine(model)
    expected.submit(requests)
    alone = drain(expected)
    engine = make_engine(model, max_slots=num_slots, prefill_tokens=16)
    shuffled = random.Random(num_slots).sample(requests, len(requests))
    engine.submit(shuffled[:7])
    actual = {completion.request_id: completion for completion in engine.advance(3)}
    engine.submit(shuffled[7:])
    actual |= drain(engine)
    for request_id, completion in alone.items():
        assert actual[request_id].token_ids.tolist() == completion.token_ids.tolist()
        assert actual[request_id].logprobs == pytest.approx(completion.logprobs, abs=1e-4)


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("name", CACHES)
def test_engines_that_share_weights_generate_by_what_was_loaded_last(name: str) -> None:
    models = [reference_model(name, seed) for seed in (0, 1)]
    first = make_engine(models[0])
    second = EmbeddedEngine(models[0].config, EmbeddedEngineSettings(max_slots=3, max_length=96), lender=first)
    for own, other in zip(first.parameters_by_name().values(), second.parameters_by_name().values(), strict=True):
        assert own.data_ptr() == other.data_ptr()
    for version, (model, engine, num_slots) in enumerate([(models[1], second, 3), (models[0], first, 8), (models[1], second, 3)]):
        load(first, model)
        engine.set_policy_version(version)
        separate = make_engine(model, max_slots=num_slots)
        for each in (engine, separate):
            each.submit(make_requests(3, seed=version))
        wanted = {key: replace(one, versions=(replace(one.versions[0], version=version),)) for key, one in drain(separate).items()}
        assert drain(engine) == wanted


@pytest.mark.usefixtures("decoder")
def test_equal_submissions_give_equal_streams() -> None:
    model = reference_model()
    streams = []
    for _ in range(2):
        engine = make_engine(model)
        engine.submit(make_requests(5))
        stream = []
        while engine.num_unfinished:
            stream.extend(engine.poll())
        streams.append(stream)
    assert streams[0] == streams[1]


def test_group_members_differ_and_share_one_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference_model()
    engine = make_engine(model, max_slots=4)
    prefilled = []
    original = Prefill._compute
    monkeypatch.setattr(Prefill, "_compute", lambda self, rows: (prefilled.extend(rows), original(self, rows))[1])
    prompt = tuple(range(10, 30))
    sampling = SamplingParams(max_new_tokens=12)
    engine.submit([GenerationRequest(str(i), prompt, sampling, seed=i) for i in range(10)])
    completions = drain(engine)
    # 10 rows over 4 slots: the second wave finds rows of the first one gone, so it may prefill again, but never once a
    # row.
    assert len(prefilled) <= 3
    assert num_distinct(completions.values()) == 10
    for index in range(10):
        check_against_forward(
            model, GenerationRequest(str(index), prompt, sampling, seed=index), completions[str(index)]
        )


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("name", CACHES)
def test_a_weight_update_in_the_middle_gives_two_version_ranges(name: str) -> None:
    old, new = reference_model(name, seed=0), reference_model(name, seed=1)
    engine = make_engine(old)
    prompt = tuple(range(10, 20))
    request = GenerationRequest("a", prompt, SamplingParams(max_new_tokens=12), seed=3)
    engine.submit([request])
    assert engine.advance(5) == []
    load(engine, new)
    engine.set_policy_version(7)
    late = GenerationRequest("b", prompt, SamplingParams(max_new_tokens=12), seed=3)
    engine.submit([late])
    completions = drain(engine)
    assert completions["a"].versions == (VersionRange(0, 5, 0), VersionRange(5, 12, 7))
    before = make_engine(old)
    before.submit([request])
    assert completions["a"].token_ids[:5].tolist() == drain(before)["a"].token_ids[:5].tolist()
    # A later request with the same prompt must not inherit keys and values of the old weights.
    assert completions["b"].versions == (VersionRange(0, 12, 7),)
    check_against_forward(new, late, completions["b"])


@pytest.mark.parametrize("name", CACHES)
def test_abort_returns_partials_and_a_resumed_prefix_continues_the_same_sample(name: str) -> None:
    model = reference_model(name)
    requests = [replace(r, sampling=SamplingParams(max_new_tokens=40)) for r in make_requests(4, group_size=3)]
    whole = make_engine(model)
    whole.submit(requests)
    expected = drain(whole)
    engine = make_engine(model)
    engine.submit(requests)
    engine.advance(11)
    partials = {completion.request_id: completion for completion in engine.abort()}
    assert engine.num_unfinished == 0 and engine.poll() == []
    assert set(partials) == set(expected)
    assert sorted({len(p.token_ids) for p in partials.values()}) == [0, 11]
    resumed = []
    for request in requests:
        part = partials[request.request_id]
        assert part.finish_reason == "abort" and part.is_truncated
        assert part.token_ids.tolist() == expected[request.request_id].token_ids[: len(part.token_ids)].tolist()
        assert len(part.logprobs) == len(part.token_ids) == sum(r.end - r.start for r in part.versions)
        rest = SamplingParams(max_new_tokens=40 - len(part.token_ids))
        resumed.append(replace(request, prompt_ids=(*request.prompt_ids, *part.token_ids.tolist()), sampling=rest))
    engine.submit(resumed)
    for request_id, completion in drain(engine).items():
        joined = [*partials[request_id].token_ids, *completion.token_ids]
        assert joined == expected[request_id].token_ids.tolist()


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("num_slots", [3, 64])
@pytest.mark.parametrize("name", CACHES)
def test_a_response_continued_twice_equals_the_uninterrupted_one(name: str, num_slots: int) -> None:
    """Prefixes of several lengths, in batches with others, with stop ids: token by token."""
    model = reference_model(name)
    requests = [replace(r, sampling=replace(r.sampling, max_new_tokens=40)) for r in make_requests(4, group_size=3)]
    whole = make_engine(model)
    whole.submit(requests)
    expected = drain(whole)
    engine = make_engine(model, max_slots=num_slots)
    completions: dict[str, Completion] = {}
    unfinished = requests
    for version, num_ticks in enumerate((7, 12)):
        engine.set_policy_version(version)
        engine.submit(unfinished)
        completions |= {done.request_id: done for done in engine.advance(num_ticks)}
        partial = {done.request_id: done for done in engine.abort()}
        assert set(partial) | set(completions) == set(expected)
        unfinished = [replace(r, prefix=partial[r.request_id]) for r in reversed(unfinished) if r.request_id in partial]
    engine.set_policy_version(5)
    engine.submit(unfinished)
    completions |= drain(engine)
    for request in requests:
        done, alone = completions[request.request_id], expected[request.request_id]
        assert (done.token_ids.tolist(), done.finish_reason) == (alone.token_ids.tolist(), alone.finish_reason)
        assert done.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert [v.start for v in done.versions] == [0, *(v.end for v in done.versions[:-1])]
        assert done.versions[-1].end == len(done.token_ids)
    assert max(len(done.versions) for done in completions.values()) == (3 if num_slots == 64 else 2)


def test_a_continued_response_computes_its_context_anew() -> None:
    """Two of a group continue, one of them twice from the same prefix: only that one finds its context cached."""
    engine = make_engine(reference_model())
    assert engine.prefix_reuse == PrefixReuse()
    sampling = SamplingParams(max_new_tokens=12)
    prefixes = {name: aborted_after(name, ids) for name, ids in {"a": (4, 5), "b": (4, 6, 7), "c": (4, 6, 7)}.items()}
    requests = [GenerationRequest(name, (7, 8), sampling, 0, prefix) for name, prefix in prefixes.items()]
    engine.submit([*requests, GenerationRequest("d", (7, 8), sampling, 0)])
    while engine.num_unfinished:
        engine.poll()
    assert engine.prefix_reuse == PrefixReuse(num_tokens=4 + 5 + 5, num_cached=4)
    engine.submit(requests[:1])
    engine.poll()
    assert engine.prefix_reuse == PrefixReuse(num_tokens=18, num_cached=4)


def test_a_complete_prefix_is_returned_unchanged() -> None:
    engine = make_engine(reference_model())
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=(9,))
    cases = {"stop": (4, 9), "length": (4, 5, 6)}
    requests = [
        GenerationRequest(reason, (7, 8), sampling, seed=0, prefix=aborted_after(reason, ids))
        for reason, ids in cases.items()
    ]
    engine.submit(requests)
    assert engine.num_unfinished == 2
    completions = engine.poll()
    assert {done.finish_reason: tuple(done.token_ids) for done in completions} == cases
    assert engine.num_unfinished == 0
    engine.submit(requests)
    assert {done.finish_reason: tuple(done.token_ids) for done in engine.abort()} == cases


def test_an_aborted_request_that_never_ran_keeps_its_prefix() -> None:
    engine = make_engine(reference_model())
    prefix = aborted_after("a", (4, 5))
    engine.submit([GenerationRequest("a", (7, 8), SamplingParams(max_new_tokens=9), seed=0, prefix=prefix)])
    assert engine.abort() == [prefix]


def aborted_after(request_id: str, token_ids: tuple[int, ...]) -> Completion:
    num_tokens = len(token_ids)
    return Completion(request_id, token_ids, (-1.0,) * num_tokens, "abort", (VersionRange(0, num_tokens, 0),))


def test_prefixes_that_cannot_be_continued_are_refused() -> None:
    engine = make_engine(reference_model())
    good = GenerationRequest("a", (3, 4), SamplingParams(max_new_tokens=4, stop_token_ids=(9,)), seed=0)
    prefix = aborted_after("a", (5, 6))
    cases = {
        "completion of 'b'": aborted_after("b", (5, 6)),
        "prefix of 5 tokens, but max_new_tokens = 4": aborted_after("a", (5,) * 5),
        "1 log-probs for 2 tokens": replace(prefix, logprobs=(-1.0,)),
        "do not cover its 2 tokens": replace(prefix, versions=(VersionRange(0, 1, 0),)),
        "prefix ids span 5..61": aborted_after("a", (5, 61)),
        "after the stop ids .9.": aborted_after("a", (9, 5)),
    }
    for message, broken in cases.items():
        with pytest.raises(ValueError, match=message):
            engine.submit([replace(good, prefix=broken)])
    assert engine.num_unfinished == 0


@pytest.mark.usefixtures("decoder")
def test_stop_ids_of_different_width_and_a_stop_at_the_limit() -> None:
    model = reference_model()
    engine = make_engine(model)
    free = SamplingParams(max_new_tokens=20)
    engine.submit([GenerationRequest("free", (7, 8, 9), free, seed=11)])
    response = drain(engine)["free"].token_ids.tolist()
    third = response[2]
    engine.submit(
        [
            GenerationRequest(
                "many", (7, 8, 9), SamplingParams(max_new_tokens=20, stop_token_ids=(100000, third, 3)), seed=11
            ),
            GenerationRequest("none", (7, 8, 9), free, seed=11),
            GenerationRequest(
                "edge", (7, 8, 9), SamplingParams(max_new_tokens=len(response[:3]), stop_token_ids=(third,)), seed=11
            ),
        ]
    )
    completions = drain(engine)
    cut = response.index(third) + 1
    assert completions["many"].token_ids.tolist() == response[:cut] and completions["many"].finish_reason == "stop"
    assert completions["none"].token_ids.tolist() == response and completions["none"].finish_reason == "length"
    assert completions["edge"].finish_reason == "stop"


def test_nothing_is_generated_before_a_complete_synchronization() -> None:
    model = reference_model()
    engine = EmbeddedEngine(model.config, EmbeddedEngineSettings(max_slots=2, max_length=32))
    assert engine.policy_version == -1
    engine.submit([GenerationRequest("a", (4, 5), SamplingParams(max_new_tokens=4), seed=0)])
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.poll()
    source = dict(model.named_parameters())
    forgotten = "model.layers.1.mlp.up_proj.weight"
    for name, tensor in engine.parameters_by_name().items():
        if name != forgotten:
            tensor.copy_(source[name].detach())
    with pytest.raises(ValueError, match=forgotten):
        engine.set_policy_version(0)
    load(engine, model)
    engine.set_policy_version(0)
    assert len(drain(engine)["a"].token_ids) == 4


def test_tied_head_follows_the_embedding() -> None:
    tied, untied = make_engine(reference_model("qwen2 tied")), make_engine(reference_model("qwen2 untied"))
    assert "lm_head.weight" not in tied.parameters_by_name()
    assert "lm_head.weight" in untied.parameters_by_name()


def test_requests_that_cannot_be_served_are_refused_before_any_is_queued() -> None:
    engine = make_engine(reference_model())
    good = GenerationRequest("good", (3, 4), SamplingParams(max_new_tokens=4), seed=0)
    cases = {
        "80 prompt tokens \\+ 20 new tokens = 100, more than the engine's max_length 96": replace(
            good, prompt_ids=(3,) * 80, sampling=SamplingParams(max_new_tokens=20)
        ),
        "no tokens": replace(good, prompt_ids=()),
        "vocabulary is 0..60": replace(good, prompt_ids=(3, 61)),
        "max_new_tokens = 0": replace(good, sampling=SamplingParams(max_new_tokens=0)),
        "top_p 0": replace(good, sampling=SamplingParams(top_p=0.0, max_new_tokens=4)),
    }
    for message, request in cases.items():
        with pytest.raises(ValueError, match=message):
            engine.submit([good, replace(request, request_id="bad")])
    with pytest.raises(ValueError, match="already in use"):
        engine.submit([good, good])
    assert engine.num_unfinished == 0


def test_a_vision_tower_takes_no_part() -> None:
    config = Gemma3Config(text_config={**SIZES, **GEMMA3}, vision_config={"hidden_size": 8, "num_hidden_layers": 1})
    with_tower = EmbeddedEngine(config, EmbeddedEngineSettings(max_slots=8, max_length=96))
    model = reference_model("gemma3")
    load(with_tower, model)
    with_tower.set_policy_version(0)
    requests = make_requests(1)
    with_tower.submit(requests)
    completions = drain(with_tower)
    for request in requests:
        check_against_forward(model, request, completions[request.request_id])


def test_sliding_windows_are_refused() -> None:
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding_attention"):
        EmbeddedEngine(config, EmbeddedEngineSettings())


def test_the_model_of_a_directory_is_built_without_its_weights(tmp_path) -> None:
    model = reference_model("qwen3")
    model.config.save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_directory(tmp_path, EmbeddedEngineSettings(max_slots=2, max_length=64))
    load(engine, model)
    engine.set_policy_version(0)
    request = GenerationRequest("a", (4, 5, 6), SamplingParams(max_new_tokens=30), seed=0)
    engine.submit([request])
    check_against_forward(model, request, drain(engine)["a"])


@pytest.mark.usefixtures("decoder")
def test_half_precision_follows_its_own_full_forward_pass() -> None:
    model = reference_model().to(torch.bfloat16)
    engine = EmbeddedEngine(model.config, EmbeddedEngineSettings(max_slots=4, max_length=64, dtype=torch.bfloat16))
    load(engine, model)
    engine.set_policy_version(0)
    request = GenerationRequest("a", tuple(range(5, 20)), SamplingParams(max_new_tokens=30), seed=1)
    engine.submit([request])
    completion = drain(engine)["a"]
    tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model.float()(tokens, use_cache=False).logits[0, 14:-1]
    expected = logits.log_softmax(-1).gather(-1, tokens[0, 15:, None]).squeeze(-1)
    assert float((torch.tensor(completion.logprobs) - expected).abs().mean()) < 0.05


@pytest.mark.usefixtures("decoder")
def test_prompts_of_any_number_and_length_share_slots_without_mixing() -> None:
    """Groups of different size start and end at different times, so that prefixes move and the pool of them grows."""
    model = reference_model()
    engine = make_engine(model, max_slots=6, max_length=160, prefill_tokens=40)
    rng = random.Random(4)
    requests = []
    for group, (size, length) in enumerate([(5, 3), (1, 1), (3, 20), (2, 90), (7, 1), (1, 70), (4, 2)]):
        prompt = tuple(rng.randrange(6, 61) for _ in range(length))
        for index in range(size):
            sampling = SamplingParams(max_new_tokens=rng.randint(1, 30), stop_token_ids=(5,))
            requests.append(GenerationRequest(f"{group}/{index}", prompt, sampling, seed=index))
    rng.shuffle(requests)
    engine.submit(requests)
    completions = drain(engine)
    for request in requests:
        check_against_forward(model, request, completions[request.request_id])


def count_filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Padded tokens of each prefill forward pass from here on."""
    filled: list[int] = []
    original = Prefill._fill
    monkeypatch.setattr(
        Prefill, "_fill", lambda self, tokens, *rest: (filled.append(tokens.numel()), original(self, tokens, *rest))
    )
    return filled


def next_turn(request: GenerationRequest, turn: Completion, observed: list[int]) -> GenerationRequest:
    name, _, number = request.request_id.rpartition("/")
    context = (*request.prompt_ids, *turn.token_ids.tolist(), *observed)
    return replace(request, request_id=f"{name}/{int(number) + 1}", prompt_ids=context)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_turns_of_a_conversation_equal_a_full_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of one group and of others, whose answers differ in length, in slots that they take from one another."""
    model = reference_model(name)
    engine = make_engine(model, max_slots=7, max_length=160, prefill_tokens=60)
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(6, 61) for _ in range(length)) for length in (1, 9, 30)]
    waiting = []
    for index in range(7):
        sampling = SamplingParams(max_new_tokens=rng.randint(1, 9), stop_token_ids=(5,))
        waiting.append(GenerationRequest(f"{index}/0", prompts[min(index, 2)], sampling, index, affinity=(f"{index}",)))
    filled = count_filled(monkeypatch)
    num_turns = 0
    while waiting:
        engine.submit(waiting)
        if num_turns == 7:
            filled.clear()
        completions = drain(engine)
        for request in waiting:
            check_against_forward(model, request, completions[request.request_id])
        num_turns += len(waiting)
        turns = [
            next_turn(
                request, completions[request.request_id], [rng.randrange(6, 61) for _ in range(rng.randint(1, 8))]
            )
            for request in waiting
        ]
        waiting = [turn for turn in turns if num_turns < 35]
    # The last sampled token and at most 8 observed ones, of which the last goes through a tick.
    assert sum(filled) <= 28 * 8


def test_a_conversation_computes_its_context_anew_after_an_update_or_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = reference_model(seed=0), reference_model(seed=1)
    engine = make_engine(old)
    request = GenerationRequest("a/0", tuple(range(10, 30)), SamplingParams(max_new_tokens=4), 3, affinity=("a",))
    for disturb in (lambda: (load(engine, new), engine.set_policy_version(1)), engine.abort):
        engine.submit([request])
        request = next_turn(request, drain(engine)[request.request_id], [40, 41])
        disturb()
        filled = count_filled(monkeypatch)
        engine.submit([request])
        done = drain(engine)[request.request_id]
        assert filled == [len(request.prompt_ids) - 1]
        check_against_forward(new, request, done)
        request = next_turn(request, done, [42])


def test_a_turn_that_an_update_interrupts_leaves_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(reference_model(seed=0))
    request = GenerationRequest("a/0", tuple(range(10, 20)), SamplingParams(max_new_tokens=6), 3, affinity=("a",))
    engine.submit([request])
    engine.advance(2)
    load(engine, new := reference_model(seed=1))
    engine.set_policy_version(1)
    second = next_turn(request, drain(engine)["a/0"], [40])
    filled = count_filled(monkeypatch)
    engine.submit([second])
    check_against_forward(new, second, drain(engine)["a/1"])
    assert filled == [len(second.prompt_ids) - 1]


def test_a_conversation_with_another_history_is_computed_whole() -> None:
    model = reference_model()
    engine = make_engine(model)
    request = GenerationRequest("a/0", tuple(range(10, 20)), SamplingParams(max_new_tokens=4), 3, affinity=("a",))
    engine.submit([request])
    turn = drain(engine)["a/0"]
    for second in (
        replace(next_turn(request, turn, [40]), prompt_ids=(9, *next_turn(request, turn, [40]).prompt_ids[1:])),
        replace(next_turn(request, turn, [40]), prompt_ids=request.prompt_ids),
    ):
        engine.submit([second])
        check_against_forward(model, second, drain(engine)["a/1"])
