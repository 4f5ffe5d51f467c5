"""The tree of conversations; `tests/unit/proof/test_gateway.py` has random clients."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dapo.engines.endpoint.tree import ConversationTree, RequestError, ServedTurn, TooManyBranches

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def serve(tree: ConversationTree, messages: list[Message], text: str, **arguments: Any) -> ServedTurn:
    turn = tree.ask(messages, **arguments)
    tree.answered(turn, assistant(text))
    return turn


def test_a_conversation_that_grows_is_one_stream_of_deltas() -> None:
    tree = ConversationTree()
    first = serve(tree, [user("a")], "b")
    second = serve(tree, [user("a"), assistant("b"), user("c")], "d")
    third = tree.ask([user("a"), assistant("b"), user("c"), assistant("d"), {"role": "tool", "content": "e"}])
    assert [turn.stream for turn in (first, second, third)] == [0, 0, 0]
    assert [turn.parent for turn in (first, second, third)] == [None, first, second]
    assert second.messages == (user("c"),) and third.messages == ({"role": "tool", "content": "e"},)
    assert tree.num_streams == 1 and not third.reason


def test_a_second_continuation_is_a_branch_and_an_edited_answer_a_stream_of_its_text() -> None:
    tree = ConversationTree()
    first = serve(tree, [user("a")], "b")
    serve(tree, [user("a"), assistant("b"), user("c")], "d")
    branch = tree.ask([user("a"), assistant("b"), user("other")])
    assert (branch.parent, branch.stream, branch.begins_stream) == (first, 1, True)
    assert branch.reason == "another continuation of turn 0"
    edited = tree.ask([user("a"), assistant("B"), user("c")])
    assert (edited.parent, edited.stream, len(edited.messages)) == (None, 2, 3)
    assert edited.reason == "the client changed message 2 of 3 (assistant)"
    summary = tree.ask([user("summary of all that")])
    assert (summary.parent, summary.stream, summary.reason) == (None, 3, "a new conversation")


def test_a_request_that_was_abandoned_is_answered_once_and_parallel_ones_each() -> None:
    tree = ConversationTree()
    turn = tree.ask([user("a")])
    parallel = tree.ask([user("a")])
    assert parallel is not turn
    turn.is_abandoned = True
    assert tree.ask([user("a")]) is turn and not turn.is_abandoned, "the retry of a client that lost its connection"
    tree.answered(turn, assistant("b"))
    tree.answered(parallel, assistant("b"))
    assert tree.ask([user("a")], is_retry=True) is parallel, "its client says that it did not read the answer"
    followed = {tree.ask([user("a"), assistant("b"), user(text)]).parent for text in "xy"}
    assert followed == {turn, parallel}, "of answers that are alike, each is continued"
    assert tree.ask([user("a")], is_retry=True) is tree.turns[-1], "an answer that was continued has been read"


@pytest.mark.parametrize(
    "echoed",
    [
        {"role": "assistant", "content": [{"type": "text", "text": " b \n"}], "reasoning_content": "dropped"},
        {"role": "assistant", "content": "b", "tool_calls": [], "refusal": None},
    ],
)
def test_what_clients_change_in_passing_is_no_drift(echoed: Message) -> None:
    tree = ConversationTree()
    first = serve(tree, [user("a")], "b")
    assert tree.ask([user("a"), echoed, user("c")]).parent is first
    strict = ConversationTree(match="strict")
    serve(strict, [user("a")], "b")
    assert strict.ask([user("a"), echoed, user("c")]).reason == "the client changed message 2 of 3 (assistant)"


def test_arguments_of_a_call_are_compared_as_json_and_ids_are_not() -> None:
    def call(arguments: str, id_: str) -> Message:
        return assistant("") | {"tool_calls": [{"id": id_, "function": {"name": "add", "arguments": arguments}}]}

    tree = ConversationTree()
    turn = tree.ask([user("a")])
    tree.answered(turn, call('{"x": 1, "y": 2}', "call1"))
    result = {"role": "tool", "content": "3"}
    assert tree.ask([user("a"), call('{"y":2,"x":1}', "other"), result]).parent is turn
    assert tree.ask([user("a"), call('{"y":2,"x":3}', "call1"), result]).parent is None


def test_other_tools_are_another_context() -> None:
    tree = ConversationTree()
    serve(tree, [user("a")], "b", tools=[{"name": "add"}])
    other = tree.ask([user("a"), assistant("b"), user("c")])
    assert (other.parent, other.reason) == (None, "other tools")


def test_what_cannot_be_answered_is_one_line() -> None:
    tree = ConversationTree(max_streams=2)
    with pytest.raises(RequestError, match="messages is empty"):
        tree.ask([])
    with pytest.raises(RequestError, match="the last message is the assistant's"):
        tree.ask([user("a"), assistant("b")])
    serve(tree, [user("a")], "b")
    with pytest.raises(RequestError, match="a message of the role system cannot follow an answer"):
        tree.ask([user("a"), assistant("b"), {"role": "system", "content": "c"}])
    serve(tree, [user("a")], "c")
    with pytest.raises(TooManyBranches, match="more than 2 conversations"):
        tree.ask([user("a")])
    assert tree.ask([user("a"), assistant("b"), user("d")]).stream == 0, "what it has begun goes on"


def test_a_request_after_a_turn_is_not_a_retry_of_one_after_a_turn_that_is_alike() -> None:
    tree = ConversationTree()
    first, second = (serve(tree, [user("a")], "b") for _ in range(2))
    messages = [*first.conversation(), user("c")]
    abandoned = tree.ask(messages, after=first)
    abandoned.is_abandoned = True
    other = tree.ask(messages, after=second)
    assert (abandoned.parent, other.parent, abandoned.is_abandoned) == (first, second, True)
    assert tree.ask(messages, after=first) is abandoned
    tree.answered(other, assistant("d"))
    assert tree.ask(messages, after=second, is_retry=True) is other
    assert tree.ask(messages, after=first, is_retry=True) is abandoned
