"""A language model as judge: a template, an OpenAI-compatible server, and a pattern that finds the score.

`vllm serve MODEL` and `python -m sglang.launch_server --model-path MODEL` start such servers.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.errors import ConfigError, SampleError, require, require_at_least
from rlcore.protocols.reward import SAMPLE_FIELDS, RewardResult
from rlcore_rewards.client import Client, ServerConfig

TEMPLATE = """\
Here is a task and an answer to it.

Task:
{prompt}

Answer:
{completion}

How good is the answer, from 0 (useless) to 10 (perfect)? Think briefly, and end with a line such as
Score: 7"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig(ServerConfig):
    """Options of `judge`; `url` is the base address, such as http://localhost:8000/v1"""

    model: str
    """Name of the model on the server."""
    template: str = TEMPLATE
    """Format string with prompt, completion and the columns of the data."""
    pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; the last match in the judgment counts."""
    scale: float = 10.0
    """Divisor of the score that gives the reward."""
    max_tokens: int = 512
    temperature: float = 0.0

    def __post_init__(self) -> None:
        ServerConfig.__post_init__(self)
        require(self.scale > 0, "scale", "more than 0", self.scale, 10.0)
        require_at_least(self, max_tokens=1, temperature=0)


class Judge:
    """Reward from the judgment of a model. A judgment without a score is an error of its sample, never a 0.

    Example: rlcore train reward='[{name: judge, url: "http://localhost:8000/v1", model: MODEL}]' reward.timeout_s=120
    """

    Config = JudgeConfig

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._client = Client(config, "judge")
        try:
            self._pattern = re.compile(config.pattern)
            fields = [name for _, name, _, _ in string.Formatter().parse(config.template) if name is not None]
        except (re.error, ValueError) as error:
            raise ConfigError(
                f"pattern={config.pattern!r} or template of reward 'judge' cannot be used: {error}\n"
                "Write literal braces in the template as {{ and }}"
            ) from error
        if self._pattern.groups < 1:
            raise ConfigError(
                f"pattern={config.pattern!r} of reward 'judge' has no group\n"
                "Put parentheses around the number: Score: (\\d+)"
            )
        names = {re.split(r"[.\[]", name)[0] for name in fields}
        if "completion" not in names:
            raise ConfigError(
                "template of reward 'judge' does not contain the completion\n"
                "Put {completion} where the response belongs."
            )
        self.required_columns = tuple(sorted(names - set(SAMPLE_FIELDS)))

    async def __call__(self, completion: str, prompt: Any, **columns: Any) -> RewardResult:
        text = self._config.template.format(completion=completion, prompt=_readable(prompt), **columns)
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._config.max_tokens,
            "temperature": self._config.temperature,
        }
        judgment = _content(await self._client.post("/chat/completions", body))
        found = self._pattern.findall(judgment)
        if not found:
            raise SampleError(f"the judgment has no score: …{judgment[-80:]!r}")
        last = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
        try:
            score = float(last) / self._config.scale
        except ValueError as error:
            raise SampleError(f"the judge's score {last!r} is not a number") from error
        return RewardResult(score, metrics={"length": float(len(judgment))})


def _readable(prompt: Any) -> str:
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
    return str(prompt)


def _content(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise SampleError(f"the judge returned {answer!r:.100}, which is not a chat completion") from error
    if not isinstance(content, str | Mapping) or not content:
        raise SampleError(f"the judge returned an empty judgment: {answer!r:.100}")
    return str(content)
