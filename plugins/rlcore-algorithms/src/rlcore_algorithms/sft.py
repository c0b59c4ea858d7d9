"""SFT: supervised fine-tuning on demonstrations.

    loss = -mean over tokens of the demonstrated responses of  log p(token)

The data has conversations whose last message, or every message, of the assistant is the response (`turns`),
rendered by the chat template; or a column `response` with texts, to which the end-of-sequence token is appended.
Tokens of prompts and of other messages are not trained on. Nothing is generated: a rollout and rewards are used
only for evaluation, when `data.eval` is set. Responses are truncated at sampling.max_response_tokens, and
then have no end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlcore.algorithms.base import Epochs, EpochsConfig
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import Average, LossTerms, TokenOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig(EpochsConfig):
    """Settings of supervised fine-tuning."""

    response: str = "response"
    """Column of the demonstrated responses. Without it, the last message of each conversation is the response."""
    turns: Literal["last", "all"] = "last"
    """Messages of the assistant that are learned in such a conversation: the last one or all."""
    average: Average = "token-mean"

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)
        require(self.average != "row-mean", "average", "an average of terms per token", self.average, "token-mean")


class SFT(Epochs):
    """Fine-tuning on demonstrated responses."""

    Config = SFTConfig
    shows: Mapping[str, str] = {"actor/loss": "loss"}
    without = ("rollout", "reward")
    corrects = True

    @property
    def demonstrations(self) -> Sequence[str]:
        """Columns of the data that hold responses."""
        return (self.config.response,)

    @property
    def every_turn(self) -> bool:
        """True if every message of the assistant is learned."""
        return bool(self.config.turns == "all")

    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="policy")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": []}

    def writes(self) -> Sequence[str]:
        return []

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Load the demonstrations for these prompts."""
        samples = roles.demonstrations(prompts, self.demonstrations)
        return samples.balance(roles.actor.dp_size)

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        return likelihood(out, self.config.average)


def likelihood(out: TokenOutputs, average: Average) -> LossTerms:
    """Return -log p of every token as loss terms."""
    assert out.log_probs is not None and out.entropy is not None, "the actor's outputs have log-probs and entropy"
    metrics = {"log_prob": out.log_probs.detach(), "entropy": out.entropy.detach()}
    return LossTerms(terms=-out.log_probs, average=average, metrics=metrics)
