"""The endpoint over real connections, with a source that answers by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from megatron_dapo.engines.endpoint.format import ChatAnswer
from megatron_dapo.engines.endpoint.server import ChatEndpoint, EpisodeOver
from megatron_dapo.engines.endpoint.tree import ServedTurn
from megatron_dapo.types import SamplingParams


class Script:
    """Answers turns in the order of the requests; a gate holds them back."""

    def __init__(self, *answers: ChatAnswer | Exception) -> None:
        self.answers, self.turns, self.gate = list(answers), [], asyncio.Event()
        self.lost: list[str] = []
        self.counted: list[tuple[Any, ...]] = []
        self.gate.set()

    async def sample(self, session: str, turn: ServedTurn, max_tokens: int | None) -> ChatAnswer:
        self.turns.append((session, turn, max_tokens))
        answer = self.answers.pop(0)
        await self.gate.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def count(self, messages: Any, tools: Any, after: ChatAnswer | None, begins_episode: bool) -> int:
        self.counted.append(([dict(message) for message in messages], len(tools), after and after.content, begins_episode))
        return 7

    def lose(self, session: str, reason: str) -> None:
        self.lost.append(f"{session}: {reason}")


def said(text: str, **fields: Any) -> ChatAnswer:
    return ChatAnswer(text, "stop", num_prompt_tokens=5, num_tokens=2, **fields)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


Post = Callable[..., Awaitable[tuple[int, Any]]]


def served(script: Script, body: Callable[[ChatEndpoint, str, Post], Awaitable[None]], **options: Any) -> None:
    """Run `body` against a server of one session, whose requests `post` makes."""

    async def run() -> None:
        endpoint = ChatEndpoint(script, SamplingParams(temperature=1.0), **options)
        key = endpoint.open("episode 7")
        runner = web.AppRunner(endpoint.application(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:

            async def post(
                messages: Any = None,
                key_: str = key,
                retries: int = 0,
                path: str = "/v1/chat/completions",
                key_in: str = "Authorization",
                **fields: Any,
            ) -> tuple[int, Any]:
                headers = {key_in: key_ if key_in == "x-api-key" else f"Bearer {key_}", "x-stainless-retry-count": str(retries)}
                body = {"model": "policy", **({} if messages is None else {"messages": messages}), **fields}
                async with client.post(path, json=body, headers=headers) as response:
                    text = await response.text()
                    return response.status, text if fields.get("stream") else json.loads(text)

            await body(endpoint, key, post)
        await runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_conversation_with_a_tool_is_one_stream() -> None:
    script = Script(said("", calls=(("add", '{"x": 1}'),)), said("done", reasoning="so"))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        status, first = await post([user("a")], tools=tools, max_tokens=9)
        assert status == 200 and first["choices"][0]["finish_reason"] == "tool_calls"
        assert first["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        answer = first["choices"][0]["message"]
        assert answer["content"] is None and answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "2"}
        status, second = await post([user("a"), answer, result], tools=tools)
        assert second["choices"][0]["message"] == {"role": "assistant", "content": "done", "reasoning_content": "so"}

    served(script, body)
    (session, first, most), (_, second, rest) = script.turns
    assert (session, most, rest) == ("episode 7", 9, None)
    assert second.parent is first and (first.stream, second.stream) == (0, 0)
    assert [dict(message) for message in second.messages] == [{"role": "tool", "tool_call_id": "call_0_0", "content": "2"}]


def test_a_stream_has_the_same_answer_in_events() -> None:
    script = Script(said("hi", calls=(("add", "{}"),)))

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        status, text = await post([user("a")], stream=True, stream_options={"include_usage": True})
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert status == 200 and events[-1] == "[DONE]"
        first, second, usage = (json.loads(event) for event in events[:-1])
        assert first["choices"][0]["delta"]["content"] == "hi"
        assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
        assert second["choices"][0]["finish_reason"] == "tool_calls"
        assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 7

    served(script, body)


def test_a_client_that_went_away_gets_the_answer_that_was_sampled_for_it() -> None:
    script = Script(said("sampled once"), said("next"))
    script.gate.clear()

    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        lost = asyncio.ensure_future(post([user("a")]))
        while not script.turns:
            await asyncio.sleep(0.01)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        while not script.turns[0][1].is_abandoned:
            await asyncio.sleep(0.01)
        script.gate.set()
        _, again = await post([user("a")])
        assert again["choices"][0]["message"]["content"] == "sampled once"
        _, other = await post([user("a")])
        assert other["choices"][0]["message"]["content"] == "next", "an answer that was delivered is not given twice"
        assert await post([user("a")], retries=1) == (200, other), "unless the client says that it did not read it"

    served(script, body)
    assert [turn.stream for _, turn, _ in script.turns] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.2}, "temperature = 0.2, but the run samples its policy at 1, and trains that; leave"),
        ({"n": 2}, "n = 2 is not supported; leave it out"),
        ({"logprobs": True}, "logprobs = true is not supported"),
        ({"seed": 3}, "seed: the run gives each episode its own"),
        ({"thinking": True}, "thinking is not a field that this endpoint knows"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "the last message is the assistant's"),
    ],
)
def test_a_request_that_the_run_does_not_serve_is_one_line(fields: dict[str, Any], message: str) -> None:
    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        status, answer = await post(**{"messages": [user("a")]} | fields)
        assert status == 400 and message in answer["error"]["message"], answer

    script = Script()
    served(script, body)
    assert not script.turns


def test_values_that_change_nothing_are_taken_and_other_sampling_is_ignored_on_request() -> None:
    async def body(endpoint: ChatEndpoint, key: str, post: Post) -> None:
        fields = {"temperature": 0.2, "n": 1, "tool_choice": "auto", "user": "me", "response_format": {"type": "text"}}
        assert (await post([user("a")], **fields))[0] == 200
        session = await endpoint.end(key)
        assert [text.split(" = ")[0] for text in session.ignored] == ["temperature"]
        assert (await post([user("a")]))[0] == 401, "the key of an episode that has ended"

    served(Script(said("a")), body, on_other_sampling="ignore")


def test_an_episode_without_budget_and_one_with_too_many_branches_say_so() -> None:
    async def body(_: ChatEndpoint, key: str, post: Post) -> None:
        status, answer = await post([user("a")])
        assert (status, answer["error"]["type"]) == (403, "episode_over") and "max_turns = 8" in answer["error"]["message"]
        assert (await post([user("a")])) == (status, answer), "a retry is no branch"
        assert (await post([user("b")], "wrong"))[0] == 401
        assert not script.lost
        status, answer = await post([user("b")])
        assert status == 403 and "more than 1 conversations" in answer["error"]["message"]
        assert script.lost == [f"episode 7: {answer['error']['message']}"]

    over = EpisodeOver("the episode has had its max_turns = 8 turns")
    script = Script(over, over)
    served(script, body, max_branches=1)
