"""Distribution of requests over ranks."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from megatron_dapo.engines.distributed_embedded import _decode_requests, _encode_requests, assign
from megatron_dapo.types import Completion, GenerationRequest, SamplingParams, VersionRange


def group(name: str, size: int, temperature: float = 1.0) -> list[GenerationRequest]:
    prompt = tuple(name.encode())
    return [
        GenerationRequest(f"{name}/{i}", prompt, SamplingParams(temperature, stop_token_ids=(2, 3)), seed=2**63 + i)
        for i in range(size)
    ]


@pytest.mark.parametrize("trial", range(50))
def test_every_request_goes_to_one_rank_and_loads_stay_even(trial: int) -> None:
    rng = random.Random(trial)
    load = [rng.randint(0, 20) for _ in range(rng.randint(1, 5))]
    requests = [request for g in range(rng.randint(0, 30)) for request in group(f"{g}", rng.randint(1, 16))]
    shares = assign(requests, load)
    assert sorted(r.request_id for share in shares for r in share) == sorted(r.request_id for r in requests)
    even = -(-(sum(load) + len(requests)) // len(load))
    for before, share in zip(load, shares, strict=True):
        assert not share or before + len(share) <= even + even // 8
    assert shares == assign(requests, load)


def test_a_group_stays_whole_on_busy_ranks_and_is_cut_on_idle_ones() -> None:
    assert [len(share) for share in assign(group("a", 8), [64, 60])] == [0, 8]
    assert [len(share) for share in assign(group("a", 8), [0, 0])] == [4, 4]
    shares = assign([r for g in "abcd" for r in group(g, 8)], [0, 0])
    assert [{r.prompt_ids for r in share} for share in shares] == [
        {tuple(b"a"), tuple(b"c")},
        {tuple(b"b"), tuple(b"d")},
    ]


def test_the_turns_of_a_conversation_stay_on_its_rank_unless_it_is_overloaded() -> None:
    turns = [replace(request, affinity=(f"e{index}",)) for index, request in enumerate(group("a", 8))]
    home = {f"e{index}": index % 2 for index in range(8)}
    shares = assign(turns, [0, 0], home)
    assert [[request.affinity[0] for request in share] for share in shares] == [
        ["e0", "e2", "e4", "e6"],
        ["e1", "e3", "e5", "e7"],
    ]
    shares = assign(turns, [0, 0], dict.fromkeys(home, 1))
    assert sorted(map(len, shares)) == [4, 4]
    assert {request.request_id for share in shares for request in share} == {request.request_id for request in turns}


def test_requests_survive_json_exactly() -> None:
    shares = [group("a", 3) + group("b", 1, temperature=0.1), [], group("a", 2, temperature=1 / 3)]
    prefix = Completion("a/0", (7, 8), (-0.1, -1 / 3), "abort", (VersionRange(0, 1, 2), VersionRange(1, 2, 3)))
    shares[0][0] = replace(shares[0][0], prefix=prefix, affinity=("a/0", "a"))
    command = json.loads(json.dumps(_encode_requests(shares)))
    assert [_decode_requests(command, rank) for rank in range(3)] == shares
    assert len(command["prompts"]) == 2 and len(command["samplings"]) == 3
