"""Two policies that are trained by playing against each other.

    rlcore train preset=quickstart algorithm=examples/self_play.py:SelfPlay runtime=local trainer.steps=20

Both answer every prompt. A response wins (1) if it scores higher than the other player's mean score for this prompt,
and draws (0.5) if both are equal; advantages are relative to the player's own group, as in GRPO. Each policy has its
own rollout, which receives its weights after every step, and checkpoints contain both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlcore import Batch
from rlcore.algorithms.advantages import group_mean, group_normalized
from rlcore.algorithms.grpo import GRPO
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import Mean, Metrics, merge_metrics
from rlcore.workers.averaging import count
from rlcore.workers.policy import PolicyWorker

PLAYERS = ("actor", "opponent")


class SelfPlay(GRPO):
    """GRPO for two players."""

    def roles(self) -> Sequence[RoleSpec]:
        opponent = RoleSpec(name="opponent", worker="policy")
        rollout = RoleSpec(name="opponent_rollout", worker="rollout", weights_from="opponent")
        return [*super().roles(), opponent, rollout]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return dict.fromkeys(PLAYERS, super().reads()["actor"])

    def writes(self) -> Sequence[str]:
        return [*super().writes(), "player"]

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Let both players answer, and compare their scores."""
        reseeded = prompts.with_rows(seed=prompts.fetch("seed") ^ 1)  # else equal policies would answer alike
        theirs = roles.score(roles.generate(reseeded, rollout="opponent_rollout"))
        mine = roles.score(roles.generate(prompts))
        roles.note("self_play/wins", Mean(float(wins(mine, theirs).sum()), len(mine)))
        return mine.cat([self._compared(roles, mine, theirs, 0), self._compared(roles, theirs, mine, 1)])

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        """Train each player on its own samples."""
        player, metrics = experience.fetch("player").numpy(), list[Metrics]()
        for number, name in enumerate(PLAYERS):
            own = experience.take(np.flatnonzero(player == number))
            sample_id, tokens = own.fetch("sample_id", "num_loss_tokens")
            group = roles.group(name, PolicyWorker)
            for rows in self.minibatches(sample_id.numpy(), own.unit_sizes()):
                mini = own.take(rows).balance(group.dp_size)
                updated = group.update(mini, count(tokens[torch.from_numpy(rows)]))
                metrics.append({f"{name}/{metric}": mean for metric, mean in updated.items()})
        return merge_metrics(metrics)

    def _compared(self, roles: Roles, samples: Batch, others: Batch, number: int) -> Batch:
        if "old_log_probs" in self.writes():
            log_probs = roles.group(PLAYERS[number], PolicyWorker).log_probs(samples)
            samples |= log_probs.rename(log_probs="old_log_probs").drop("entropy")
        advantage = group_normalized(wins(samples, others), samples.fetch("group_id"), by_std=True)
        return samples.with_rows(advantage=advantage, player=torch.full((len(samples),), number))


def wins(samples: Batch, others: Batch) -> torch.Tensor:
    """Return [B] 1 where a sample scores higher than the mean of the others for its prompt, 0.5 where equal, else 0."""
    reward, group_id = samples.fetch("reward", "group_id")
    theirs, their_group = others.fetch("reward", "group_id")
    mean = dict(zip(their_group.tolist(), group_mean(theirs.double(), their_group).tolist()))
    rival = torch.tensor([mean.get(group, float("nan")) for group in group_id.tolist()], dtype=torch.float64)
    won = (reward > rival).double() + 0.5 * (reward == rival).double()
    return torch.where(rival.isnan(), 0.5, won).float()
