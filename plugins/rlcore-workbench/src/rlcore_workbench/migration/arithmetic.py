"""Integer arithmetic of a shell, such as $((1024 * 2 + n))."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
}
"""Operators; division truncates toward zero, as in a shell."""


def arithmetic(text: str, variable: Callable[[str], str], depth: int = 0) -> int:
    """Evaluate an expression; `variable` returns the text of a variable, which may be an expression itself.

    Raises:
        ValueError: the expression has something other than integers, known variables, + - * / and parentheses.
    """
    if depth > 20:
        raise ValueError(f"{text} refers to itself")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _value(tree, lambda name: arithmetic(variable(name), variable, depth + 1))
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        raise ValueError(f"the arithmetic {text.strip()} is not evaluated") from None


def _value(node: ast.expr, variable: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return variable(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, variable)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, variable), _value(right, variable))
    raise ValueError(f"the arithmetic {ast.unparse(node)} is not evaluated")
