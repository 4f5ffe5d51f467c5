"""Scored samples: text, reward parts, and that a truncated response is never correct."""

from __future__ import annotations

import pytest

from megatron_dapo.rollout.scoring import FailureStreak, RewardsFailed, SampleScorer
from megatron_dapo.types import Completion, Prompt, Score, VersionRange, Window

PROMPT = Prompt("p", ({"role": "user", "content": "?"},), (1, 2), "7")


class Recorder:
    """A verifier that calls a response correct iff its text ends with the answer, and remembers what it saw."""

    def __init__(self, trusts_truncated: bool = False, forgets: str = "") -> None:
        self.items: list = []
        self._trusts_truncated = trusts_truncated
        self._forgets = forgets

    def score_many(self, items) -> dict:
        self.items = list(items)
        scores = {}
        for key, text, answer, cut, _ in self.items:
            right = text.endswith(answer) and (self._trusts_truncated or not cut)
            scores[key] = Score(float(right), 2.0 if right else -1.0, "correct" if right else "wrong")
        scores.pop(self._forgets, None)
        return scores


def sample(name: str, tokens: tuple[int, ...], reason: str = "stop") -> tuple[Prompt, Completion]:
    completion = Completion(name, tokens, (-1.0,) * len(tokens), reason, (VersionRange(0, len(tokens), 0),))
    return PROMPT, completion


def decode(tokens) -> str:
    return "".join(map(str, tokens))


def test_rewards_are_the_sum_of_named_parts() -> None:
    verifier = Recorder()
    scorer = SampleScorer(
        verifier, decode, {"overlong": lambda completion, text, score: -0.5 if completion.num_tokens > 2 else 0.0}
    )
    scored = scorer.score([sample("a", (5, 7)), sample("b", (5, 6, 7)), sample("c", (5,))])
    assert [item[:4] for item in verifier.items] == [("a", "57", "7", False), ("b", "567", "7", False), ("c", "5", "7", False)]
    assert scored["a"].reward_parts == {"verifier": 2.0, "overlong": 0.0}
    assert scored["b"].reward_parts == {"verifier": 2.0, "overlong": -0.5} and scored["b"].reward == 1.5
    assert scored["b"].score.accuracy == 1.0  # shaping never touches it
    assert scored["c"].reward == -1.0 and scored["c"].text == "5"


class Failing(Recorder):
    """Fails for every response but those whose text ends with the answer."""

    def score_many(self, items) -> dict:
        scores = super().score_many(items)
        failed = Score(0.0, -1.0, "error", detail={"error": "KeyError: 'tests'"})
        return {name: score if score.accuracy else failed for name, score in scores.items()}


def test_a_step_whose_rewards_all_fail_ends_the_run_with_the_first_reason() -> None:
    scorer = SampleScorer(Failing(), decode, streak=FailureStreak(4))
    scorer.score([sample(name, (5,)) for name in "abc"])
    scorer.score([sample("d", (7,))])  # one that is scored: the count begins again
    scorer.score([sample(name, (5,)) for name in "efg"])
    with pytest.raises(RewardsFailed, match=r"rewards of 4 responses in a row failed.*first: KeyError: 'tests'"):
        scorer.score([sample("h", (5,))])


def test_without_a_penalty_there_is_no_such_part() -> None:
    assert SampleScorer(Recorder(), decode).score([sample("a", (7,))])["a"].reward_parts == {"verifier": 2.0}


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_truncated_response_is_never_correct(reason: str) -> None:
    assert SampleScorer(Recorder(), decode).score([sample("a", (7,), reason)])["a"].score.accuracy == 0.0
    with pytest.raises(ValueError, match="truncated response is never correct"):
        SampleScorer(Recorder(trusts_truncated=True), decode).score([sample("a", (7,), reason)])


def test_a_missing_score_is_an_error() -> None:
    with pytest.raises(ValueError, match="no score for 1 of 2 responses, such as b"):
        SampleScorer(Recorder(forgets="b"), decode).score([sample("a", (7,)), sample("b", (7,))])


def test_a_response_that_continues_is_not_scored() -> None:
    verifier = Recorder()
    scored = SampleScorer(verifier, decode, {"overlong": lambda completion, text, score: -1.0}).unfinished(
        sample("a", (5, 6, 7), "abort")[1], Window(2, False)
    )
    assert scored.score == Score(0.0, 0.0, "unfinished") and scored.reward_parts == {} and scored.reward == 0.0
    assert scored.window == Window(2, False) and scored.text == "567" and verifier.items == []


def test_repetition_is_known_with_the_score() -> None:
    scorer = SampleScorer(Recorder(), decode)
    looping, fresh = sample("a", tuple(range(25)) * 3), sample("b", tuple(range(75)))
    scored = scorer.score([looping, fresh])
    # 56 20-grams, of which 25 differ: one for each token of the loop that they begin with.
    assert scored["a"].repetition.ngram == pytest.approx(1 - 25 / 56) and scored["b"].repetition.ngram == 0.0
    assert (scored["a"].repetition.loop_period, scored["a"].repetition.loop_repeats) == (25, 3)
    assert scored["b"].repetition.loop_repeats == 0
    assert scored["a"].repetition.zlib_ratio < scored["b"].repetition.zlib_ratio
    assert scorer.unfinished(looping[1], Window(0, False)).repetition == scored["a"].repetition
