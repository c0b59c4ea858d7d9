"""What algorithms share: the update in epochs and mini-batches; and, for policy gradients, the flow and the actor's loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.algorithms.kl import KLConfig, KLController, kl_estimate
from rlcore.algorithms.losses import clipped_policy_loss
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import Average, LossTerms, Mean, Metrics, TokenOutputs, merge_metrics
from rlcore.workers.averaging import count


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsConfig:
    """How the samples of a step are cut into optimiser steps."""

    epochs: int = 1
    """Passes over the samples of a step."""
    minibatches: int = 1
    """Optimiser steps per pass."""
    shuffle_seed: int = 0

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", "1 or more", self.epochs, 1)
        require(self.minibatches >= 1, "minibatches", "1 or more", self.minibatches, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradientConfig(EpochsConfig):
    """Settings of every algorithm that clips a policy gradient."""

    average: Average = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    """Bound for negative advantages, such as 3; 0: none."""
    entropy_coefficient: float = 0.0
    kl: KLConfig = field(default_factory=KLConfig)

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)  # super() does not know a class that slots=True made anew
        per_token = self.average != "row-mean"
        require(per_token, "average", "an average of terms per token", self.average, "token-mean")
        require(self.clip_low >= 0, "clip_low", "0 or more", self.clip_low, 0.2)
        require(self.clip_high >= 0, "clip_high", "0 or more", self.clip_high, 0.2)
        dual_clip_holds = self.dual_clip == 0 or self.dual_clip > 1
        require(dual_clip_holds, "dual_clip", "0, or more than 1", self.dual_clip, 3.0)


class Epochs:
    """Base of algorithms whose `update` is epochs × mini-batches over the trained roles."""

    Config: type = EpochsConfig

    def __init__(self, config: Any) -> None:
        self.config = config
        self.num_updates = 0
        self._metrics: Metrics = {}

    @property
    def on_policy(self) -> bool:
        """One optimiser step per sample: the old policy is the one that is being differentiated."""
        return bool(self.config.epochs * self.config.minibatches == 1)

    def reads(self) -> Mapping[str, Sequence[str]]:
        """Columns that the loss of each trained role reads."""
        raise NotImplementedError

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        """Epochs × mini-batches over the trained roles. All calls are sent before the first answer is awaited."""
        metrics, self._metrics = [self._metrics], {}
        sample_id, tokens = experience.fetch("sample_id", "num_loss_tokens")
        trained = [name for name in ("actor", "critic") if name in self.reads()]
        pending = []
        for rows in self.minibatches(sample_id.numpy()):
            mini = experience.take(rows).balance(roles.actor.dp_size)
            counts = count(tokens[torch.from_numpy(rows)])
            pending += [(name, getattr(roles, name).update.submit(mini, counts)) for name in trained]
        for name, future in pending:
            metrics.append({f"{name}/{metric}": mean for metric, mean in future.result().items()})
        metrics.append({"actor/updates": Mean(float(len(pending) // max(1, len(trained))))})
        return merge_metrics(metrics)

    def note(self, name: str, value: Mean) -> None:
        """A metric of `collect`, given out by the next `update`."""
        self._metrics[name] = value

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_updates = int(state["num_updates"])

    def minibatches(self, sample_id: np.ndarray) -> list[np.ndarray]:
        """Row numbers of each optimiser step; an order of its own for every pass, none empty.

        Which samples come together depends on their ids alone, not on where `balance` has put the rows, so that every
        data-parallel size takes the same steps.
        """
        by_id, num_rows = sample_id.argsort(kind="stable"), len(sample_id)
        parts = []
        for _ in range(self.config.epochs):
            key = [self.config.shuffle_seed, self.num_updates]
            order = np.random.Generator(np.random.Philox(key=key)).permutation(by_id)
            self.num_updates += 1
            cut = np.array_split(order, min(self.config.minibatches, max(1, num_rows)))
            parts += [np.sort(rows) for rows in cut if len(rows)]
        return parts


class PolicyGradient(Epochs):
    """Base of GRPO and PPO: which roles they need, and the loss of the actor."""

    Config: type = PolicyGradientConfig
    advantage_column = "advantage"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kl = KLController(config.kl)

    @property
    def needs_reference(self) -> bool:
        return bool(self.config.kl.coefficient > 0 or self.config.kl.monitor)

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is subtracted from the reward."""
        return bool(self.config.kl.where == "reward" and self.needs_reference)

    def roles(self) -> Sequence[RoleSpec]:
        reference = [RoleSpec(name="reference", worker="reference")] if self.needs_reference else []
        return [RoleSpec(name="actor", worker="policy"), *reference, RoleSpec(name="rollout", worker="rollout")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        old = [] if self.on_policy else ["old_log_probs"]
        reference = ["ref_log_probs"] if self.needs_reference else []
        return {"actor": [self.advantage_column, *old, *reference]}

    def writes(self) -> Sequence[str]:
        return [self.advantage_column, *([] if self.on_policy else ["old_log_probs"])]

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        """The policy's terms, minus the entropy bonus, plus the KL penalty where it is in the loss."""
        config = self.config
        log_probs, entropy = out.log_probs, out.entropy
        assert log_probs is not None, "the actor's outputs have log-probs"
        assert entropy is not None, "the actor's outputs have the entropy"
        old = log_probs.detach() if self.on_policy else batch["old_log_probs"]
        terms, metrics = self.policy_loss(log_probs, old, batch)
        if config.entropy_coefficient:
            terms = terms - config.entropy_coefficient * entropy
        metrics["entropy"] = entropy.detach()
        if self.needs_reference:
            ref = batch["ref_log_probs"]
            if config.kl.coefficient and config.kl.where == "loss":
                terms = terms + config.kl.coefficient * kl_estimate(log_probs, ref, config.kl.estimator)
            metrics["kl_to_reference"] = kl_estimate(log_probs.detach(), ref, "k3")
        return LossTerms(terms=terms, average=config.average, metrics=metrics)

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """[T] terms that raise the probability of better responses, and metrics; entropy and KL come on top."""
        config = self.config
        loss = clipped_policy_loss(
            log_probs,
            old_log_probs,
            self.advantages(batch),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        return loss.terms, {"clip_fraction": loss.clipped, "kl_to_old": loss.kl}

    def observe_kl(self, kl: Tensor) -> None:
        """Once a step, after its rewards have their penalty: [B] KL of each response; the coefficient follows it."""
        self.note("kl/per_response", Mean(float(kl.sum()), float(len(kl))))
        self.note("kl/coefficient", Mean(self.kl.coefficient))
        self.kl.observe(float(kl.mean()), len(kl))

    def advantages(self, batch: Batch) -> Tensor:
        """[T] advantages of a micro-batch."""
        return batch.per_token(self.advantage_column)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kl": self.kl.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.kl.load_state_dict(state["kl"])


def sequence_kl(batch: Batch, *, estimator: str) -> Batch:
    """Row column `kl`: KL of each response, summed over its loss tokens. Runs next to the data."""
    kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], estimator)  # type: ignore[arg-type]
    return Batch.of(lengths=batch.lengths, rows={"kl": batch.per_row(torch.where(batch["loss_mask"], kl, 0.0))})
