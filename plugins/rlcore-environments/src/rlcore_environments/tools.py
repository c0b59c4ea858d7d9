"""A base for environments whose model calls tools: typed Python functions, called as the chat template teaches it.

Understood is what Hermes, Qwen and their kin write: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once or several
times in a response. A call that cannot be done is answered with what is wrong, and the model may try again.
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
    """Calls tools until the model answers without a call; `score` then says how good the answer is.

    Subclasses have `tools`, plain functions (quick ones) or `async def`, with types and a docstring; and `score`. The
    first messages are the row's prompt, unless `reset` says otherwise.
    """

    tools: Sequence[Callable[..., Any]] = ()

    def __init__(self, config: Any = None) -> None:
        self.config = config
        self.row: Mapping[str, Any] = {}
        self.num_calls = 0
        """Calls of tools in this episode, those that failed too."""

    async def score(self, answer: str) -> float | None:
        """The reward for the model's last response; a last response that calls a tool is an answer, too."""
        raise NotImplementedError(f"{type(self).__name__} must have  async def score(self, answer)")

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
        """What a tool returned, or why it could not be called."""
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
        except Exception as error:  # a tool refuses what the model asks by raising; the model reads why
            return f"error: {type(error).__name__}: {error}"
