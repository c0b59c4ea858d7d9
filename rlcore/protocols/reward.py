"""`Reward`: how good is a completion? A plain function is enough; `rlcore.rewards.match` has the first examples.

Rewards run in processes of their own (`rlcore.rewards.executor`), so a hang or a crash costs one sample, not the run.
Functions written for other trainers are recognised by their parameters: see `rlcore.rewards.signature`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

SAMPLE_FIELDS: tuple[str, ...] = ("prompt", "completion", "num_tokens", "finish_reason", "prompt_id", "sample_id")
"""What a reward may ask for besides the columns of the data set: `prompt` (text or messages), `num_tokens` (of the
response), `finish_reason` ("stop", "length" or "abort")."""

Relative = Literal["no", "mean", "std", "rank"]
"""How a score is set against those of the other samples of its prompt; see `rlcore.rewards.relative`."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A score with more to tell. Example: RewardResult(0.5, metrics={"format": 1.0})"""

    value: float | None
    """The score; None: this reward does not apply to this sample."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Averaged over the samples and logged as `reward/<name>/<metric>`."""


class Reward(Protocol):
    """Scores one completion: a function, an `async def`, or a class with `__call__`.

    Ask for what you need by parameter name: any column of the data set, and `SAMPLE_FIELDS`. A parameter with a default
    is filled only where the column exists; `**columns` receives all. Columns read from `**columns` under a name that
    the options choose are listed in an attribute `required_columns`. A class may have a dataclass `Config`; it is
    then made with `cls(cls.Config(**options))`. A function takes options as keyword parameters.

    Return a number that is finite in float32, None (does not apply) or a RewardResult. Raise when there is no verdict:
    the sample is then counted as an error, never as 0. May be called twice for a sample, when a neighbour in its chunk
    hung or crashed.

    Example: def right(completion: str, answer: str) -> float: return float(answer in completion)
    """

    def __call__(self, completion: str, **columns: Any) -> float | RewardResult | None: ...


def batched(reward: Decorated) -> Decorated:
    """Mark a reward (function or class) that takes a list for each parameter and returns a list as long.

    The lists hold some of a step's samples, in no promised grouping; the time-out is that of the whole list.

    Example: @batched
             def short(completion: list[str]) -> list[float]: return [1 / (1 + len(text)) for text in completion]
    """
    reward.batched = True  # type: ignore[attr-defined]
    return reward
