"""A base class for environments with tools, which are typed Python functions.

Supports the format of Hermes, Qwen and similar models, with one or more calls in a response:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>

The reply to a failed call is its error, and the model may try again.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore.protocols.environment import Completion, Message, Step

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolEnvironment:
    """Environment that calls tools until a response contains no call, and then scores that response.

    Subclasses define `score`, and `tools`: fast plain functions or `async def`, with type hints and a
    docstring. The first messages are the row's prompt, unless `reset` is overridden.
    """

    tools: Sequence[Callable[..., Any]] = ()

    def __init__(self, config: Any = None) -> None:
        self.config = config
        self.row: Mapping[str, Any] = {}
        self.num_calls = 0
        """Number of tool calls in this episode, including failed ones."""

    async def score(self, answer: str) -> float | None:
        """Return the reward for the last response, which may contain a tool call if a limit was reached."""
        raise NotImplementedError(f"{type(self).__name__} must define  async def score(self, answer)")

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        self.row = row
        prompt = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    async def step(self, completion: Completion) -> Step:
        calls = _CALL.findall(completion.text)
        if not calls or completion.last:
            return Step(reward=await self.score(completion.text), done=True)
        return Step(messages=[{"role": "tool", "content": await self._call(text)} for text in calls])

    async def _call(self, text: str) -> str:
        """Call a tool, and return its result or the error as text."""
        self.num_calls += 1
        known = {tool.__name__: tool for tool in self.tools}
        try:
            call = json.loads(text)
            tool, arguments = known[call["name"]], call.get("arguments", {})
            inspect.signature(tool).bind(**arguments)
        except ValueError as error:
            return f"error: no JSON: {error}"
        except KeyError as error:
            return f"error: there is no {error}; tools: {', '.join(known)}"
        except (TypeError, AttributeError) as error:
            return f"error: {error}"
        try:
            result = tool(**arguments)
            return str(await result if inspect.isawaitable(result) else result)
        except Exception as error:  # tools raise to refuse a call; the model reads the reason
            return f"error: {type(error).__name__}: {error}"
