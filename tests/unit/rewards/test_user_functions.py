"""A user's own reward: a function of a sample, typed results, asynchronous functions, files by their path."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.build import self_test
from megatron_dapo.rewards.pool.pool import VerifierPool, score_request
from megatron_dapo.rewards.pool.worker import answer, answer_batch
from megatron_dapo.rewards.verifiers.verifier import load_verifier
from megatron_dapo.types import Completion, Prompt

CODE = """
import asyncio, os, time
from dataclasses import dataclass
from megatron_dapo.rewards.result import RewardResult

def length(sample):
    return -abs(len(sample.response) - sample.extra_info["wanted"]) / 10

def everything(sample):
    question = sample.messages[-1]["content"]
    facts = [question, sample.response, sample.answer, sample.data_source, sample.extra_info["tests"][0], sample.finish_reason]
    return {"accuracy": 1, "detail": {"facts": facts, "index": sample.group_index}}

def in_parts(sample):
    return RewardResult(parts={"style": 0.25, "right": 0.5}, extracted=7, is_correct=sample.response == "right")

def uneven(sample):
    return RewardResult(score=1.0, parts={"style": 0.25})

def fields(sample):
    return {"score": 2.0, "is_correct": False}

def pair(response, answer="", more=3):
    return response == answer

def scalar(sample):
    import numpy as np
    kinds = {"float32": np.float32(0.75), "int64": np.int64(2), "bool": np.bool_(True), "array": np.array(0.25)}
    return kinds[sample.response]

def array(samples):
    import numpy as np
    return np.arange(len(samples), dtype=np.float32)

def of_trl(prompts, completions, wanted, **columns):
    assert prompts[0][-1]["content"] == "2 + 2?" and set(columns) >= {"answer", "tests", "data_source"}
    return [len(one[0]["content"]) / wanted[i] for i, one in enumerate(completions)]

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth
    return {"score": 1.5 if right else -0.5, "acc": right, "pred": solution_str + data_source + str(extra_info["wanted"])}

async def of_trl_later(completions, completion_ids, **columns):
    await asyncio.sleep(0)
    return [float(len(ids)) for ids in completion_ids]

def swapped(answer, response):
    return 1.0

def three(a, b, c):
    return 1.0

async def judge(sample):
    if sample.response == "late":
        await asyncio.sleep(60)
    if sample.response == "block":
        time.sleep(60)
    if sample.response == "bad":
        raise KeyError("verdict")
    await asyncio.sleep(0.5)
    return sample.response == sample.answer

async def judge_pair(response, answer):
    return response == answer

def batch(samples):
    for sample in samples:
        if sample.response == "hang":
            time.sleep(600)
        if sample.response == "exit":
            os._exit(3)
        if sample.response == "memory":
            raise MemoryError
        if sample.response == "raise":
            raise KeyError("all of them")
    marks = [len(samples) for sample in samples]
    return [None if sample.response == "none" else RewardResult(score=size, is_correct=sample.response == "right")
            for size, sample in zip(marks, samples)]

async def batch_later(samples):
    await asyncio.sleep(60 if any(sample.response == "late" for sample in samples) else 0.3)
    return [float(len(samples))] * len(samples)

def too_few(samples):
    return [1.0]

def tokens(sample):
    return {"accuracy": 1, "detail": {"tokens": list(sample.token_ids)}}
"""
FIELDS = {
    "messages": [{"role": "user", "content": "2 + 2?"}],
    "data_source": "sums",
    "extra_info": {"wanted": 5, "tests": ["assert f(1)"]},
    "finish_reason": "stop",
    "group_index": 3,
}


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_reward.py"
    path.write_text(CODE)
    return str(path)


def items(*responses: str, answer: str = "right", is_truncated: bool = False) -> list:
    return [(number, response, answer, is_truncated, FIELDS) for number, response in enumerate(responses)]


def test_a_function_of_a_sample_gets_the_row(own: str) -> None:
    with VerifierPool(f"{own}:everything", RewardConfig()) as pool:
        assert pool.takes_sample and pool.validate_answers([""]) == {}
        score = pool.score_many(items("four", answer="4"))[0]
    assert score.accuracy == 1.0 and score.detail["index"] == 3
    assert score.detail["facts"] == ["2 + 2?", "four", "4", "sums", "assert f(1)", "stop"]


def test_a_number_is_the_reward(own: str) -> None:
    with VerifierPool(f"{own}:length", RewardConfig()) as pool:
        scores = pool.score_many(items("12345", "1234567"))
    assert [scores[0].reward, scores[1].reward] == [0.0, -0.2] and scores[0].accuracy == 0.0


def test_scalars_and_arrays_of_numpy_are_rewards(own: str) -> None:
    with VerifierPool(f"{own}:scalar", RewardConfig()) as pool:
        scores = pool.score_many(items("float32", "int64", "bool", "array"))
    assert [(scores[i].reward, scores[i].accuracy) for i in range(4)] == [(0.75, 1.0), (2.0, 1.0), (1.0, 1.0), (0.25, 0.0)]
    with VerifierPool(f"{own}:array", RewardConfig(batch_size=3)) as pool:
        assert {score.outcome for score in pool.score_many(items("a", "b", "c")).values()} <= {"correct", "wrong"}


def test_the_self_test_tries_a_function_of_batches_with_two(own: str) -> None:
    with VerifierPool(f"{own}:too_few", RewardConfig(batch_size=4)) as pool:
        with pytest.raises(ValueError, match="2 times: ValueError: .*returns a list of 2 results; got 1"):
            self_test(RewardConfig(), None, pool, [Prompt("p", ({"role": "user", "content": "?"},), (1,), "4")])


def test_functions_of_trl_and_verl_are_called_as_there(own: str) -> None:
    with VerifierPool(f"{own}:of_trl", RewardConfig(batch_size=2)) as pool:
        scores = pool.score_many(items("12345", "1234567890"))
    assert [scores[i].reward for i in range(2)] == [5 / FIELDS["extra_info"]["wanted"], 10 / FIELDS["extra_info"]["wanted"]]
    with VerifierPool(f"{own}:of_verl", RewardConfig()) as pool:
        scores = pool.score_many(items("right", "wrong"))
    assert [(scores[i].reward, scores[i].accuracy) for i in range(2)] == [(1.5, 1.0), (-0.5, 0.0)]
    assert scores[1].extracted == f"wrong{FIELDS['data_source']}{FIELDS['extra_info']['wanted']}"
    with VerifierPool(f"{own}:of_trl_later", RewardConfig(token_ids=True)) as pool:
        assert pool.takes_token_ids
    with pytest.raises(ValueError, match=r"\(answer, response\): the response comes first"):
        VerifierPool(f"{own}:swapped", RewardConfig())


def test_parts_add_up_to_the_reward(own: str) -> None:
    with VerifierPool(f"{own}:in_parts", RewardConfig()) as pool:
        scores = pool.score_many(items("right", "wrong"))
    assert [(one.accuracy, one.reward, one.extracted) for one in scores.values()] == [
        (1.0, 0.75, "7"),
        (0.0, 0.75, "7"),
    ]
    assert scores[0].detail["parts"] == {"style": 0.25, "right": 0.5}
    with VerifierPool(f"{own}:uneven", RewardConfig()) as pool:
        score = pool.score_many(items("x"))[0]
    assert score.outcome == "error" and "the parts of a reward add up to 0.25, its score is 1" in score.detail["error"]


def test_fields_of_a_result_may_be_a_dict(own: str) -> None:
    with VerifierPool(f"{own}:fields", RewardConfig()) as pool:
        score = pool.score_many(items("x"))[0]
    assert (score.accuracy, score.reward) == (0.0, 2.0)


def test_a_response_that_was_cut_off_is_rewarded_but_never_right(own: str) -> None:
    with VerifierPool(f"{own}:in_parts", RewardConfig()) as pool:
        score = pool.score_many(items("right", is_truncated=True))[0]
    assert (score.accuracy, score.reward, score.outcome) == (0.0, 0.75, "truncated")
    with VerifierPool(f"{own}:pair", RewardConfig()) as pool:
        assert not pool.takes_sample
        score = pool.score_many(items("right", is_truncated=True))[0]
    assert (score.accuracy, score.reward, score.outcome) == (0.0, -1.0, "truncated")


def test_other_signatures_and_files_are_refused(own: str) -> None:
    with pytest.raises(
        ValueError, match=r"it takes a, b, c; write it as \(sample\), \(samples\) or as \(response, answer\)"
    ):
        VerifierPool(f"{own}:three", RewardConfig())
    with pytest.raises(ValueError, match="has no function 'four'"):
        VerifierPool(f"{own}:four", RewardConfig())
    with pytest.raises(ValueError, match="cannot import module"):
        VerifierPool(f"{own[:-3]}_not.py:length", RewardConfig())


def test_an_asynchronous_function_answers_many_at_a_time(own: str) -> None:
    with VerifierPool(f"{own}:judge", RewardConfig(concurrency=64)) as pool:
        start = time.monotonic()
        scores = pool.score_many(items(*["right", "wrong"] * 64))
        seconds = time.monotonic() - start
    assert [scores[number].accuracy for number in range(128)] == [1.0, 0.0] * 64
    # Two rounds of half a second; one after the other would take 64.
    assert seconds < 15, f"{seconds:.1f} s"
    with VerifierPool(f"{own}:judge_pair", RewardConfig()) as pool:
        assert pool.score_many(items("right"))[0].accuracy == 1.0


def test_a_late_answer_costs_no_process_and_an_error_is_its_own(own: str) -> None:
    with VerifierPool(f"{own}:judge", RewardConfig(timeout_seconds=2.0)) as pool:
        scores = pool.score_many(items("right", "late", "bad", "wrong"))
    assert [scores[number].outcome for number in range(4)] == ["correct", "timeout", "error", "wrong"]
    assert "KeyError: 'verdict'" in scores[2].detail["error"] and "no score in 2 s" in scores[1].detail["error"]
    assert (pool.counts["killed"], pool.counts["started"]) == (0, 1)


def test_an_asynchronous_function_that_blocks_is_killed(own: str) -> None:
    with VerifierPool(f"{own}:judge", RewardConfig(timeout_seconds=1.0)) as pool:
        assert pool.score_many(items("block"))[0].outcome == "timeout"
        assert pool.score_many(items("right"))[0].outcome == "correct"
        assert pool.counts["killed"] == 1


def test_a_function_of_samples_gets_batches(own: str) -> None:
    with VerifierPool(f"{own}:batch", RewardConfig(batch_size=8)) as pool:
        assert pool.takes_sample and pool.validate_answers([""]) == {}
        scores = pool.score_many(items(*["right", "wrong"] * 20))
    sizes = [scores[number].reward for number in range(40)]
    assert [scores[number].accuracy for number in range(40)] == [1.0, 0.0] * 20
    assert max(sizes) == 8 and sum(1 / size for size in sizes) < 12  # calls


def test_a_bad_result_is_the_error_of_its_own_sample(own: str) -> None:
    with VerifierPool(f"{own}:batch", RewardConfig(batch_size=4)) as pool:
        scores = pool.score_many(items("right", "none", "wrong"))
    assert [scores[number].outcome for number in range(3)] == ["correct", "error", "wrong"]
    assert "not NoneType" in scores[1].detail["error"]
    with VerifierPool(f"{own}:too_few", RewardConfig(batch_size=4)) as pool:
        scores = pool.score_many(items("right", "wrong"))
    assert {score.outcome for score in scores.values()} <= {"error", "correct"}
    assert any("returns a list of 2 results; got 1" in score.detail.get("error", "") for score in scores.values())


def test_a_failed_call_names_the_function_its_line_the_row_and_the_fix(own: str) -> None:
    lines = Path(own).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if 'sample.extra_info["wanted"]' in text)
    task = {"id": 1, "operation": "score", "response": "1 + 1", "answer": "4", "sample": sample_of("What is 2 + 2?", tests=["x"])}
    assert answer(load_verifier(f"{own}:length"), task)["detail"]["error"] == (
        f"KeyError: 'wanted' in length ({Path(own).name}, line {line}); row: prompt ...'What is 2 + 2?', answer '4'; "
        "sample.extra_info of this row has tests: use .get('wanted'), or add the column"
    )
    verifier = load_verifier(f"{own}:batch")
    bad = [{**task, "response": text} for text in ("right", "raise")]
    error = answer_batch(verifier, bad)[0]["detail"]["error"]
    assert error.startswith("KeyError: 'all of them' in batch (") and "a batch of 2 rows, the first with prompt ...'What" in error


def test_a_failed_call_names_the_variable_that_it_did_not_get(tmp_path: Path) -> None:
    (tmp_path / "graded.py").write_text("import os\n\ndef grade(response, answer):\n    return os.environ['NO_SUCH_JUDGE_KEY']\n")
    task = {"id": 1, "operation": "score", "response": "x", "answer": "4"}
    assert answer(load_verifier(f"{tmp_path}/graded.py:grade"), task)["detail"]["error"] == (
        "KeyError: 'NO_SUCH_JUDGE_KEY' in grade (graded.py, line 4); row: answer '4'; "
        'verifier processes get the variables that are named: reward.environment = ["NO_SUCH_JUDGE_KEY"]'
    )


def sample_of(question: str, **extra: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "data_source": "", "extra_info": extra, "finish_reason": "stop", "group_index": 0}


@pytest.mark.parametrize(("culprit", "outcome"), [("hang", "timeout"), ("exit", "error"), ("memory", "error")])
def test_a_sample_that_takes_its_batch_down_costs_itself_alone(own: str, culprit: str, outcome: str) -> None:
    with VerifierPool(f"{own}:batch", RewardConfig(batch_size=8, timeout_seconds=2.0)) as pool:
        scores = pool.score_many(items("right", "wrong", culprit, "right", "right"))
    assert [scores[number].outcome for number in range(5)] == ["correct", "wrong", outcome, "correct", "correct"]


def test_an_exception_is_the_error_of_the_batch(own: str) -> None:
    with VerifierPool(f"{own}:batch", RewardConfig(batch_size=8)) as pool:
        scores = pool.score_many(items("right", "raise"))
    assert "KeyError: 'all of them'" in scores[1].detail["error"]


def test_asynchronous_batches_run_at_a_time_and_are_late_together(own: str) -> None:
    with VerifierPool(f"{own}:batch_later", RewardConfig(batch_size=4, concurrency=64, timeout_seconds=2.0)) as pool:
        start = time.monotonic()
        scores = pool.score_many(items(*["x"] * 64))
        seconds = time.monotonic() - start
        late = pool.score_many(items("late", "x"))
    assert max(score.reward for score in scores.values()) == 4.0
    assert seconds < 16 * 0.3, f"{seconds:.1f} s"  # one batch after the other
    assert late[0].outcome == "timeout" and pool.counts["killed"] == 0


def test_token_ids_are_sent_on_request(own: str) -> None:
    completion = Completion("r", np.array([5, 7, 2]), np.zeros(3), "stop", ())
    prompt = Prompt("p", ({"role": "user", "content": "2 + 2?"},), (1,), "4")
    with VerifierPool(f"{own}:tokens", RewardConfig(token_ids=True)) as pool:
        score = pool.score_many([score_request("g/0", prompt, completion, "four", pool)])["g/0"]
    assert score.detail["tokens"] == [5, 7, 2]
    with VerifierPool(f"{own}:tokens", RewardConfig()) as pool:
        score = pool.score_many([score_request("g/0", prompt, completion, "four", pool)])["g/0"]
    assert score.outcome == "error" and "set reward.token_ids = true" in score.detail["error"]


def test_an_import_that_fails_says_what_mends_it(tmp_path: Path) -> None:
    (tmp_path / "key.py").write_text("import os\nKEY = os.environ['MY_SECRET_KEY']\ndef f(sample): return 1.0\n")
    with pytest.raises(ValueError, match=r'reward.environment = \["MY_SECRET_KEY"\]'):
        load_verifier(f"{tmp_path}/key.py:f")
    with pytest.raises(ValueError, match="install my_absent_package, or write path/to/file.py:function"):
        load_verifier("my_absent_package.rewards:f")
