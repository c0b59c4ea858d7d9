"""DPO: direct preference optimization on the pairs of a dataset, arXiv 2305.18290.

    loss = -log sigmoid(beta · [(log p - log p_ref)(chosen) - (log p - log p_ref)(rejected)])        (eq. 7)

Nothing is generated: the data has the columns `chosen` and `rejected`, with texts that respond to the prompt
or with conversations that end with the response. A rollout and rewards are used only for evaluation, when
`data.eval` is set. Responses are truncated at sampling.max_response_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.data.batch import Batch
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore_algorithms.online_dpo import OnlineDPO, OnlineDPOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig(OnlineDPOConfig):
    """Settings of DPO."""

    chosen: str = "chosen"
    """Column of the preferred responses."""
    rejected: str = "rejected"
    """Column of the other responses."""


class DPO(OnlineDPO):
    """Online DPO on pairs from the data."""

    Config = DPOConfig
    compares_samples = False
    without = ("rollout", "reward")

    @property
    def demonstrations(self) -> Sequence[str]:
        """Columns of the data that hold responses."""
        return (self.config.chosen, self.config.rejected)

    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="policy"), RoleSpec(name="reference", worker="reference")]

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Load the pairs and compute the log-probs of the reference."""
        pairs = roles.demonstrations(prompts, self.demonstrations)
        return pairs | roles.reference.log_probs(pairs)
