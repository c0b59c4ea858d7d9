"""An environment for rlcore: word problems, and a calculator that the model may use.

    user       21 bags of 34 pears
    assistant  <tool_call>{"name": "calculate", "arguments": {"expression": "21*34"}}</tool_call>
    tool       714
    assistant  714

The reward is 1 if the last number of the answer equals the column `answer`, else 0. Usage:

    rlcore train environment=calculator model.path=DIR data.train=problems.jsonl
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass

from rlcore_environments.tools import ToolEnvironment

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def calculate(expression: str) -> str:
    """Compute an arithmetic expression of numbers with + - * / and parentheses.

    Args:
        expression: Such as "(3+4)*5".
    """
    if len(expression) > 200:
        raise ValueError("the expression is too long")
    value = _value(ast.parse(expression, mode="eval").body)
    return str(int(value) if value == int(value) else value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: float = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError(f"{ast.unparse(node)} is not arithmetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculatorConfig:
    """Settings, typed as environment.tolerance=0.01."""

    tolerance: float = 0.0
    """Largest difference between a right answer and the exact result."""


class Calculator(ToolEnvironment):
    """Environment for one problem: the row's prompt, any number of calculations, and an answer."""

    Config = CalculatorConfig
    tools = (calculate,)

    async def score(self, answer: str) -> float:
        numbers = _NUMBER.findall(answer)
        return float(bool(numbers) and abs(float(numbers[-1]) - float(self.row["answer"])) <= self.config.tolerance)


def called(expression: str) -> str:
    """Return the text of a calculator call, as a model writes it. Example: called("3+4")"""
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


_ROW = {"prompt": "21 bags of 34 pears", "answer": "714"}
EXAMPLES = [
    (_ROW, [called("21*34"), "714"], 1.0),
    (_ROW, [called("21+34"), "55"], 0.0),
    (_ROW, [called("21*"), called("21*34"), "that is 714"], 1.0),
    (_ROW, ["714"], 1.0),
    (_ROW, ["many"], 0.0),
]
"""Rows, responses and the reward of the episode; used by `rlcore check` and the contract test."""
