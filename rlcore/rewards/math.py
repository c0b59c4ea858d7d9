"""Reward for mathematical answers, judged by the package math-verify, which is imported only when this is used."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rlcore.errors import SampleError, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class MathConfig:
    """Options of `math`."""

    column: str = "answer"
    """Column with the right answer: LaTeX with or without $ or \\boxed, or plain text."""


class Math:
    """1.0 when the completion's answer equals that of a column as mathematics (1/2 is 0.5), else 0.0.

    An answer that cannot be read as mathematics is a wrong answer; a right answer that cannot be read is an error.

    Example: pip install 'rlcore[math]' && rlcore train reward=math data.train=math.jsonl
    """

    Config = MathConfig

    def __init__(self, config: MathConfig) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise UserError("reward 'math' needs the package math-verify\npip install 'rlcore[math]'") from error
        # Its own time-outs use signals, which work in a main thread only; it warns when they are off. Ours act.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._parse, self._verify = math_verify.parse, math_verify.verify
        self._column = config.column
        self.required_columns = (config.column,)

    def __call__(self, completion: str, **columns: object) -> float:
        answer = str(columns[self._column])
        marked = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
        gold = self._parse(marked, parsing_timeout=None)
        if not gold:
            raise SampleError(f"column {self._column!r} holds {answer!r:.60}, which is no mathematics")
        return float(self._verify(gold, self._parse(completion, parsing_timeout=None), timeout_seconds=None))
