"""Supports that the embedded engine records, against a full forward pass and sorting by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dapo.engines.base import completion_from_json
from megatron_dapo.engines.distributed_embedded import _decode_requests, _encode_requests, _to_lists
from megatron_dapo.token_support import num_supports, support_table
from megatron_dapo.types import Completion, GenerationRequest
from tests.unit.engines.test_embedded import drain, make_engine, make_requests, reference_model

SAMPLING = {"temperature": 0.9, "top_p": 0.8, "top_k": 9, "with_support": True, "max_new_tokens": 30}


def rows_of(completion: Completion) -> list[set[int]]:
    table = support_table(torch.from_numpy(completion.support))
    return [{word for word in row if word >= 0} for row in table.tolist()]


def nucleus(probabilities: list[float], top_p: float, top_k: int) -> set[int]:
    likeliest = sorted(range(len(probabilities)), key=lambda word: -probabilities[word])[:top_k]
    total, mass, kept = sum(probabilities[word] for word in likeliest), 0.0, set()
    for word in likeliest:
        if mass < top_p * total:
            kept.add(word)
        mass += probabilities[word]
    return kept


def check(model: torch.nn.Module, request: GenerationRequest, completion: Completion) -> None:
    tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].double()
    logits = logits / request.sampling.temperature
    supports = rows_of(completion)
    assert len(supports) == completion.num_tokens
    for row, support, token, logprob in zip(logits, supports, completion.token_ids, completion.logprobs, strict=True):
        assert support == nucleus(row.softmax(-1).tolist(), request.sampling.top_p, request.sampling.top_k)
        ids = torch.tensor(sorted(support))
        assert token in support and float(row[token] - row[ids].logsumexp(0)) == pytest.approx(float(logprob), abs=2e-4)


def test_supports_and_log_probs_equal_a_full_forward_pass() -> None:
    model = reference_model()
    engine = make_engine(model)
    plain = [replace(one, request_id="p" + one.request_id) for one in make_requests(2, top_p=0.8)]
    recorded = make_requests(4, **SAMPLING)
    engine.submit(recorded[:5] + plain + recorded[5:])
    completions = drain(engine)
    assert all(completions[one.request_id].support is None for one in plain)
    for request in recorded:
        check(model, request, completions[request.request_id])
    sizes = [len(row) for one in recorded for row in rows_of(completions[one.request_id])]
    assert max(sizes) > 3, "the nucleus is not always a token"


def test_a_continued_response_has_the_supports_of_the_uninterrupted_one() -> None:
    model = reference_model()
    requests = make_requests(3, **SAMPLING)
    whole = make_engine(model)
    whole.submit(requests)
    expected = drain(whole)
    engine = make_engine(model, ticks_per_poll=5)
    engine.submit(requests)
    done = {one.request_id: one for one in engine.poll()}
    aborted = {one.request_id: one for one in engine.abort()}
    assert any(one.num_tokens for one in aborted.values())
    rest = [
        replace(one, prefix=aborted[one.request_id] if aborted[one.request_id].num_tokens else None)
        for one in requests
        if one.request_id in aborted
    ]
    # As they go from rank to rank.
    sent = _decode_requests(_encode_requests([rest]), 0)
    assert sent == rest
    engine.submit(sent)
    done |= drain(engine)
    for name, completion in expected.items():
        assert (done[name].token_ids == completion.token_ids).all()
        assert (done[name].support == completion.support).all() and done[name].support.dtype == np.int32
        assert completion_from_json(_to_lists(completion)) == completion
        assert num_supports(completion.support) == completion.num_tokens


@pytest.mark.parametrize("change", [{"top_k": 0}, {"top_k": 1}, {"top_k": 4097}, {"temperature": 0.0}])
def test_requests_without_a_bound_on_the_support_are_refused(change) -> None:
    engine = make_engine(reference_model())
    with pytest.raises(ValueError, match="needs temperature > 0, 1 < top_k <= 4096"):
        engine.submit(make_requests(1, 1, **SAMPLING | change))
    good = make_requests(1, 1, **SAMPLING)[0]
    prefix = Completion(good.request_id, [7, 8], [-0.1, -0.2], "abort", (), support=np.array([~7], np.int32))
    with pytest.raises(ValueError, match="the prefix has the supports of 1 tokens, not of 2"):
        engine.submit([replace(good, prefix=prefix)])
