"""What a real SGLang server says that its tokens were drawn from under top-p and top-k, against transformers' logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from synced_server import drain, serving

from megatron_dapo.engines.sglang.engine import SglangEngine
from megatron_dapo.engines.sglang.server import SglangServer
from megatron_dapo.token_support import num_supports, support_table
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams

DEADLINE_S = 240.0
PROMPT = (5, 6, 7, 250, 9, 31, 100, 5, 5, 17)
SAMPLING = SamplingParams(0.8, 0.9, 12, max_new_tokens=40, stop_token_ids=(2,), with_support=True)


@pytest.fixture(scope="module")
def server(server_factory: Callable[..., SglangServer], tiny_model: Path, labels_tokens: bool) -> SglangServer:
    if not labels_tokens:
        pytest.skip("this SGLang does not say what tokens are drawn from; test_server.py shows that it is refused")
    return server_factory(tiny_model, max_support=12, seeded=True)


@pytest.fixture
def engine(server: SglangServer) -> Iterator[SglangEngine]:
    with serving(server, DEADLINE_S) as engine:
        yield engine


@pytest.fixture(scope="module")
def logits_of(tiny_model: Path) -> Callable[[Completion], torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def of(completion: Completion) -> torch.Tensor:
        tokens = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
        return logits.double() / SAMPLING.temperature

    return of


def requests(count: int, **sampling: object) -> list[GenerationRequest]:
    return [GenerationRequest(str(index), PROMPT, replace(SAMPLING, **sampling), seed=index) for index in range(count)]


def check(completion: Completion, logits: torch.Tensor) -> None:
    """Every support holds the likeliest ids, and log-probs are renormalized over them."""
    table = support_table(torch.from_numpy(completion.support))
    assert len(table) == completion.num_tokens
    for row, ids, token, logprob in zip(logits, table, completion.token_ids.tolist(), completion.logprobs, strict=True):
        inside = ids[ids >= 0].long()
        assert set(inside.tolist()) == set(row.topk(len(inside)).indices.tolist()) and len(inside) <= SAMPLING.top_k
        assert float(row[token] - row[inside].logsumexp(0)) == pytest.approx(float(logprob), abs=1e-4)


def test_supports_and_log_probs_are_those_of_the_logits(engine: SglangEngine, logits_of: Callable) -> None:
    engine.submit(requests(12))
    completions = drain(engine, DEADLINE_S)
    assert len(completions) == 12
    for completion in completions:
        check(completion, logits_of(completion))


def test_an_aborted_response_keeps_its_supports_and_continues(engine: SglangEngine, logits_of: Callable) -> None:
    begun = requests(6, max_new_tokens=400, stop_token_ids=())
    engine.submit(begun)
    time.sleep(1.0)
    aborted = {completion.request_id: completion for completion in engine.abort()}
    assert any(0 < one.num_tokens < 400 for one in aborted.values())
    rest = [replace(one, prefix=aborted[one.request_id]) for one in begun if aborted[one.request_id].num_tokens]
    engine.submit(rest)
    for completion in drain(engine, DEADLINE_S):
        assert completion.num_tokens == num_supports(completion.support) == 400
        check(completion, logits_of(completion))


def test_tokens_follow_the_softmax_over_the_support(engine: SglangEngine, logits_of: Callable) -> None:
    """Chi-square of 2,000 first tokens against the distribution that is trained."""
    engine.submit(requests(2000, max_new_tokens=1, stop_token_ids=()))
    completions = drain(engine, DEADLINE_S)
    supports = {frozenset(support_table(torch.from_numpy(one.support))[0].tolist()) for one in completions}
    assert len(supports) == 1
    inside = torch.tensor(sorted(word for word in supports.pop() if word >= 0))
    expected = logits_of(completions[0])[0][inside].softmax(0) * len(completions)
    counts = torch.tensor([sum(one.token_ids[0] == word for one in completions) for word in inside.tolist()])
    assert counts.sum() == len(completions) and len(inside) > 2
    freedom = len(inside) - 1
    assert float(((counts - expected).square() / expected).sum()) < freedom + 5 * (2 * freedom) ** 0.5
