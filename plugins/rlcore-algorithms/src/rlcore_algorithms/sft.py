"""SFT: supervised fine-tuning on demonstrations.

    loss = -mean over tokens of the demonstrated responses of  log p(token)

The data has conversations that end with a message of the assistant, which is the response, in the form that the chat
template gives it; or a column `response`, a text that answers the prompt, and the end-of-sequence token is put after it.
Prompt tokens, and earlier messages of the assistant, are not learned. Nothing is generated: a rollout and rewards are
there only to evaluate, when `data.eval` is given. A response is cut at sampling.max_response_tokens, and then has no end
token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """Column of the demonstrated responses. Where it is missing, the last message of each conversation is the response."""
    average: Average = "token-mean"

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)
        require(self.average != "row-mean", "average", "an average of terms per token", self.average, "token-mean")


class SFT(Epochs):
    """Makes the demonstrated responses likelier."""

    Config = SFTConfig
    shows: Mapping[str, str] = {"actor/loss": "loss"}
    without = ("rollout", "reward")

    @property
    def demonstrations(self) -> Sequence[str]:
        """Columns of responses in the data."""
        return (self.config.response,)

    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="policy")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": []}

    def writes(self) -> Sequence[str]:
        return []

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """The demonstrations of these prompts."""
        samples = roles.demonstrations(prompts, self.demonstrations)
        return samples.balance(roles.actor.dp_size)

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        return likelihood(out, self.config.average)


def likelihood(out: TokenOutputs, average: Average) -> LossTerms:
    """-log p of every loss token."""
    assert out.log_probs is not None and out.entropy is not None, "the actor's outputs have log-probs and entropy"
    metrics = {"log_prob": out.log_probs.detach(), "entropy": out.entropy.detach()}
    return LossTerms(terms=-out.log_probs, average=average, metrics=metrics)
