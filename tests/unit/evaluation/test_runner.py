from __future__ import annotations

import json
import random
from dataclasses import fields, replace

import pytest

from megatron_dapo.evaluation.protocol import (
    FREE_FIELDS,
    EvaluationProtocol,
    EvaluationResult,
    compare,
    differing_fields,
)
from megatron_dapo.evaluation.runner import evaluate, evaluation_seed, unique_problems
from megatron_dapo.telemetry.metrics import EVALUATION_METRICS, checked
from megatron_dapo.trainer.metrics import evaluation_metrics
from megatron_dapo.types import Completion, Prompt, Score, VersionRange
from tests.unit.evaluation.conftest import PROTOCOL


class FakeEngine:
    """Answers right with a probability that its seed decides; finishes requests in an order of its own."""

    def __init__(self, order_seed: int = 0, skill: float = 0.5, drop: int = 0) -> None:
        self.random = random.Random(order_seed)
        self.skill = skill
        self.drop = drop
        self.pending = []
        self.seen = []
        self.largest = 0
        self.num_aborts = 0

    def submit(self, requests) -> None:
        self.pending += requests
        self.seen += requests
        self.largest = max(self.largest, len(self.pending))

    def poll(self) -> list[Completion]:
        self.random.shuffle(self.pending)
        count = min(len(self.pending), self.random.randint(0, 5))
        taken, self.pending = self.pending[:count], self.pending[count:]
        if self.drop and taken:
            self.drop -= 1
            taken.pop()
        return [self.answer(request) for request in taken]

    def answer(self, request) -> Completion:
        draw = random.Random(request.seed)
        value = request.prompt_ids[0] if draw.random() < self.skill else 900 + draw.randrange(3)
        reason = "length" if draw.random() < 0.2 else "stop"
        tokens = (value, draw.randrange(1000), 2)
        return Completion(request.request_id, tokens, (-1.0,) * 3, reason, (VersionRange(0, 3, 0),))

    def abort(self) -> list[Completion]:
        self.num_aborts += 1
        self.pending = []
        return []

    @property
    def num_unfinished(self) -> int:
        return len(self.pending)


def prompt(number: int, name: str | None = None) -> Prompt:
    content = ({"role": "user", "content": str(number)},)
    return Prompt(name or f"p{number}", content, (number, 7), str(number))


def decode(token_ids) -> str:
    return str(token_ids[0])


class SilentScorer:
    """Scores nothing."""

    def score_many(self, items) -> dict[str, Score]:
        return {}


class CredulousScorer:
    """Scores truncated responses as correct too: the runner must not believe it."""

    def score_many(self, items) -> dict[str, Score]:
        right, wrong = (1.0, 1.0, "correct"), (0.0, -1.0, "wrong")
        return {key: Score(*(right if text == answer else wrong), text) for key, text, answer, *_ in items}


PROMPTS = [prompt(number) for number in (5, 3, 8, 1, 6)]


def run(prompts=PROMPTS, engine=None, protocol=PROTOCOL, **options) -> EvaluationResult:
    return evaluate(prompts, engine or FakeEngine(), CredulousScorer(), decode, protocol, **options)


def test_result_does_not_depend_on_the_engines_order_nor_on_how_much_is_in_flight():
    expected = run()
    for order in (1, 2, 3):
        assert run(engine=FakeEngine(order), max_in_flight=order) == expected
    backwards = run(prompts=PROMPTS[::-1])
    assert backwards.problems == expected.problems[::-1]


def test_every_sample_has_a_seed_of_its_own_and_the_protocols_sampling():
    engine = FakeEngine()
    run(engine=engine)
    assert len({request.seed for request in engine.seen}) == len(engine.seen) == 20
    assert {request.sampling for request in engine.seen} == {PROTOCOL.sampling}
    assert all(0 <= request.seed < 2**63 for request in engine.seen)
    assert evaluation_seed(1, "p", 0) != evaluation_seed(2, "p", 0)
    other = run(protocol=replace(PROTOCOL, seed=12))
    assert other.problems != run().problems


def test_a_file_that_repeats_its_problems_does_not_define_k():
    repeated = run(prompts=PROMPTS * 32)
    assert [record.num_rows for record in repeated.problems] == [32] * 5
    assert repeated.protocol.num_problems == 5 and len(repeated.problems[0].accuracies) == 4
    assert repeated.metrics == run().metrics
    kept = unique_problems([prompt(4), replace(prompt(4), prompt_id="p4b", answer="other"), prompt(4)])
    assert [(problem.prompt.answer, problem.num_rows) for problem in kept] == [("4", 2), ("other", 1)]


def test_numbers_follow_from_the_table():
    result = run()
    truncated = [flag for record in result.problems for flag in record.truncated]
    correct = [accuracy for record in result.problems for accuracy in record.accuracies]
    assert any(truncated) and 0 < sum(correct) < 20
    assert result.rates["truncation_rate"] == sum(truncated) / 20
    assert result.headline.value == pytest.approx(sum(correct) / 20)
    assert result.rates["mean_response_tokens"] == 3
    for record in result.problems:
        for accuracy, extracted, was_truncated, outcome in zip(
            record.accuracies, record.extracted, record.truncated, record.outcomes
        ):
            right = extracted == record.answer
            assert accuracy == float(right and not was_truncated)
            assert outcome == ("truncated" if right and was_truncated else "correct" if right else "wrong")


def test_duplicates_are_counted():
    class Deaf(FakeEngine):
        def answer(self, request):
            return super().answer(replace(request, seed=1))

    assert run().rates["duplicate_rate"] == 0.0
    assert run(engine=Deaf()).rates["duplicate_rate"] == 15 / 20


def test_progress_counts_every_response_once():
    reports = []
    run(progress=reports.append)
    assert reports[-1].num_finished == reports[-1].num_total == 20 and reports[-1].num_tokens == 60
    finished = [report.num_finished for report in reports]
    assert finished == sorted(set(finished))


def test_in_flight_is_bounded():
    engine = FakeEngine()
    run(engine=engine, max_in_flight=3)
    assert engine.largest == 3


def test_an_engine_that_misbehaves_is_named_and_left_clean():
    with pytest.raises(RuntimeError, match="idle, but 2 of 20 responses are missing"):
        run(engine=FakeEngine(drop=2))

    class Aborting(FakeEngine):
        def answer(self, request):
            return replace(super().answer(request), finish_reason="abort")

    engine = Aborting()
    with pytest.raises(RuntimeError, match="aborted 'evaluation/"):
        run(engine=engine)
    assert engine.num_unfinished == 0 and engine.num_aborts == 1

    class Confused(FakeEngine):
        def answer(self, request):
            return replace(super().answer(request), request_id="train/0")

    with pytest.raises(RuntimeError, match="'train/0', which is not an open request"):
        run(engine=Confused())
    busy = FakeEngine()
    busy.submit(["left over"])
    with pytest.raises(ValueError, match="still has 1 unfinished"):
        run(engine=busy)


def test_bad_inputs_are_named():
    with pytest.raises(ValueError, match="at least one prompt"):
        run(prompts=[])
    with pytest.raises(ValueError, match="'same'"):
        run(prompts=[prompt(1, "same"), prompt(2, "same")])
    with pytest.raises(ValueError, match="max_in_flight 0"):
        run(max_in_flight=0)
    with pytest.raises(RuntimeError, match="left out 20 of 20"):
        evaluate(PROMPTS, FakeEngine(), SilentScorer(), decode, PROTOCOL)
    with pytest.raises(ValueError, match="4 equal responses"):
        replace(PROTOCOL, temperature=0.0)


def test_json_round_trip_is_exact():
    result = run()
    assert EvaluationResult.from_json(result.to_json()) == result


def test_json_of_another_kind_is_refused():
    document = json.loads(run().to_json())
    with pytest.raises(ValueError, match="not an evaluation result: format None"):
        EvaluationResult.from_json("[]")
    with pytest.raises(ValueError, match="format 'x'"):
        EvaluationResult.from_json(json.dumps({**document, "format": "x"}))
    del document["protocol"]["top_p"]
    document["protocol"]["nucleus"] = 0.7
    with pytest.raises(ValueError, match=r"EvaluationProtocol: missing \['top_p'\], unknown \['nucleus'\]"):
        EvaluationResult.from_json(json.dumps(document))


def test_comparison_is_paired_by_problem():
    before = run(engine=FakeEngine(skill=0.2))
    after = run(prompts=PROMPTS[::-1], engine=FakeEngine(skill=0.9), protocol=replace(PROTOCOL, model="runs/b"))
    difference = compare(before, after)["avg@4"]
    assert difference.value == pytest.approx(after.headline.value - before.headline.value)
    assert 0 < difference.low <= difference.value <= difference.high
    same = compare(before, replace(before, problems=before.problems[::-1]))
    assert all((entry.value, entry.low, entry.high) == (0.0, 0.0, 0.0) for entry in same.values())


def test_each_source_has_its_own_estimates_beside_those_of_all_problems():
    prompts = [replace(one, source="easy" if number % 3 else "hard") for number, one in enumerate(PROMPTS)]
    result, blended = run(prompts=prompts), run()
    assert result.sources == ("hard", "easy") and blended.sources == ()
    assert result.metrics == blended.metrics  # the overall number does not know of sources
    parts = [result.of_source(name) for name in result.sources]
    assert sum(len(part.problems) for part in parts) == len(PROMPTS)
    weighted = sum(part.headline.value * len(part.problems) for part in parts) / len(PROMPTS)
    assert weighted == pytest.approx(result.headline.value)
    metrics = checked(EVALUATION_METRICS, evaluation_metrics(result, 1.0))
    assert metrics["eval/hard/avg_at_k"] == parts[0].headline.value
    assert set(evaluation_metrics(blended, 1.0)) == set(EVALUATION_METRICS)
    with pytest.raises(ValueError, match="unknown: eval/hard/avg_at_kk"):
        checked(EVALUATION_METRICS, {**metrics, "eval/hard/avg_at_kk": 0.0})
    assert EvaluationResult.from_json(result.to_json()) == result
    document = json.loads(result.to_json())
    for record in document["problems"]:
        del record["source"]  # Earlier releases did not write it.
    assert EvaluationResult.from_json(json.dumps(document)).sources == ()
    with pytest.raises(ValueError, match="it has hard, easy"):
        result.of_source("medium")
    paired = compare(run(prompts=prompts, engine=FakeEngine(skill=0.1)).of_source("hard"), parts[0])
    assert paired["avg@4"].value >= 0


@pytest.mark.parametrize("name", [field.name for field in fields(EvaluationProtocol)])
def test_unlike_protocols_are_refused_by_the_name_of_the_field(name):
    value = getattr(PROTOCOL, name)
    other = {int: lambda: value + 1, float: lambda: value / 2, str: lambda: value + "x", tuple: lambda: (*value, 9)}
    changed = replace(PROTOCOL, **{name: other[type(value)]()})
    assert (name in differing_fields(PROTOCOL, changed)) == (name not in FREE_FIELDS)
    result = run()
    if name not in FREE_FIELDS:
        with pytest.raises(ValueError, match=f"unlike protocols .{name}:"):
            compare(result, replace(result, protocol=replace(result.protocol, **{name: getattr(changed, name)})))


def test_different_problems_are_refused():
    a, b = run(prompts=PROMPTS[:3]), run(prompts=PROMPTS[1:4])
    with pytest.raises(ValueError, match="2 problems are in one result only"):
        compare(a, b)
