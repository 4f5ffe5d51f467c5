from __future__ import annotations

import json
import random
from typing import Literal

import pytest

from megatron_dapo.data.template import PromptTemplate
from megatron_dapo.data.tool_calls import PARSERS, Tool, ToolCall, TurnParser
from megatron_dapo.data.turns import TurnTemplate
from megatron_dapo.environments.remote.schema import schema_of
from tests.examples import examples
from tests.unit.data.published_templates import WORDS, turn_template


def calculate(expression: str) -> str:
    """
    Compute an arithmetic expression.

    Args:
        expression: digits, + - * / ( )
    """
    return expression


def search(query: str, count: int = 3, order: Literal["new", "old"] = "new", tags: list[str] | None = None) -> str:
    """
    Find documents.

    Args:
        query: words
        count: number of documents
        order: of the documents
        tags: they must have
    """
    return query


TOOLS = (Tool(schema_of(calculate)), Tool(schema_of(search)))


def parser(name: str, tools=TOOLS, template: str = "qwen2_5") -> TurnParser:
    return TurnParser(name, turn_template(template), tools)


def parse(parser: TurnParser, text: str, finish_reason="stop"):
    turns = turn_template("qwen2_5")
    end = turns.stop_token_ids[:1] if finish_reason == "stop" else ()
    return parser.parse([*turns.template.encode(text), *end], finish_reason)


def hermes(name: str, arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def some_arguments(draw: random.Random) -> dict[str, object]:
    arguments: dict[str, object] = {"query": "".join(draw.choices([*WORDS, '"', "\\", "</tool_call", "\n"], k=5))}
    optional = {"count": draw.randint(-9, 9), "order": draw.choice(["new", "old"]), "tags": draw.choices(WORDS, k=2)}
    return arguments | {name: value for name, value in optional.items() if draw.random() < 0.5}


def test_calls_survive_the_way_through_text_and_ids():
    """Call -> text -> ids -> call, several in a turn, with the text around them."""
    draw = random.Random(0)
    for _ in range(examples(500)):
        calls = [ToolCall("search", some_arguments(draw)) for _ in range(draw.randint(1, 3))]
        text = "\n".join(hermes(call.name, call.arguments) for call in calls)
        turn = parse(parser("hermes"), f"Let me see.\n{text}")
        assert list(turn.calls) == calls
        assert turn.content == "Let me see." and not turn.is_cut


def test_a_truncated_call_is_never_run():
    """Cut at every character, by the length limit or by the model itself, a call is not run."""
    draw, hermes_parser = random.Random(1), parser("hermes")
    for _ in range(examples(500) // 10):
        text = hermes("search", some_arguments(draw))
        for end in range(len(text)):
            for finish_reason in ("length", "abort", "stop"):
                turn = parse(hermes_parser, text[:end], finish_reason)
                statuses = [call.status for call in turn.calls]
                assert statuses == (["unparsable"] if end >= len("<tool_call>") else []), (text[:end], statuses)
                assert all("Error: this is no tool call: " in call.message for call in turn.calls)
                assert turn.is_cut == (finish_reason != "stop")
    line = "calculate: 12*34"  # a part of it would be a call too
    for end in range(len(line) + 1):
        calls = parse(parser("line"), line[:end], "length").calls
        assert all(call.status == "unparsable" and "cut before its end" in call.message for call in calls)


def test_the_line_parser():
    turn = parse(
        parser("line"),
        'I compute.\ncalculate: 12 * (3+4)\n  search: {"query": "sum", "count": "5"}\nnote: calculate: 1',
    )
    assert list(turn.calls) == [
        ToolCall("calculate", {"expression": "12 * (3+4)"}),
        ToolCall("search", {"query": "sum", "count": 5}),
    ]
    assert turn.content == "I compute.\n\n\nnote: calculate: 1"
    (call,) = parse(parser("line"), "search: capital of France").calls
    assert call == ToolCall("search", {"query": "capital of France"})
    (call,) = parse(parser("line"), "calculate:").calls
    assert (call.status, call.message) == (
        "bad_arguments",
        "Error: calculate was not called, its arguments are wrong: expression: Field required.",
    )


def test_the_none_parser_makes_no_calls():
    turn = parse(parser("none"), hermes("calculate", {"expression": "1"}))
    assert turn.calls == () and "<tool_call>" in turn.content


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (hermes("add", {}), "unknown_tool", "Error: there is no tool 'add'. The tools are calculate, search."),
        (hermes("calculate", {}), "bad_arguments", "expression: Field required"),
        (hermes("calculate", {"expression": 1}), "bad_arguments", "expression: Input should be a valid string"),
        (hermes("calculate", {"expression": "1", "x": 2}), "bad_arguments", "x: Extra inputs are not permitted"),
        (hermes("calculate", ["1"]), "bad_arguments", "arguments: Input should be a valid dictionary"),
        (hermes("search", {"query": "x", "count": "many"}), "bad_arguments", "count: Input should be a valid integer"),
        (hermes("search", {"query": "x", "order": "up"}), "bad_arguments", "order: Input should be 'new' or 'old'"),
        ("<tool_call>calculate(1)</tool_call>", "unparsable", "not JSON"),
        ("<tool_call>[1]</tool_call>", "unparsable", 'it must be {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "calculate"}</tool_call>', "unparsable", "it must be"),
        ('<tool_call>{"name": "search", "arguments": {"query": "x", "count": NaN}}</tool_call>', "unparsable", "NaN"),
        (
            '<tool_call>{"name": "calculate", "arguments": {"expression": "\\ud800"}}</tool_call>',
            "unparsable",
            "surrogates",
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "unparsable", "recursion"),
    ],
)
def test_every_failure_has_a_status_and_a_text_for_the_model(text, status, message):
    (call,) = parse(parser("hermes"), text).calls
    assert call.status == status
    assert message in call.message
    assert call.message.startswith("Error: ") and "\n" not in call.message and len(call.message) < 500


def test_a_refused_call_has_a_text_too():
    call = ToolCall("calculate", {"expression": "1/0"}).failed("refused", "it is the ninth")
    assert call.status == "refused" and "calculate" in call.message and "it is the ninth" in call.message


def test_thinking_makes_no_calls():
    thought = f"<think>\nMaybe {hermes('calculate', {'expression': '1'})}?\n</think>\n\n"
    turn = parse(parser("hermes"), thought + hermes("calculate", {"expression": "2"}))
    assert [call.arguments for call in turn.calls] == [{"expression": "2"}]
    assert turn.reasoning.startswith("Maybe") and turn.content == ""
    assert parse(parser("hermes"), thought[:-20]).calls == ()  # the thought has no end
    # A prompt that opens the thought: the turn only closes it.
    opened = turn_template("qwen3_5_think")
    ids = opened.template.encode(thought.removeprefix("<think>\n") + "4")
    turn = TurnParser("hermes", opened, TOOLS).parse([*ids, opened.stop_token_ids[0]], "stop")
    assert (turn.calls, turn.content) == ((), "4")
    # No thought was opened: "</think>" in an argument is text.
    (call,) = parse(parser("hermes"), hermes("calculate", {"expression": "</think>"})).calls
    assert call.arguments == {"expression": "</think>"}


def test_the_parser_is_the_one_that_reads_the_template_s_calls(make_tokenizer):
    fitting = {
        name: parser("auto", template=name).name for name in ("qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "gemma3")
    }
    assert fitting == {
        "qwen2_5": "hermes",
        "qwen3": "hermes",
        "qwen3_5_think": "none",  # calls as XML
        "llama3_1": "none",
        "gemma3": "none",
    }
    assert parser("auto", tools=()).name == "none"
    plain = TurnTemplate(PromptTemplate(make_tokenizer(chat_template=None), "plain"), (0,))
    assert TurnParser("auto", plain, TOOLS).name == "none"
    with pytest.raises(ValueError, match="turns.parser 'xml' is not one of auto, hermes, line, none"):
        parser("xml")
    assert set(PARSERS) == {"hermes", "line", "none"}


def test_two_tools_with_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools have the same name"):
        parser("hermes", tools=(TOOLS[0], TOOLS[0]))


def test_arguments_have_the_schema_s_types():
    schema = {
        "name": "place",
        "parameters": {
            "type": "object",
            "properties": {
                "point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
                "weights": {"type": "object", "additionalProperties": {"type": "number"}},
                "path": {"type": "array", "items": {"type": ["integer", "string"]}},
                "schema": {"type": "string", "nullable": True},
                "_x": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "anything": {},
            },
            "required": ["point"],
        },
    }
    tool = Tool(schema)
    arguments = {
        "point": {"x": 1.5},
        "weights": {"a": 2.0},
        "path": [1, "b"],
        "schema": None,
        "_x": True,
        "anything": [{}],
    }
    assert tool.validate(arguments) == arguments
    assert tool.validate({"point": {"x": 1}}) == {"point": {"x": 1.0}}
    for wrong in (
        {"point": {"y": 1}},
        {"point": {"x": 1}, "path": [[]]},
        {"point": {"x": 1}, "weights": {"a": "b"}},
        {},
        None,
    ):
        with pytest.raises(ValueError):
            tool.validate(wrong)
    with pytest.raises(ValueError, match="'date' is no type of a JSON schema"):
        Tool({"name": "when", "parameters": {"properties": {"day": {"type": "date"}}}}).validate({})
