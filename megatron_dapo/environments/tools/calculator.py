"""A calculator that evaluates arithmetic and nothing else, with bounded work."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from megatron_dapo.environments.remote.api import tool

_MAX_CHARACTERS = 500
_MAX_BITS = 4096  # size of the largest integer
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@tool
def calculate(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, e.g. (12 + 3) * 4
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, more than {_MAX_CHARACTERS}")
    text = expression.strip().replace("×", "*").replace("÷", "/").replace("^", "**")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("it is no arithmetic expression") from None
    value = _value(tree.body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        result = _BINARY[type(node.op)](left, right)
        if isinstance(result, complex):
            raise ValueError("the result is no real number")
        return _bounded(result)
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _check_power(base: int | float, exponent: int | float) -> None:
    """Refuse a power before it takes memory: integers have no other bound."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * max(exponent, 0) > _MAX_BITS:
        raise ValueError("the result is too large")


def _bounded(value: int | float) -> int | float:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("the result is too large")
    return value
