"""Reward for mathematical answers, compared by the package math-verify, which is imported on first use."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rlcore.errors import SampleError, import_optional


@dataclass(frozen=True, slots=True, kw_only=True)
class MathConfig:
    """Options of `math`."""

    column: str = "answer"
    """Column with the right answer: LaTeX with or without $ or \\boxed, or plain text."""


class Math:
    """Scores 1.0 if the completion's answer is mathematically equal to that of a column (1/2 is 0.5), else 0.0.

    A completion that cannot be parsed is wrong; a reference answer that cannot be parsed is an error.

    Example: pip install 'rlcore-rewards[math]' && rlcore train reward=math data.train=math.jsonl
    """

    Config = MathConfig

    def __init__(self, config: MathConfig) -> None:
        math_verify = import_optional("math_verify", "reward 'math'", "rlcore-rewards[math]")
        # Its timeouts use signals, which work only in the main thread, and it warns if they are disabled. The
        # executor's timeouts apply instead.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._parse, self._verify = math_verify.parse, math_verify.verify
        self._column = config.column
        self.required_columns = (config.column,)

    def __call__(self, completion: str, **columns: object) -> float:
        answer = str(columns[self._column])
        marked = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
        gold = self._parse(marked, parsing_timeout=None)
        if not gold:
            raise SampleError(f"column {self._column!r} holds {answer!r:.60}, which is not a mathematical expression")
        return float(self._verify(gold, self._parse(completion, parsing_timeout=None), timeout_seconds=None))
