"""`Environment`: a multi-turn conversation with the model; the package rlcore-environments runs the episodes.

It runs next to the rollout engine, in a separate thread, with many episodes at once: await everything slow. Only the
model's tokens are trained on, and they are never tokenized again; messages of the environment are context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rlcore.errors import require, require_at_least
from rlcore.types import FinishReason

Message: TypeAlias = Mapping[str, Any]
"""A message in the format of chat templates. Example: {"role": "user", "content": "What is 6 · 7?"}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeConfig:
    """Limits of an episode, for every environment."""

    max_turns: int = 8
    """Maximum number of model responses in an episode."""
    step_timeout_s: float = 30.0
    """Time limit of each `reset` and `step`, in seconds."""
    max_tokens: int = 0
    """Maximum number of tokens in a conversation, including all messages; 0: the model's context length."""
    cut_reward: float | None = None
    """Reward of an episode that reaches a limit before it has any reward; null: none."""

    def __post_init__(self) -> None:
        require_at_least(self, max_turns=1, max_tokens=0)
        require(self.step_timeout_s > 0, "step_timeout_s", "more than 0", self.step_timeout_s, 30)


DONE, OUT_OF_TURNS, OUT_OF_TOKENS, TIMEOUT, ERROR = range(5)
"""Values of the column `episode_end`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The model's response in one turn. Example: Completion(text="42", finish_reason="stop", num_tokens=2, turn=0)"""

    text: str
    """The response without special tokens."""
    finish_reason: FinishReason
    """"length": truncated at the token limit."""
    num_tokens: int
    turn: int
    """Index of the turn, from 0."""
    last: bool = False
    """True if no further turn follows: return a reward now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The environment's reply to a completion. Example: Step(reward=1.0, done=True)"""

    messages: Sequence[Message] = ()
    """Messages for the model's next turn; at least one unless `done`."""
    reward: float | None = None
    """Summed over the episode; None adds nothing. An episode without any reward is skipped, like a sample for which
    a reward returns None."""
    done: bool = False


class Environment(Protocol):
    """One instance per episode. A class attribute `Config` (dataclass) holds its settings.

    Optional members: `HasTools` and `Closes` of `rlcore.protocols.optional`.

    A call that raises or exceeds `episode.step_timeout_s` ends the episode without a reward; this is counted and
    handled according to `reward.on_error`. One more instance is created on the controller at start, for its `tools`.
    """

    Config: type

    def __init__(self, config: Any) -> None: ...

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Return the first messages. `row` has the columns of the dataset, `prompt` and `prompt_id`."""

    async def step(self, completion: Completion) -> Step:
        """Reply to the model's response. If `completion.last` or done, the reply should have a reward."""
