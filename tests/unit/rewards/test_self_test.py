from __future__ import annotations

import pytest

from megatron_dapo.rewards.verifiers import dapo, lenient
from megatron_dapo.rewards.verifiers.self_test import check_contract, instructed_formats
from megatron_dapo.types import Score

ANSWER_LINE = 'The last line should be of the form Answer: $Answer.\n\nProblem {}\n\nPut it after "Answer:".'
BOXED = "Problem {}\nPut your final answer within \\boxed{{}}."


class FakePool:
    """Scores by a verifier's function, in this process."""

    def __init__(self, score):
        self.score = score

    def score_many(self, items):
        scores = {}
        for key, response, answer, is_truncated, _ in items:
            outcome = "truncated" if is_truncated else self.score(response, answer).outcome
            scores[key] = Score(float(outcome == "correct"), 0.0, outcome)
        return scores


def prompts(template, num=200):
    return [(template.format(i), str(i)) for i in range(num)]


@pytest.mark.parametrize(
    ("template", "score", "formats"),
    [
        (ANSWER_LINE, dapo.score, ("answer_line",)),
        (ANSWER_LINE, lenient.score, ("answer_line",)),
        (BOXED, lenient.score, ("boxed",)),
        ("Problem {}. End with Answer: \\boxed{{x}}.", dapo.score, ("answer_line_boxed",)),
        ("Put it in \\boxed{{}}." + ANSWER_LINE, lenient.score, ("answer_line", "boxed")),
    ],
)
def test_matching_formats_pass(template, score, formats):
    assert check_contract(prompts(template), FakePool(score), "v") == formats


def test_boxed_prompts_with_the_dapo_verifier_are_refused():
    with pytest.raises(
        ValueError, match=r"(?s)'dapo' disagrees with the format .*\(boxed\).*unparsable.*Fix: "
    ) as caught:
        check_contract(prompts(BOXED, 5), FakePool(dapo.score), "dapo")
    assert "5 of 20 synthetic responses to 5 prompts" in str(caught.value)


def test_a_system_prompt_asking_for_another_format_is_noticed():
    template = "<system>Put your final answer within \\boxed{{}}.</system>" + ANSWER_LINE
    with pytest.raises(ValueError, match=r"\(answer_line, boxed\)"):
        check_contract(prompts(template), FakePool(dapo.score), "dapo")


def test_a_problem_that_mentions_boxes_is_no_instruction():
    texts = [ANSWER_LINE.format("with a \\boxed{term}")] + [ANSWER_LINE.format(i) for i in range(9)]
    assert set(instructed_formats(texts)) == {"answer_line"}


@pytest.mark.parametrize("outcome", ["correct", "wrong"])
def test_verifiers_that_say_the_same_of_everything_are_refused(outcome):
    from megatron_dapo.rewards.result import VerifierResult

    with pytest.raises(ValueError, match="disagrees"):
        check_contract(prompts(ANSWER_LINE), FakePool(lambda response, answer: VerifierResult(outcome)), "v")


def test_a_scorer_that_rewards_truncated_responses_is_refused():
    class Blind(FakePool):
        def score_many(self, items):
            return super().score_many([request._replace(is_truncated=False) for request in items])

    with pytest.raises(ValueError, match="truncated"):
        check_contract(prompts(ANSWER_LINE), Blind(dapo.score), "v")


def test_prompts_without_an_instruction_need_an_explicit_format():
    texts = [(f"What is {i}?", str(i)) for i in range(5)]
    with pytest.raises(ValueError, match="answer_format"):
        check_contract(texts, FakePool(dapo.score), "dapo")
    assert check_contract(texts, FakePool(dapo.score), "dapo", answer_format="answer_line") == ("answer_line",)
    assert check_contract(texts, FakePool(dapo.score), "dapo", answer_format="my answer: {answer}") == ("custom",)
    for bad in ("boxxed", "{reply}", "{answer"):
        with pytest.raises(ValueError, match="answer_format"):
            check_contract(texts, FakePool(dapo.score), "dapo", answer_format=bad)
