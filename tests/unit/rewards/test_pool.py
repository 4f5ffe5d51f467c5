from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from megatron_dapo.config.reward_schema import RewardConfig
from megatron_dapo.rewards.pool import dispatcher
from megatron_dapo.rewards.pool.pool import VerifierPool
from megatron_dapo.rewards.pool.repetition import repetition_numbers
from megatron_dapo.rewards.verifiers import dapo
from megatron_dapo.types import Repetition
from megatron_dapo.workers.process import worker_environment

TIMEOUT_S = 1.0
LENIENT_TIMEOUT_S = 2.0
BUSY_S = 20.0  # a busy machine may add this much
SECRET = "correct horse battery staple"


@pytest.fixture(scope="module")
def user_path():
    """Import path of `user_rewards` for the workers, which inherit this process's path."""
    directory = os.path.dirname(__file__)
    sys.path.insert(0, directory)
    yield directory
    sys.path.remove(directory)


@pytest.fixture(scope="module")
def user_pool(user_path):
    os.environ["MY_API_TOKEN"] = SECRET
    try:
        with VerifierPool(
            "user_rewards:by_command", RewardConfig(num_workers=2, timeout_seconds=TIMEOUT_S, memory_limit_mb=512)
        ) as pool:
            yield pool
    finally:
        del os.environ["MY_API_TOKEN"]


@pytest.fixture(scope="module")
def patient_pool(user_path):
    """A pool with a generous time limit, for answers that end by themselves on a busy host."""
    with VerifierPool(
        "user_rewards:by_command", RewardConfig(num_workers=2, timeout_seconds=60.0, memory_limit_mb=128)
    ) as pool:
        yield pool


@pytest.fixture(scope="module")
def dapo_pool():
    with VerifierPool("dapo", RewardConfig(num_workers=2, timeout_seconds=5.0)) as pool:
        yield pool


@pytest.fixture(scope="module")
def lenient_pool():
    with VerifierPool("lenient", RewardConfig(num_workers=2, timeout_seconds=LENIENT_TIMEOUT_S)) as pool:
        yield pool


def from_main_thread(pool, items):
    return pool.score_many(items)


def from_worker_thread(pool, items):
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(pool.score_many, items).result(timeout=60)


CALLERS = [from_main_thread, from_worker_thread]


def score_one(pool, response, answer="42", caller=from_main_thread):
    started = time.monotonic()
    score = caller(pool, [("only", response, answer, False)])["only"]
    return score, time.monotonic() - started


# ---- ordinary scoring


def test_agrees_with_the_verifier_itself(dapo_pool):
    generator = random.Random(0)
    forms = ["Answer: {}", "Answer: \\boxed{{{}}}", "{}", "Answer: {}.", "answer:  x={}"]
    items = [
        (
            i,
            "Thoughts. " * 200 + generator.choice(forms).format(generator.randrange(5)),
            str(generator.randrange(5)),
            False,
        )
        for i in range(3000)
    ]
    scores = dapo_pool.score_many(items)
    assert list(scores) == [key for key, *_ in items]
    for key, response, answer, _ in items:
        result = dapo.score(response, answer)
        assert (scores[key].outcome, scores[key].extracted) == (result.outcome, result.extracted)
        assert scores[key].accuracy == float(result.outcome == "correct")
        assert scores[key].reward == (1.0 if result.outcome == "correct" else -1.0)
    assert {score.outcome for score in scores.values()} == {"correct", "wrong", "unparsable"}


def test_truncated_responses_are_never_correct(dapo_pool):
    score = dapo_pool.score_many([("t", "Answer: 42", "42", True)])["t"]
    assert (score.accuracy, score.reward, score.outcome) == (0.0, -1.0, "truncated")


def test_version_and_reward_map():
    with VerifierPool("dapo", RewardConfig(correct=1.0, incorrect=0.0)) as pool:
        scores = pool.score_many([("a", "Answer: 1", "1", False), ("b", "Answer: 2", "1", False), ("c", "", "1", True)])
        assert pool.version == "dapo-1"
    assert [scores[key].reward for key in "abc"] == [1.0, 0.0, 0.0]


def test_a_variable_that_is_not_set_is_named(monkeypatch, caplog):
    monkeypatch.setenv("PRESENT_KEY", "1")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    reward = RewardConfig(environment=("JUDGE_KEY", "PRESENT_KEY"))
    with VerifierPool("dapo", reward):
        pass
    assert [message for message in caplog.messages if "_KEY" in message] == [
        "JUDGE_KEY: not set in this shell, so that verifier dapo does not get it (reward.environment, key_variable)"
    ]


def test_no_items(dapo_pool):
    assert dapo_pool.score_many([]) == {}


def test_repeated_keys_are_refused(dapo_pool):
    with pytest.raises(ValueError, match="2 items have only 1 different keys"):
        dapo_pool.score_many([("a", "", "", False), ("a", "", "", False)])


def test_any_text_survives_the_pipe(user_pool):
    text = "line\n\r\u2028\x00\ud800 \U0001f600 " + "x" * 300_000
    assert user_pool.score_many([("k", f"say {text}", text, False)])["k"].outcome == "correct"


def test_user_rewards_are_kept_as_they_are(user_pool):
    score, _ = score_one(user_pool, "reward 0.75")
    assert (score.accuracy, score.reward, score.outcome) == (1.0, 0.75, "correct")


def test_concurrent_calls_do_not_mix(dapo_pool):
    def call(number):
        items = [(i, f"Answer: {number}", str(number if i % 2 else number + 1), False) for i in range(200)]
        scores = dapo_pool.score_many(items)
        return all(scores[i].accuracy == float(i % 2) and scores[i].extracted == str(number) for i in range(200))

    with ThreadPoolExecutor(16) as executor:
        assert all(executor.map(call, range(64)))


def test_a_small_call_does_not_wait_for_a_large_one(user_pool):
    large = user_pool.submit([(i, "sleep 0.01", "", False) for i in range(200)])
    assert score_one(user_pool, "say 42")[0].outcome == "correct"
    assert not large.done()
    large.result()


def test_gold_answers_are_validated_in_the_workers(dapo_pool, lenient_pool):
    assert set(dapo_pool.validate_answers(["42", "", "42", "\\frac{1}{2}", " "])) == {"", " "}
    problems = lenient_pool.validate_answers(["42", "\\frac{1}{"])
    assert "cannot parse" in problems.pop("\\frac{1}{")
    assert problems == {}


# ---- hostile answers

TIMEOUTS = ["sleep 600", "spin", "tower", "catastrophe", "ignore_signals", "leave_child"]
ERRORS = ["hog", "hog_slowly", "os_exit 0", "os_exit 7", "sys_exit", "kill", "raise it", "nan", "forge", "recurse"]


def test_every_timeout_is_killed_in_time(user_pool):
    items = [(command, command, "42", False) for command in TIMEOUTS] + [("fine", "say 42", "42", False)]
    started = time.monotonic()
    scores = user_pool.score_many(items)
    # They share two workers, so they run one after the other on each.
    assert time.monotonic() - started < len(TIMEOUTS) / 2 * TIMEOUT_S + BUSY_S
    assert [scores[command].outcome for command in TIMEOUTS] == ["timeout"] * len(TIMEOUTS)
    assert all(scores[command].accuracy == 0.0 and scores[command].reward == -1.0 for command in TIMEOUTS)
    assert scores["fine"].outcome == "correct"


@pytest.mark.parametrize(("caller", "command"), list(zip(CALLERS, ["sleep 600", "tower", "spin"])))
def test_one_answer_returns_within_its_deadline(user_pool, caller, command):
    score, seconds = score_one(user_pool, command, caller=caller)
    assert score.outcome == "timeout"
    assert TIMEOUT_S <= seconds < TIMEOUT_S + BUSY_S


@pytest.mark.parametrize("caller", CALLERS)
def test_errors_are_not_wrong_answers(patient_pool, caller):
    items = [(command, command, "42", False) for command in ERRORS]
    items += [(i, f"say {i % 3}", "1", False) for i in range(30)]
    scores = caller(patient_pool, items)
    assert {command: scores[command].outcome for command in ERRORS} == dict.fromkeys(ERRORS, "error")
    assert all(scores[command].accuracy == 0.0 and scores[command].detail["error"] for command in ERRORS)
    assert [scores[i].accuracy for i in range(30)] == [float(i % 3 == 1) for i in range(30)]


def test_error_messages(patient_pool):
    scores = patient_pool.score_many(
        [(command, command, "", False) for command in ("hog", "os_exit 7", "raise it", "nan")]
    )
    assert "memory limit" in scores["hog"].detail["error"]
    assert "exit status 7" in scores["os_exit 7"].detail["error"]
    assert scores["raise it"].detail["error"].startswith("KeyError: 'it' in by_command (user_rewards")
    assert "finite" in scores["nan"].detail["error"]


PATHOLOGICAL = [
    "5^5^5^5^5^5",
    "5^{5^{5^{5^{5^{5}}}}}",
    "(10^{10})!^{10!}",
    "9" * 1999,
    "((((" * 400,
    "\\frac" * 300,
]


def test_pathological_answers_of_math_verify(lenient_pool):
    items = [(pred, f"\\boxed{{{pred}}}", "7", False) for pred in PATHOLOGICAL]
    started = time.monotonic()
    scores = lenient_pool.score_many(items)
    # Without the pool's limit some of them would take hours; a busy machine takes a few seconds longer than an idle one.
    assert time.monotonic() - started < len(items) * LENIENT_TIMEOUT_S + BUSY_S
    assert all(score.accuracy == 0.0 for score in scores.values())
    assert scores[PATHOLOGICAL[1]].outcome == "timeout"
    assert score_one(lenient_pool, "\\boxed{7}", "7")[0].outcome == "correct"


def test_an_answer_whose_process_was_killed_from_outside_is_scored_again(user_path):
    with VerifierPool("user_rewards:by_command", RewardConfig(timeout_seconds=20.0)) as pool:
        # The process that scores; its parent, the supervisor, ends as it does.
        (supervisor,) = pool._dispatcher._workers
        (worker,) = psutil.Process(supervisor.process.pid).children()
        waiting = pool.submit([("slow", "sleep 0.5", "", False), ("next", "say 42", "42", False)])
        time.sleep(0.2)
        worker.kill()
        assert [score.outcome for score in waiting.result().values()] == ["correct", "correct"]
        assert (pool.counts["killed"], pool.counts["crashed"]) == (0, 1)
        assert not waiting.result()["slow"].is_lost


def test_an_answer_whose_processes_are_killed_again_and_again_has_no_score_and_names_the_cause(user_path, monkeypatch):
    """The kernel's counter of OOM kills stands in for the kernel."""
    kills = iter([7, 9])
    monkeypatch.setattr(dispatcher, "oom_kills", lambda: next(kills))
    with VerifierPool("user_rewards:by_command", RewardConfig(timeout_seconds=20.0)) as pool:
        score, _ = score_one(pool, "sigkill")
        assert pool.counts["crashed"] == 3 and score.is_lost and score.outcome == "error"
        assert score.failure == (
            "the verifier process was killed by signal 9 (SIGKILL) 3 times, not by this run; out of memory: the kernel has "
            "killed 2 processes of this machine since the pool began"
        )
        # The answer's own doing is no excuse.
        assert not score_one(pool, "kill")[0].is_lost and not score_one(pool, "raise")[0].is_lost


def test_a_function_that_forks_replies_once(user_path):
    with VerifierPool("user_rewards:by_command", RewardConfig(timeout_seconds=20.0)) as pool:
        scores = pool.score_many([(index, "fork 42", "42", False) for index in range(20)])
        assert {score.outcome for score in scores.values()} == {"correct"}
        assert pool.counts["crashed"] == 0


def test_the_clock_starts_with_the_worker_not_with_the_call(user_path):
    """Three answers of 0.8 s after each other on one worker: queued for longer than the deadline, but all in time."""
    with VerifierPool("user_rewards:by_command", RewardConfig(timeout_seconds=2.0)) as pool:
        scores = pool.score_many([(i, "sleep 0.8", "", False) for i in range(3)])
    assert [score.outcome for score in scores.values()] == ["correct"] * 3


def test_answers_sent_ahead_to_a_stalled_worker_go_to_others(user_path):
    """Fast answers make the pool send ahead; a slow one among them must not hold up what was sent after it."""
    with VerifierPool("user_rewards:by_command", RewardConfig(num_workers=2, timeout_seconds=8.0)) as pool:
        pool.score_many([(i, "reward 1", "", False) for i in range(400)])
        commands = ["reward 1"] * 400
        commands[200] = "sleep 600"
        scoring = [pool.submit([("only", command, "", False)]) for command in commands]
        outcomes = [call.result()["only"].outcome for i, call in enumerate(scoring) if i != 200]
        assert not scoring[200].done()
        assert outcomes == ["correct"] * 399
        assert scoring[200].result()["only"].outcome == "timeout"


def test_workers_see_no_secrets(user_pool):
    score, _ = score_one(user_pool, "environment")
    assert SECRET not in str(score.detail)
    assert set(score.detail) <= set(worker_environment(os.environ)) | {"LC_CTYPE"}
    assert score.detail["OMP_NUM_THREADS"] == "1"


def test_a_named_variable_reaches_the_workers(user_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "for the judge")
    with VerifierPool(
        "user_rewards:by_command", RewardConfig(timeout_seconds=20.0, environment=("JUDGE_API_KEY",))
    ) as pool:
        assert score_one(pool, "environment")[0].detail["JUDGE_API_KEY"] == "for the judge"


def test_killed_workers_are_replaced_and_reaped(user_path):
    others = {child.pid for child in _workers()}
    with VerifierPool("user_rewards:by_command", RewardConfig(num_workers=2, timeout_seconds=1.0)) as pool:
        pool.score_many([("a", "spin", "", False), ("b", "os_exit 1", "", False), ("c", "leave_child", "", False)])
        assert (pool.counts["killed"], pool.counts["crashed"]) == (2, 1)
        # Two new workers with their supervisors, and nothing left of the three old ones, not even in the process table.
        assert len(wait_for_workers(others, 4)) == 4
        assert score_one(pool, "say 42")[0].outcome == "correct"


def _workers():
    return psutil.Process().children(recursive=True)


def wait_for_workers(others: set[int], number: int) -> set[int]:
    """Wait until there are `number` processes besides `others`; return them, or those there are after 20 s."""
    deadline = time.monotonic() + 20
    while len(left := {child.pid for child in _workers()} - others) != number and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


# ---- hostile functions


@pytest.fixture
def adopted(user_path):
    """Ids of this process's children; orphans that escape a worker and its supervisor become its children, too."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield {child.pid for child in _workers()}
    prctl(36, 0, 0, 0, 0)


@pytest.mark.parametrize("ending", ["answer", "spin"])
def test_a_process_in_a_session_of_its_own_ends_with_its_worker(adopted, ending):
    """Forked twice, with a session of its own: no signal to the worker's group reaches it."""
    with VerifierPool("user_rewards:by_command", RewardConfig(timeout_seconds=2.0)) as pool:
        score, _ = score_one(pool, f"daemon {ending}")
        assert score.outcome == ("correct" if ending == "answer" else "timeout")
        if ending == "answer":  # supervisor, worker, the fork between (which nobody collected), and the daemon live on
            assert len(wait_for_workers(adopted, 4)) == 4
    assert not wait_for_workers(adopted, 0)


def test_a_fork_bomb_is_bounded_and_leaves_nothing(adopted):
    most = 0
    with VerifierPool("user_rewards:by_command", RewardConfig(timeout_seconds=30.0, max_processes=16)) as pool:
        scoring = pool.submit([("bomb", "bomb", "", False)])
        while not scoring.done():
            most = max(most, len(_workers()))
            time.sleep(0.02)
        score = scoring.result()["bomb"]
        assert score.outcome == "error" and "more than reward.max_processes processes" in score.detail["error"]
        assert score_one(pool, "say 42")[0].outcome == "correct"
    assert not wait_for_workers(adopted, 0)
    assert most < 200


def test_a_file_of_ten_gigabytes_ends_at_the_limit(user_path, tmp_path):
    with VerifierPool("user_rewards:by_command", RewardConfig(timeout_seconds=60.0, file_limit_mb=8)) as pool:
        score, _ = score_one(pool, f"big_file {tmp_path / 'file'}")
    assert score.outcome == "error" and "File too large" in score.detail["error"]
    assert (tmp_path / "file").stat().st_size <= 8 * 2**20


def test_a_stopped_supervisor_is_continued_to_end_everything(adopted):
    with VerifierPool("user_rewards:by_command", RewardConfig(timeout_seconds=2.0)) as pool:
        assert score_one(pool, "stop_parent")[0].outcome == "timeout"
    assert not wait_for_workers(adopted, 0)


def test_the_kernel_limits_the_time_of_work(user_path):
    """A worker without a pool and without its own alarm."""
    code = (
        "from megatron_dapo.rewards.pool import worker\n"
        "worker._THREADS, worker.signal.setitimer = 0.1, lambda *_: None\n"
        "worker.main()"
    )
    limits = {"timeout_s": 1.0, "memory_limit_mb": 1024, "file_limit_mb": 1, "max_processes": 8}
    task = {"id": 0, "operation": "score", "response": "spin", "answer": ""}
    lines = [json.dumps(line).encode() for line in ({"verifier": "user_rewards:by_command", **limits}, task)]
    environment = worker_environment(os.environ)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        process.stdin.write(b"\n".join(lines) + b"\n")
        process.stdin.flush()
        assert process.wait(60) == -signal.SIGXCPU


# ---- life


def test_a_verifier_that_does_not_load_is_refused_immediately(user_path):
    for name, message in [
        ("dappo", "choose one of code, dapo, dapo_boxed, format, judge, lenient, remote, reward_model"),
        ("no_such_module:f", "no_such_module"),
        ("user_rewards:no_such_function", "no_such_function"),
    ]:
        with pytest.raises(ValueError, match=message):
            VerifierPool(name, RewardConfig())


def test_too_little_memory_is_said_at_the_start():
    with pytest.raises(ValueError, match="did not start.*[Mm]emory|ended before it was ready"):
        VerifierPool("lenient", RewardConfig(memory_limit_mb=48))


def test_closing_fails_pending_answers_and_kills_the_workers(user_path):
    before = {child.pid for child in _workers()}
    pool = VerifierPool("user_rewards:by_command", RewardConfig(num_workers=2, timeout_seconds=60.0))
    waiting = pool.submit([("a", "spin", "", False)])
    workers = wait_for_workers(before, 4)  # workers and their supervisors
    assert len(workers) == 4
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        waiting.result(timeout=30)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score_many([("a", "say 1", "1", False)])
    assert not workers & {child.pid for child in _workers()}


def test_a_thread_that_ends_takes_no_worker_with_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(VerifierPool("dapo", RewardConfig())))
    thread.start()
    thread.join()
    with made[0] as pool:
        time.sleep(0.1)
        assert score_one(pool, "Answer: 42")[0].outcome == "correct"
        assert pool.counts["started"] == 1


def cpu_seconds():
    """CPU time of this process and its workers."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def test_throughput_of_simple_answers():
    """The target is 5,000 answers a second on two free cores. The bound is in CPU time, which a busy host does not change."""
    response = "Let me think step by step. " * 1000
    items = [(i, f"{response}\nAnswer: {i}", str(i), False) for i in range(2000)]
    with VerifierPool("dapo", RewardConfig(num_workers=2)) as pool:
        pool.score_many(items[:2])
        started = cpu_seconds()
        scores = pool.score_many(items)
        rate = len(items) / (cpu_seconds() - started)
    assert all(score.accuracy == 1.0 for score in scores.values())
    assert rate > 1000, f"{rate:.0f} answers a second of one core"


def test_repetition_is_measured_in_the_workers(dapo_pool):
    responses = {"loop": list(range(25)) * 40, "fresh": list(range(900)), "empty": []}
    found = dapo_pool.measure_repetition({key: np.array(tokens, np.int32) for key, tokens in responses.items()})
    assert found == {key: Repetition(*repetition_numbers(tokens)) for key, tokens in responses.items()}
    assert (found["loop"].loop_period, found["loop"].loop_repeats) == (25, 40) and found["loop"].ngram > 0.9


def test_a_response_that_no_worker_could_measure_is_measured_here(user_path):
    with VerifierPool("user_rewards:by_command", RewardConfig(timeout_seconds=60.0, memory_limit_mb=40)) as pool:
        found = pool.measure_repetition({"a": np.array([7, 8] * 30, np.int32)})
    assert (found["a"].loop_period, found["a"].loop_repeats) == (2, 30)
