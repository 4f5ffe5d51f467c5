"""Answers of /generate from raw bytes: the same as checking Python objects one by one, for good and for hostile bodies."""

from __future__ import annotations

import base64
import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_dapo.engines.sglang.wire import (
    MAX_LOGPROB,
    AnswerError,
    LabeledTokens,
    generate_body,
    parse_generation,
)
from megatron_dapo.types import Completion, GenerationRequest, RoutingShape, SamplingParams, VersionRange
from tests.examples import examples

VOCAB_SIZE = 300
REQUEST = GenerationRequest("a", (5, 6, 7), SamplingParams(max_new_tokens=6, stop_token_ids=(3, 9)), seed=11)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def in_64_bits(digits: str) -> int:
    if not -(2**63) <= int(digits) < 2**64:
        raise ValueError(digits)
    return int(digits)


def checked(body: bytes) -> tuple[list[int], list[float], str, str, int]:
    """Return an answer by the plain rules: Python's JSON, every entry looked at. Raises ValueError or TypeError."""
    answer = json.loads(body, parse_constant=refuse, parse_int=in_64_bits)
    meta, tokens = answer["meta_info"], answer["output_ids"]
    entries, reason = meta["output_token_logprobs"], meta["finish_reason"]
    if any(type(token) is not int or not 0 <= token < VOCAB_SIZE for token in tokens) or len(entries) != len(tokens):
        raise ValueError("tokens")
    for entry, token in zip(entries, tokens, strict=True):
        value, own, text = entry
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(np.float32(value)):
            raise ValueError("log-prob")
        if value > MAX_LOGPROB or isinstance(own, bool) or own != token or text is not None:
            raise ValueError("entry")
    expected = {"prompt_tokens": 3, "completion_tokens": len(tokens)}
    if any(meta.get(name) not in (None, count) for name, count in expected.items()):
        raise ValueError("counts")
    cached = 0 if meta.get("cached_tokens") is None else meta["cached_tokens"]
    if type(cached) is not int or not 0 <= cached <= 3:
        raise ValueError("cached")
    if not isinstance(version := meta.get("weight_version", ""), str):
        raise ValueError("version")
    kind, stops = reason["type"], REQUEST.sampling.stop_token_ids
    if kind not in ("stop", "length", "abort") or len(tokens) > 6 or set(stops) & set(tokens[:-1]):
        raise ValueError("reason")
    if kind == "stop" and (not tokens or type(reason.get("matched")) is not int or reason["matched"] != tokens[-1]):
        raise ValueError("stop")
    if kind == "length" and len(tokens) != 6:
        raise ValueError("length")
    ended = "stop" if tokens and tokens[-1] in stops else "length" if kind == "abort" and len(tokens) == 6 else kind
    return (
        tokens,
        [float(np.float32(entry[0])) for entry in entries],
        ended,
        version,
        cached,
    )


def good_answer(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["stop", "length", "abort"])
    length = 6 if kind == "length" else rng.randint(int(kind == "stop"), 6)
    tokens = [rng.choice([token for token in range(VOCAB_SIZE) if token not in (3, 9)]) for _ in range(length)]
    if kind == "stop":
        tokens[-1] = rng.choice([3, 9])
    logprobs = [
        rng.choice([0.0, 1e-5, -1e-30, float(np.float32(-rng.expovariate(0.5))), -rng.random()]) for _ in tokens
    ]
    reason = {"stop": {"type": "stop", "matched": tokens[-1] if tokens else None}}.get(kind, {"type": kind})
    return {
        "text": rng.choice(["", "null],[", '"output_token_logprobs":[[-0.5,1,null]]', "\\u00e9\n\x7f ]] é漢", "\\"]),
        "output_ids": tokens,
        "meta_info": {
            "id": "a.",
            "finish_reason": reason,
            "prompt_tokens": 3,
            "weight_version": "7",
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
            "completion_tokens": length,
            "cached_tokens": rng.choice([0, 2, None]),
            "cached_tokens_details": None,
        },
    }


def compact(answer: Any) -> bytes:
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False).encode()


def outcome(parse: Any, body: bytes) -> Any:
    try:
        return parse(body)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return "refused"


def parsed(body: bytes) -> tuple[list[int], list[float], str, str, int]:
    done = parse_generation(body, REQUEST, vocab_size=VOCAB_SIZE)
    assert done.token_ids.dtype == np.int32 and done.logprobs.dtype == np.float32
    return done.token_ids.tolist(), done.logprobs.tolist(), done.finish_reason, done.weight_version, done.num_cached


def test_good_answers_are_read_bit_for_bit() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        body = compact(good_answer(rng))
        found = parsed(body)
        assert found == checked(body)
        signs = [math.copysign(1.0, value) for value in found[1]]
        assert signs == [math.copysign(1.0, value) for value in checked(body)[1]]


ODDITIES = [
    None,
    True,
    False,
    "x",
    0,
    1,
    -1,
    0.5,
    1e-3,
    1e39,
    -1e39,
    1e400,
    math.nan,
    math.inf,
    2**31,
    2**70,
    [],
    [1],
    {},
]


def spoil(answer: dict[str, Any], rng: random.Random) -> bytes:
    """Return the answer with one change, anywhere: a value of its tree, or a few of its bytes."""
    if rng.random() < 0.4:
        body = bytearray(compact(answer))
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(body))
            alphabet = b'[]{},:"nul0159.-e \xff'
            change = rng.choice(["set", "cut", "add", "swap", "end"])
            if change == "set":
                body[place] = rng.choice(alphabet)
            elif change == "cut":
                del body[place : place + rng.randint(1, 8)]
            elif change == "add":
                body[place:place] = bytes(rng.choices(alphabet, k=rng.randint(1, 3)))
            elif change == "swap":
                other = rng.randrange(len(body))
                body[place], body[other] = body[other], body[place]
            else:
                del body[max(1, place) :]
        return bytes(body)
    containers: list[Any] = [answer]
    for container in containers:
        values = container.values() if isinstance(container, dict) else container
        containers += [value for value in values if isinstance(value, (dict, list)) and value]
    container = rng.choice(containers)
    places = list(container) if isinstance(container, dict) else list(range(len(container)))
    place = rng.choice(places)
    change = rng.choice(["set", "delete", "wrap", "twice"])
    if change == "set":
        container[place] = rng.choice(ODDITIES)
    elif change == "delete":
        del container[place]
    elif change == "wrap":
        container[place] = [container[place]]
    elif isinstance(container, list):
        container.insert(place, container[place])
    return compact(answer)


def test_spoiled_answers_are_refused_as_the_plain_rules_refuse_them() -> None:
    rng = random.Random(1)
    num_refused, number = 0, examples(20_000)
    for _ in range(number):
        body = spoil(good_answer(rng), rng)
        expected, actual = outcome(checked, body), outcome(parsed, body)
        if actual != expected:
            assert actual == "refused" and is_other_writing(body), body
        num_refused += actual == "refused"
    assert 0.25 * number < num_refused < 0.9 * number


def is_other_writing(body: bytes) -> bool:
    """Return True for an answer that is good but not written as SGLang writes it, such as with blanks."""
    return compact(json.loads(body)) != body


@pytest.mark.parametrize(
    "entries",
    [
        "[[-0.5],[1,null],[-0.5,2,null]]",
        "[[[-0.5],1,null],[-0.5,2,null]]",
        "[[-0.5,[1],null],[-0.5,2,null]]",
        "[[-0.5,1,-0.5,null],[2,null]]",
        "[[-0.5,null],[1,-0.5,2,null]]",
        "[-0.5,1,null,[-0.5,2,null]]",
        "[[-0.5,1,0.5],[-0.5,2,0.5]]",
        "[[-0.5,1,null],[-0.5,2,null],[-0.5,2,null]]",
        "[[-0.5,1,null]]",
        '[[-0.5,1,"a"],[-0.5,2,"b"]]',
        '[["null",1,null],[-0.5,2,null]]',
        "[[null,1,null],[-0.5,2,null]]",
        "[[-0.5,1,nul],[-0.5,2,null]]",
        "[[-0.5,1,null],[-0.5,2,null]",
        "[[-0.5,2,null],[-0.5,1,null]]",
        "[[-0.5,1.5,null],[-0.5,2,null]]",
        "[[01,1,null],[-0.5,2,null]]",
        "[[NaN,1,null],[-0.5,2,null]]",
        "null",
        "{}",
        "[null]",
        "[]",
    ],
)
def test_no_other_shape_of_log_probs_passes(entries: str) -> None:
    body = '{"output_ids":[1,2],"meta_info":{"finish_reason":{"type":"abort"},"output_token_logprobs":%s,"cached_tokens":0}}'
    good = "[[-0.5,1,null],[-0.5,2,null]]"
    assert parsed((body % good).encode())[:3] == ([1, 2], [-0.5, -0.5], "abort")
    with pytest.raises(AnswerError):
        parsed((body % entries).encode())


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"[" * 5000, b'{"meta_info":', b"\xff", b'{"meta_info":{}}', b"7"]
)
def test_what_is_no_answer_is_refused(body: bytes) -> None:
    with pytest.raises(AnswerError):
        parsed(body)


# Two layers, two of 300 experts a token; three tokens of the prompt and two of the response, of which the last was not read.
ROUTED = replace(REQUEST, with_routing=True)
EXPERTS = np.arange(4 * 2 * 2, dtype=np.int32).reshape(4, 2, 2) * 19


def routed_answer(routing: object) -> bytes:
    meta = {
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]],
        "finish_reason": {"type": "stop", "matched": 9},
        "weight_version": "3",
        "routed_experts": routing,
    }
    return json.dumps({"output_ids": [7, 9], "meta_info": meta}, separators=(",", ":")).encode()


def encoded(experts: np.ndarray) -> str:
    return base64.b64encode(experts.tobytes()).decode()


@pytest.mark.parametrize(("num_experts", "dtype"), [(300, np.int16), (286, np.int16), (256, np.uint8)])
def test_routing_is_read_in_the_smallest_type(num_experts: int, dtype: type) -> None:
    experts = EXPERTS if num_experts > 256 else EXPERTS % 256
    read = parse_generation(
        routed_answer(encoded(experts)), ROUTED, vocab_size=VOCAB_SIZE, routing=RoutingShape(2, 2, num_experts)
    )
    assert read.routing.dtype == dtype and (read.routing == experts).all() and read.token_ids.tolist() == [7, 9]
    assert parse_generation(routed_answer(None), REQUEST, vocab_size=VOCAB_SIZE).routing is None
    assert generate_body(ROUTED, "a")["return_routed_experts"] and "return_routed_experts" not in generate_body(
        REQUEST, "a"
    )


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (None, "start the server with --enable-return-routed-experts"),
        ("no base64!", "no base64 of int32"),
        (encoded(EXPERTS)[:-4], "no base64 of int32"),
        (
            encoded(EXPERTS[:3]),
            r"has 12 numbers, not 16: tokens, layers and experts a token of this model are \(4, 2, 2\)",
        ),
        (encoded(EXPERTS + 20), "experts span 20..305, the model has 300"),
        (encoded(EXPERTS - 1), "experts span -1..284, the model has 300"),
    ],
)
def test_routing_of_another_form_or_model_is_refused(routing: object, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        parse_generation(routed_answer(routing), ROUTED, vocab_size=VOCAB_SIZE, routing=RoutingShape(2, 2, 300))


def test_a_continued_response_asks_only_for_the_experts_of_what_follows() -> None:
    """The server would return those of the whole sequence again, 2 KB a token in a model of 48 layers with 8 experts a token."""
    known = EXPERTS[:3] + 1
    numbers = {"token_ids": [5], "logprobs": [-0.5], "routing": known.astype(np.int16)}
    prefix = Completion("a", finish_reason="abort", versions=(VersionRange(0, 1, 0),), **numbers)
    request, shape = replace(ROUTED, prefix=prefix), RoutingShape(2, 2, 300)
    assert generate_body(request, "a")["routed_experts_start_len"] == 3
    assert generate_body(ROUTED, "a")["routed_experts_start_len"] == 0
    read = parse_generation(routed_answer(encoded(EXPERTS[2:])), request, vocab_size=VOCAB_SIZE, routing=shape)
    assert (read.routing == np.concatenate((known, EXPERTS[2:]))).all() and read.routing.dtype == np.int16
    with pytest.raises(AnswerError, match=r"has 20 numbers, not 8: .* are \(2, 2, 2\)"):
        whole = encoded(np.concatenate((EXPERTS, EXPERTS[:1])))
        parse_generation(routed_answer(whole), request, vocab_size=VOCAB_SIZE, routing=shape)


def test_an_abort_without_experts_is_an_answer_without_tokens() -> None:
    """As SGLang answers a request that it had retracted and that is aborted while it waits: tokens, no experts, no counts."""
    meta = {
        "id": "a#0.",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "3",
        "e2e_latency": 1.0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.1, 5, None]] * 4,
        "output_token_logprobs_length": 4,
        "completion_tokens": 4,
    }
    body = json.dumps({"text": "", "output_ids": [5] * 4, "meta_info": meta}, separators=(",", ":")).encode()
    read = parse_generation(body, ROUTED, vocab_size=VOCAB_SIZE, routing=RoutingShape(2, 2, 300))
    assert (read.finish_reason, len(read.token_ids), len(read.logprobs), read.routing) == ("abort", 0, 0, None)
    assert read.num_unrouted == 4
    dense = parse_generation(body, REQUEST, vocab_size=VOCAB_SIZE)
    assert dense.token_ids.tolist() == [5] * 4 and dense.num_unrouted == 0


def labeled(*rows: object) -> bytes:
    """An answer of three tokens with these weight_versions."""
    answer = {
        "output_ids": [4, 5, 9],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 9},
            "weight_version": "8",
            "weight_versions": [*rows],
            "output_token_logprobs": [[-1.0, token, None] for token in (4, 5, 9)],
        },
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def span(version: str, start: object, end: object) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


def test_labels_of_tokens_cover_them_in_order() -> None:
    read = parse_generation(labeled(span("7", 0, 2), span("8", 2, 3)), REQUEST, vocab_size=VOCAB_SIZE)
    assert read.labels == (LabeledTokens(2, "7"), LabeledTokens(3, "8"))
    without = labeled().replace(b'"weight_versions":[],', b"")
    assert parse_generation(without, REQUEST, vocab_size=VOCAB_SIZE).labels == ()
    for rows in (
        (),
        (span("7", 0, 2),),
        (span("7", 0, 2), span("8", 1, 3)),
        (span("7", 1, 3),),
        (span("7", 0, 4), span("8", 4, 3)),
        (span("7", 0, 3.0),),
        (span("7", 0, None),),
        (7,),
    ):
        with pytest.raises(AnswerError, match="weight_versions"):
            parse_generation(labeled(*rows), REQUEST, vocab_size=VOCAB_SIZE)


def test_a_cache_key_is_sent_if_there_is_one() -> None:
    assert "extra_key" not in generate_body(REQUEST, "a.")
    assert generate_body(REQUEST, "a.", "v3")["extra_key"] == "v3"


RECORDED = replace(REQUEST, sampling=replace(REQUEST.sampling, top_p=0.9, top_k=4, with_support=True))


def recorded_answer(tokens: list[int], kind: str = "abort", **numbers: object) -> bytes:
    meta = {
        "finish_reason": {"type": kind, **({"matched": tokens[-1]} if kind == "stop" else {})},
        "output_token_logprobs": [[-1.5, token, None] for token in tokens],
        "weight_version": "default",
        **numbers,
    }
    return json.dumps({"text": "", "output_ids": tokens, "meta_info": meta}, separators=(",", ":")).encode()


def supported(rows: object, logprobs: object) -> dict[str, object]:
    return {"output_token_sampling_mask": rows, "output_token_sampling_logprobs": logprobs}


def test_supports_and_their_log_probs_are_read() -> None:
    answer = recorded_answer([7, 8, 9], "stop", **supported([[4, 7], [8], [299, 9, 0]], [-0.25, 0.0, -1.5]))
    read = parse_generation(answer, RECORDED, vocab_size=VOCAB_SIZE)
    assert read.support.tolist() == [4, ~7, ~8, 299, 9, ~0] and read.support.dtype == np.int32
    assert read.logprobs.tolist() == [-0.25, 0.0, -1.5] and read.logprobs.dtype == np.float32
    plain = parse_generation(answer, REQUEST, vocab_size=VOCAB_SIZE)
    assert plain.support is None and plain.logprobs.tolist() == [-1.5] * 3
    assert generate_body(RECORDED, "a")["return_sampling_mask"] and "return_sampling_mask" not in generate_body(REQUEST, "a")
    empty = parse_generation(recorded_answer([]), RECORDED, vocab_size=VOCAB_SIZE)
    assert empty.support is None and empty.num_unrouted == 0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({}, "SGLang says since 0.5.21 what tokens are drawn from"),
        (supported([[7]], [-0.5]), "has 1 lists of ids for 2 tokens"),
        (supported([[7], []], [-0.5, -0.5]), "has 1 lists of ids for 2 tokens"),
        (supported([[7], 9], [-0.5, -0.5]), "has 1 lists of ids for 2 tokens"),
        (supported([[7], [9, 300]], [-0.5, -0.5]), "no list of lists of ids below 300"),
        (supported([[7], [9, -1]], [-0.5, -0.5]), "no list of lists of ids below 300"),
        (supported([[7], [[9, 9]]], [-0.5, -0.5]), "no list of lists of ids below 300"),
        (supported([[7], [8, 4]], [-0.5, -0.5]), r"token 9 \(index 1\) is not among the 2 ids"),
        (supported([[7], [9, 9]], [-0.5, -0.5]), r"token 9 \(index 1\) is not among the 2 ids"),
        (supported([[7], [9]], [-0.5]), "1 renormalized log-probs for 2 tokens"),
        (supported([[7], [9]], [-0.5, 0.5]), r"log-prob 1 \(token 9\) is 0.5"),
        (supported([[7], [9]], None), "is no list"),
        (supported([[7], ["9"]], [-0.5, -0.5]), "."),
    ],
)
def test_supports_of_another_form_or_of_other_tokens_are_refused(numbers: dict[str, object], message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        parse_generation(recorded_answer([7, 9], "stop", **numbers), RECORDED, vocab_size=VOCAB_SIZE)


def test_an_aborted_answer_without_its_supports_gives_its_tokens_up() -> None:
    read = parse_generation(recorded_answer([5, 6]), RECORDED, vocab_size=VOCAB_SIZE)
    assert (read.finish_reason, len(read.token_ids), read.support, read.num_unrouted) == ("abort", 0, None, 2)
    kept = parse_generation(recorded_answer([5], **supported([[5]], [0.0])), RECORDED, vocab_size=VOCAB_SIZE)
    assert kept.token_ids.tolist() == [5] and kept.support.tolist() == [~5] and kept.num_unrouted == 0
