"""The proof of the endpoint finds nothing, and finds each of the mistakes that endpoints make."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.engines.endpoint import agents, chat, tree
from megatron_dapo.proof.gateway.clients import _BEHAVIOR
from megatron_dapo.proof.gateway.run import prove_gateway
from megatron_dapo.rollout.episodes import engine, live_episode, stream
from tests.examples import examples


def test_random_sessions_have_no_violation() -> None:
    number = examples(256)
    result = CliRunner().invoke(app, ["prove-gateway", "--sessions", str(number), "--seed", "7", "--json"])
    proof = json.loads(result.output)
    assert (result.exit_code, proof["violations"], proof["sessions"]) == (0, [], number), proof
    assert {*_BEHAVIOR, "disconnect", "answered again"} <= proof["requests"].keys(), "each behavior occurs"
    assert proof["interruptions"] and proof["replayed"] and proof["lost_tokens"]
    assert proof["turns"] > 2 * number and proof["streams"] > 1.5 * number and proof["trained_tokens"] > proof["turns"]


# What an endpoint does wrong: where, and the change of the source that makes it so.
MISTAKES: dict[str, tuple[Any, str, str, str]] = {
    "an answered turn is extended again": (
        *(stream.EpisodeStreams, "observe"),
        *("if end < len(stream.token_ids):", "if False:"),
    ),
    "a branch forgets its context": (
        *(stream.EpisodeStreams, "observe"),
        *("self.context_after(turn) + token_ids", "token_ids"),
    ),
    "what was sampled is encoded again": (
        *(stream.EpisodeStreams, "context_after"),
        *("stream.token_ids[:end]", "(stream.token_ids[:end] % 256)"),
    ),
    "an interrupted turn is in the newest stream": (
        *(stream.EpisodeStreams, "completion"),
        *("streams[self._current] = streams[self._current]", "streams[-1] = streams[-1]"),
    ),
    "a turn of a branch is not trained": (
        *(stream._Stream, "with_turn"),
        *("order=order)", "trained=not self.reason, order=order)"),
    ),
    "a record is played again stream by stream": (
        *(live_episode, "recorded_turns"),
        *("record.ordered_turns", "sorted(record.ordered_turns, key=lambda pair: pair[0])"),
    ),
    "streams share random numbers": (engine, "_segment_seed", "if not segment:", "if True:"),
    "a branch goes on after the last turn": (
        *(agents.TurnLines, "line"),
        *("self._numbers[turn.parent]", "len(self._numbers) - 1"),
    ),
    "a new conversation extends the last one": (agents.TurnLines, "line", 'line["begins"] = turn.reason', "pass"),
    "a retry is sampled again": (tree.ConversationTree, "ask", "if turn.is_abandoned or", "if False and"),
    "a client that says it is a retry is not believed": (tree.ConversationTree, "ask", "(is_retry and", "(False and"),
    "every repeated request is a retry": (tree.ConversationTree, "ask", "(is_retry and", "(True and"),
    "other tools are the same context": (tree.ConversationTree, "ask", "_json(list(tools))", '""'),
    "of answers that are alike one is continued twice": (
        *(tree.ConversationTree, "_last_served"),
        *("(unfollowed or place.turns)[-1]", "place.turns[-1]"),
    ),
    "an id is an answer that is alike": (
        *(tree.ConversationTree, "_last_served"),
        *("after if after in place.turns else", ""),
    ),
    "conversations have no limit": (
        *(tree.ConversationTree, "_begin"),
        *("self.num_streams == self._max_streams", "False"),
    ),
    "an edited answer is taken for the served one": (
        *(tree, "_loose"),
        *("content.strip() if is_answer else content", '"" if is_answer else content'),
    ),
    "dropped reasoning is another history": (
        *(tree, "_loose"),
        *('message.get("name") or ""', 'message.get("reasoning_content") or ""'),
    ),
    "calls are not compared": (tree, "_loose", 'message.get("tool_calls") or ()', "()"),
    "a tool's result is dropped": (
        *(chat._Message, "plain"),
        *('"content": content}', '"content": content if self.role != "tool" else ""}'),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, right, wrong = MISTAKES[mistake]
    function = getattr(place, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{name} has changed: {right!r} is in it {source.count(right)} times"
    names = dict(vars(sys.modules[function.__module__]))
    exec("from __future__ import annotations\n" + source.replace(right, wrong), names)
    monkeypatch.setattr(place, name, names[name])
    if function is tree._CANONICAL["loose"]:
        monkeypatch.setitem(tree._CANONICAL, "loose", names[name])
    assert any(prove_gateway(32, seed).violations for seed in range(20)), "640 sessions do not show it"
