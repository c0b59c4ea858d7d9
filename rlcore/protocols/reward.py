"""`Reward`: scores a completion. A plain function is enough; see `rlcore.rewards.match` for examples.

Rewards run in separate processes (`rlcore.rewards.executor`), so a hang or a crash loses one sample, not the run.
Functions written for other trainers are recognized by their parameters; see `rlcore.rewards.signature`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

SAMPLE_FIELDS: tuple[str, ...] = ("prompt", "completion", "num_tokens", "finish_reason", "prompt_id", "sample_id")
"""Parameters available to a reward in addition to the columns of the dataset: `prompt` (text or messages),
`num_tokens` (of the response), `finish_reason` ("stop", "length" or "abort")."""

Relative = Literal["no", "mean", "std", "rank"]
"""Comparison of a score with those of the other samples of its prompt; see `rlcore.rewards.relative`."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A score with metrics. Example: RewardResult(0.5, metrics={"format": 1.0})"""

    value: float | None
    """The score; None: this reward does not apply to this sample."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Averaged over the samples and logged as `reward/<name>/<metric>`."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward as data for a child process, which imports it. Example: RewardSpec("short", "my_rewards:short")"""

    name: str
    """Name in metrics and messages; unique in the run."""
    target: str
    """`module:attr` or `/absolute/file.py:attr`."""
    options: Mapping[str, object] = field(default_factory=dict)
    weight: float = 1.0
    relative: Relative = "no"
    function: Any = None
    """A reward that was given as a Python object: pickled for other processes of this run, or itself in one process."""


class Reward(Protocol):
    """Scores one completion: a function, an `async def`, or a class with `__call__`.

    Request inputs by parameter name: any column of the dataset and `SAMPLE_FIELDS`. A parameter with a default is
    filled only if the column exists; `**columns` receives all. If options choose the names of columns read from
    `**columns`, list these names in an attribute `required_columns`. A class may have a dataclass `Config`; it is
    then created with `cls(cls.Config(**options))`. A function takes options as keyword parameters.

    Return a number that is finite in float32, None (does not apply) or a RewardResult. Raise if the sample cannot be
    scored: it is then counted as an error, never as 0. A sample may be scored twice, if another sample of its chunk
    hung or crashed.

    Example: def right(completion: str, answer: str) -> float: return float(answer in completion)
    """

    def __call__(self, completion: str, **columns: Any) -> float | RewardResult | None: ...


def batched(reward: Decorated) -> Decorated:
    """Mark a reward (function or class) that takes a list for each parameter and returns a list of the same length.

    The lists hold some of a step's samples, grouped arbitrarily; the timeout applies to the whole list.

    Example: @batched
             def short(completion: list[str]) -> list[float]: return [1 / (1 + len(text)) for text in completion]
    """
    reward.batched = True  # type: ignore[attr-defined]
    return reward
