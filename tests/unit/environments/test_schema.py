from __future__ import annotations

from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from megatron_dapo.environments.remote.schema import schema_of


def calculate(expression: str) -> str:
    """
    Compute an arithmetic expression.

    Args:
        expression: digits, + - * / ( )
    """


def search(
    query: str,
    count: int = 3,
    order: Literal["new", "old"] = "new",
    tags: Optional[list[str]] = None,  # noqa: UP045
    filters: dict[str, float] = {},  # noqa: B006
    at: Union[int, str] = 0,  # noqa: UP007
    plain: dict = {},  # noqa: B006
    exact: bool = False,
) -> str:
    """
    Find documents.

    Args:
        query: words, of which
            each must be there
        count: number of documents
        order: of the documents
        tags: they must have
        filters: bounds by name
        at: position
        plain: anything
        exact: every word

    Returns:
        Their titles.
    """


@pytest.mark.parametrize("function", [calculate, search])
def test_a_schema_is_that_of_transformers(function):
    expected = get_json_schema(function)["function"]
    del expected["return"]  # APIs of chat completions do not have it
    assert schema_of(function) == expected


def test_descriptions_of_parameters_are_optional():
    def wait(seconds: float, unit: Any = None) -> str:
        """Wait."""

    assert schema_of(wait) == {
        "name": "wait",
        "description": "Wait.",
        "parameters": {
            "type": "object",
            "properties": {"seconds": {"type": "number"}, "unit": {}},
            "required": ["seconds"],
        },
    }


def untyped(expression):
    """Compute."""


def undocumented(expression: str) -> str:
    return expression


def variadic(*words: str) -> str:
    """Find."""


def exotic(what: set[int]) -> str:
    """Find."""


def unknown(what: Nothing) -> str:  # noqa: F821
    """Find."""


REFUSED = [
    (untyped, "parameter 'expression' has no type; write for example \"expression: str\""),
    (undocumented, "has no docstring"),
    (variadic, r"parameter \*words: 'str' cannot be passed by its name"),
    (exotic, r"parameter 'what': set\[int\] is no type of JSON"),
    (unknown, "annotations cannot be read"),
]


@pytest.mark.parametrize(("function", "reason"), REFUSED, ids=[function.__name__ for function, _ in REFUSED])
def test_a_function_that_is_no_tool_is_refused_in_one_line(function, reason):
    with pytest.raises(ValueError, match=f"tool '{function.__name__}'.*{reason}") as error:
        schema_of(function)
    assert "\n" not in str(error.value)
