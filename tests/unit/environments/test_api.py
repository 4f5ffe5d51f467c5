"""What a user writes, without processes."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_dapo.environments import AsyncClient, Client, EpisodeTask, Lost, ModelCall, ModelTurn, Reward, Step, tool, user
from megatron_dapo.environments.remote.api import checked_messages, final_step
from tests.unit.environments.user_environments import Calculator


def calculator(**limits) -> Calculator:
    environment = type("Limited", (Calculator,), limits)()
    environment.task = EpisodeTask({"answer": "4"}, 0, "")
    return environment


def step(environment, *calls: ModelCall, text: str = "", finish_reason: str = "stop") -> Step:
    return asyncio.run(environment.step(ModelTurn(text, calls, finish_reason)))


def call(expression: str) -> ModelCall:
    return ModelCall("calculate", {"expression": expression})


def test_calls_are_run_in_order_and_each_has_a_result():
    unknown = ModelCall("search", status="unknown_tool", message="Error: there is no tool 'search'.")
    result = step(calculator(), call("2 + 2"), call("1 / 0"), unknown, ModelCall("wait", {"seconds": 0.0}))
    assert [message["content"] for message in result.messages] == [
        "4",
        "Error: calculate failed: ZeroDivisionError: division by zero.",
        "Error: there is no tool 'search'.",
        "waited",
    ]
    assert {message["role"] for message in result.messages} == {"tool"}
    assert [(one.name, one.status) for one in result.calls] == [
        ("calculate", "ok"),
        ("calculate", "error"),
        ("search", "unknown_tool"),
        ("wait", "ok"),
    ]
    assert not result.done and result.reward is None


def test_a_turn_without_a_call_is_the_answer_and_a_cut_one_is_not():
    assert step(calculator(), text="4") == Step(done=True, reward=1.0, correct=True)
    assert step(calculator(), text="5") == Step(done=True, reward=0.0, correct=False)
    cut = step(calculator(), text="4", finish_reason="length")
    assert not cut.done and "cut" in cut.messages


@pytest.mark.parametrize(
    "late", [call("[0 for _ in iter(int, 1)]"), call("sleep(5)"), ModelCall("wait", {"seconds": 5.0})]
)
def test_a_tool_that_takes_too_long_is_told_to_the_model(late):
    environment, start = calculator(timeout_s=0.05), time.monotonic()
    result = step(environment, late)
    assert time.monotonic() - start < 3.0
    assert [one.status for one in result.calls] == ["timeout"]
    assert result.messages[0]["content"] == f"Error: {late.name} was stopped, it took too long: its limit is 0.05 s."
    # Only what waits outside of Python cannot be interrupted: its process must end.
    assert environment.is_stuck == ("sleep" in str(late.arguments))


def test_a_timeout_ends_or_loses_the_episode_if_the_recipe_says_so():
    late = ModelCall("wait", {"seconds": 5.0})
    end = step(calculator(timeout_s=0.01, on_timeout="end"), late)
    assert (end.done, end.reward, end.correct) == (True, 0.0, False)
    with pytest.raises(Lost, match="took too long"):
        step(calculator(timeout_s=0.01, on_timeout="lost"), late)


def test_tools_are_methods_and_functions():
    @tool
    def look(word: str) -> str:
        """Look a word up."""
        return word.upper()

    environment = calculator(tools=(look,))
    assert [schema["name"] for schema in environment.tool_schemas()] == ["calculate", "wait", "look"]
    assert step(environment, ModelCall("look", {"word": "a"})).messages[0]["content"] == "A"


class Scripted:
    """The other end of a client."""

    def __init__(self, *answers: str) -> None:
        self.replies: list[dict] = []
        self._answers = iter(answers)

    def __call__(self, reply):
        self.replies.append(dict(reply))
        return ModelTurn(next(self._answers))


def test_a_conversation_is_sent_by_what_is_new():
    model = Scripted("one", "two")
    client = Client(model)
    messages = [{"role": "system", "content": "s"}, user("q")]
    turn = client.chat(messages, tools=[Calculator.calculate])
    client.reward(0.5)
    client.chat([*messages, turn.message, user("more"), user("and more")])
    first, second = model.replies
    assert first["messages"] == messages and first["tools"][0]["name"] == "calculate"
    assert second == {"messages": [user("more"), user("and more")], "reward": 0.5, "after": 0}


def test_a_fork_follows_the_turn_that_it_was_made_after_and_a_fresh_one_none():
    model = Scripted("one", "two", "three", "four")
    client = Client(model)
    first = [user("q"), client.chat([user("q")], [Calculator.calculate]).message]
    fork, fresh = client.fork(), client.fresh("a search")
    client.chat([*first, user("more")])
    fork.chat([*first, user("else")])
    assert fresh.chat([user("find it")]).text == "four"
    said = [{name: reply.get(name) for name in ("after", "begins", "tools")} for reply in model.replies[1:]]
    nothing = {"after": None, "begins": None, "tools": None}
    assert said == [{**nothing, "after": 0}, {**nothing, "after": 0}, {**nothing, "begins": "a search", "tools": []}]
    with pytest.raises(ValueError, match="before the next one of any conversation"):
        client.reward(1.0)
    fresh.reward(1.0)
    assert client.final(0.5).reward == 1.5


def test_conversations_have_a_limit_and_those_at_the_same_time_an_order():
    model = Scripted(*"abcdefgh")

    async def rollout(client: AsyncClient) -> list[str]:
        first = [user("q"), (await client.chat([user("q")])).message]

        async def twice(fork: AsyncClient, name: str) -> str:
            messages = [*first, user(name)]
            turn = await fork.chat(messages)
            return turn.text + (await fork.chat([*messages, turn.message, user("more")])).text

        both = await asyncio.gather(twice(client.fork(), "1"), twice(client.fork(), "2"))
        with pytest.raises(ValueError, match="client.fork"):
            await asyncio.gather(twice(client, "3"), twice(client, "4"))
        with pytest.raises(ValueError, match="more than 3 conversations in one episode; raise environment.max_branches"):
            await client.fresh().chat([user("5")])
        return both

    assert asyncio.run(rollout(AsyncClient(Client(model, max_branches=3)))) == ["bd", "ce"]


def test_a_function_must_await_its_turns():
    has_begun, may_answer = threading.Event(), threading.Event()

    def exchange(reply):
        has_begun.set()
        assert may_answer.wait(60.0)
        return ModelTurn("late")

    client = Client(exchange)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(client.chat, [user("q")])
        assert has_begun.wait(60.0)
        with pytest.raises(ValueError, match="while another call waits"):
            client.fork().chat([user("q")])
        end = threads.submit(client.final, 1.0)
        may_answer.set()
        assert waiting.result().text == "late"
        error = end.exception()
    assert isinstance(error, ValueError) and "await every call" in str(error)


def test_figures_are_finite_numbers():
    task = EpisodeTask({}, 0, "")
    task.record(searches=2, found=False)
    task.record(searches=3)
    assert task.figures == {"searches": 3.0, "found": 0.0}
    for wrong in ("3", None, math.nan, [1]):
        with pytest.raises(ValueError, match="searches = .* is no finite number"):
            task.record(searches=wrong)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([user("other"), user("new")], "another history: message 0"),
        ([user("q"), {"role": "assistant", "content": "edited"}, user("new")], "another history: message 1"),
        ([user("q")], "another history: message 1"),
        ([user("q"), {"role": "assistant", "content": "one"}], "no new message"),
        ([{"role": "robot", "content": "x"}], "a message is"),
        ([user("q"), "text"], "a message is"),
    ],
)
def test_another_history_is_refused_in_one_line(messages, reason):
    client = Client(Scripted("one"))
    client.chat([user("q")])
    with pytest.raises(ValueError, match=reason) as error:
        client.chat(messages)
    assert "\n" not in str(error.value)


def test_values_that_users_return():
    assert final_step(0.5) == Step(done=True, reward=0.5)
    assert final_step(True) == Step(done=True, reward=1.0, correct=True)
    assert final_step(None) == Step(done=True)
    assert final_step(Reward(2, False, {"a": 1.0})) == Step(done=True, reward=2.0, correct=False, parts={"a": 1.0})
    assert checked_messages("text") == [user("text")]
    for wrong in ("1", [1], {}):
        with pytest.raises(ValueError, match="a reward is"):
            final_step(wrong)


def test_a_task_names_its_fields():
    task = EpisodeTask({"question": "q"}, 7, "")
    assert task["question"] == "q" and task.random.random() == EpisodeTask({}, 7, "").random.random()
    with pytest.raises(KeyError, match="the task has question"):
        task["answer"]
