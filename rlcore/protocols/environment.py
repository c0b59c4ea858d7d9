"""`Environment`: a conversation with the model in several turns; the package rlcore-environments plays it.

Runs beside the rollout engine, in a thread of its own, many episodes at once: await what is slow. What the model wrote is
never tokenised again, and only that is trained on; what the environment says is context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rlcore.types import FinishReason

if TYPE_CHECKING:
    from rlcore.registry import PluginSpec

Message: TypeAlias = Mapping[str, Any]
"""As chat templates take it. Example: {"role": "user", "content": "What is 6 · 7?"}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeConfig:
    """What bounds an episode; for every environment."""

    max_turns: int = 8
    """Responses of the model in one episode."""
    step_timeout_s: float = 30.0
    """For each `reset` and `step`."""
    max_tokens: int = 0
    """Of a whole conversation, all messages included; 0: as many as the model's context holds."""
    cut_reward: float | None = None
    """Of an episode that meets a limit before it has any reward; null: it has no verdict."""

    def __post_init__(self) -> None:
        for name, least in (("max_turns", 1), ("max_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected {least} or more, got {getattr(self, name)}\nType  {name}=8")
        if not self.step_timeout_s > 0:
            raise ValueError(
                f"step_timeout_s: expected more than 0, got {self.step_timeout_s}\nType  step_timeout_s=30"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """What the rollout's worker is told of the environment; plain data, as it travels to the hosts."""

    environment: PluginSpec
    settings: Any
    """Of the environment."""
    limits: EpisodeConfig
    context_length: int
    """Of the model, in tokens."""

    @property
    def max_tokens(self) -> int:
        """Of a whole conversation."""
        return min(self.limits.max_tokens or self.context_length, self.context_length)


DONE, OUT_OF_TURNS, OUT_OF_TOKENS, TIMEOUT, ERROR = range(5)
"""Values of the column `episode_end`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the model wrote in one turn. Example: Completion(text="42", finish_reason="stop", num_tokens=2, turn=0)"""

    text: str
    """Without special tokens."""
    finish_reason: FinishReason
    """"length": it met the token limit and is cut off."""
    num_tokens: int
    turn: int
    """From 0."""
    last: bool = False
    """There will be no further turn: score what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The answer to a completion. Example: Step(reward=1.0, done=True)"""

    messages: Sequence[Message] = ()
    """What the model reads next; at least one unless `done`."""
    reward: float | None = None
    """Summed over the episode; None says nothing. An episode without any is skipped, as by a reward that returns None."""
    done: bool = False


class Environment(Protocol):
    """One instance per episode. A class attribute `Config` (dataclass) holds its settings.

    Optional members: `HasTools` and `Closes` of `rlcore.protocols.optional`.

    What raises, or exceeds `episode.step_timeout_s`, ends this episode without a verdict: counted, and handled as
    `reward.on_error` says. One more instance is made on the controller, before the start, for its `tools`.
    """

    Config: type

    def __init__(self, config: Any) -> None: ...

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """The first messages. `row` has the columns of the data set, `prompt` and `prompt_id`."""

    async def step(self, completion: Completion) -> Step:
        """What follows from what the model wrote. At `completion.last`, and when done, the reward should be there."""
