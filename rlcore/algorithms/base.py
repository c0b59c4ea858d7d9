"""Base classes of algorithms: the update in epochs and mini-batches, and the loss of policy gradients."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.algorithms.correction import CorrectionConfig, correct, with_effective_size
from rlcore.algorithms.entropy import AdaptiveEntropyConfig, EntropyController
from rlcore.algorithms.kl import KLConfig, KLController, kl_estimate
from rlcore.algorithms.losses import clipped_policy_loss
from rlcore.data.batch import Batch
from rlcore.data.shares import starts_of, unit_rows
from rlcore.data.units import whole_units
from rlcore.errors import require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.optional import TrainsUnits
from rlcore.protocols.roles import Roles
from rlcore.types import Average, LossTerms, Mean, Metrics, TokenOutputs, merge_metrics
from rlcore.workers.averaging import count

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsConfig:
    """Division of a step's samples into optimizer steps."""

    epochs: int = 1
    """Passes over the samples of a step."""
    minibatches: int = 1
    """Optimizer steps per pass."""
    shuffle_seed: int = 0
    """Seed of the order of samples in each pass."""

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", "1 or more", self.epochs, 1)
        require(self.minibatches >= 1, "minibatches", "1 or more", self.minibatches, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradientConfig(EpochsConfig):
    """Settings shared by algorithms with a clipped policy gradient."""

    average: Average = "token-mean"
    """Average of the loss terms of a mini-batch."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float = 0.0
    """Bound on the loss of negative advantages, such as 3; 0 disables it."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; the first one if it adapts."""
    adaptive_entropy: AdaptiveEntropyConfig = field(default_factory=AdaptiveEntropyConfig)
    mask_truncated: bool = False
    """Leave responses that reached a limit of length out of all losses and their averages. Their rewards count for the
    advantages of the others."""
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)  # super() fails here, because slots=True replaces the class
        per_token = self.average not in ("row-mean", "unit-mean")
        require(per_token, "average", "an average of terms per token", self.average, "token-mean")
        require(self.clip_low >= 0, "clip_low", "0 or more", self.clip_low, 0.2)
        require(self.clip_high >= 0, "clip_high", "0 or more", self.clip_high, 0.2)
        dual_clip_holds = self.dual_clip == 0 or self.dual_clip > 1
        require(dual_clip_holds, "dual_clip", "0, or more than 1", self.dual_clip, 3.0)
        adaptive, first = self.adaptive_entropy, self.entropy_coefficient
        within = not adaptive.target or adaptive.min <= first <= adaptive.max
        expected = f"from adaptive_entropy.min={adaptive.min} to max={adaptive.max}"
        require(within, "entropy_coefficient", expected, first, adaptive.min)


class Epochs:
    """Base class for algorithms that update the trained roles in epochs × mini-batches."""

    Config: type = EpochsConfig

    def __init__(self, config: Any) -> None:
        self.config = config
        self.num_updates = 0

    @property
    def on_policy(self) -> bool:
        """True with one optimizer step per sample: the old policy is then the current one."""
        return bool(self.config.epochs * self.config.minibatches == 1)

    def reads(self) -> Mapping[str, Sequence[str]]:
        """Return the columns that the loss of each trained role reads."""
        raise NotImplementedError

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        """Update the trained roles in epochs × mini-batches; send all calls before waiting for any result.

        Raises:
            ColumnError: the column of the algorithm's unit is missing or does not hold integers.
            ValueError: the rows of a unit are not adjacent, or a unit has too many.
        """
        experience = self._in_units(roles, experience)
        metrics: list[Metrics] = []
        sample_id, tokens = experience.fetch("sample_id", "num_loss_tokens")
        trained = list(self.reads())
        pending = []
        for rows in self.minibatches(sample_id.numpy(), experience.unit_sizes()):
            mini = experience.take(rows)
            counts = count(tokens[torch.from_numpy(rows)], mini.unit_sizes())
            mini = mini.balance(roles.actor.dp_size)
            pending += [(name, getattr(roles, name).update.submit(mini, counts)) for name in trained]
        for name, future in pending:
            metrics.append({f"{name}/{metric}": mean for metric, mean in future.result().items()})
        metrics.append({"actor/updates": Mean(float(len(pending) // max(1, len(trained))))})
        return merge_metrics(metrics)

    def _in_units(self, roles: Roles, experience: Batch) -> Batch:
        """Return the complete units of an algorithm that has units; count and report the others."""
        if not isinstance(self, TrainsUnits):
            return experience
        whole, num_incomplete = whole_units(experience, self.unit)
        roles.note("experience/incomplete_units", Mean(float(num_incomplete)))
        if num_incomplete:
            logger.warning(
                "%d units have fewer than %d rows with one '%s' and are not trained",
                *(num_incomplete, self.unit.size, self.unit.column),
            )
        return whole

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_updates = int(state["num_updates"])

    def minibatches(self, sample_id: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
        """Return the row numbers of each optimizer step, shuffled again for every epoch; none is empty.

        The grouping depends on the ids of the first sample of each unit alone, not on where `balance` put the rows, so
        every data-parallel size takes the same steps.

        Args:
            sizes: number of rows of each unit, which stay together.
        """
        by_id, num_units = sample_id[starts_of(sizes)].argsort(kind="stable"), len(sizes)
        parts = []
        for _ in range(self.config.epochs):
            key = [self.config.shuffle_seed, self.num_updates]
            order = np.random.Generator(np.random.Philox(key=key)).permutation(by_id)
            self.num_updates += 1
            cut = np.array_split(order, min(self.config.minibatches, max(1, num_units)))
            parts += [unit_rows(np.sort(units), sizes) for units in cut if len(units)]
        return parts


class PolicyGradient(Epochs):
    """Base class of GRPO and PPO: the roles they need and the actor's loss."""

    Config: type = PolicyGradientConfig
    advantage_column = "advantage"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kl = KLController(config.kl)
        self.entropy = EntropyController(config.adaptive_entropy, config.entropy_coefficient)

    @property
    def needs_reference(self) -> bool:
        return bool(self.config.kl.coefficient > 0 or self.config.kl.monitor)

    @property
    def kl_in_reward(self) -> bool:
        """True if the KL penalty is subtracted from the reward."""
        return bool(self.config.kl.where == "reward" and self.needs_reference)

    @property
    def corrects(self) -> bool:
        """True if importance weights account for samples of older weights."""
        return bool(self.config.correction.weight != "none")

    def roles(self) -> Sequence[RoleSpec]:
        source = "actor" if self.config.kl.sync_every_steps else None
        reference = RoleSpec(name="reference", worker="reference", weights_from=source)
        actor, rollout = RoleSpec(name="actor", worker="policy"), RoleSpec(name="rollout", worker="rollout")
        return [actor, reference, rollout] if self.needs_reference else [actor, rollout]

    def reads(self) -> Mapping[str, Sequence[str]]:
        old = [] if self.on_policy else ["old_log_probs"]
        reference = ["ref_log_probs"] if self.needs_reference else []
        engine = ["rollout_log_probs"] if self.config.correction.active else []
        return {"actor": [self.advantage_column, *old, *reference, *engine, *self._entropy_column]}

    def writes(self) -> Sequence[str]:
        return [self.advantage_column, *([] if self.on_policy else ["old_log_probs"]), *self._entropy_column]

    @property
    def _entropy_column(self) -> list[str]:
        """Column that carries an adaptive coefficient to the loss."""
        return ["entropy_coefficient"] if self.entropy.adapts else []

    def with_entropy_coefficient(self, roles: Roles, samples: Batch) -> Batch:
        """Add the coefficient of the step as a row column if it adapts; called at the end of `collect`."""
        if not self.entropy.adapts:
            return samples
        roles.note("entropy/coefficient", Mean(self.entropy.coefficient))
        return samples.with_rows(entropy_coefficient=torch.full((len(samples),), self.entropy.coefficient))

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        """Update the policy, without truncated responses if they are masked; move the reference when it is time."""
        if self.config.mask_truncated:
            truncated, length = experience.fetch("truncated", "num_loss_tokens")
            roles.note("experience/masked_tokens", Mean(float(length[truncated].sum())))
            experience = experience.take(np.flatnonzero(~truncated.numpy()))
        metrics = with_effective_size(super().update(roles, experience))
        if "actor/entropy" in metrics:
            self.entropy.observe(metrics["actor/entropy"].value)
        every, num_steps = self.config.kl.sync_every_steps, self.num_updates // self.config.epochs
        if every and num_steps % every == 0:
            roles.send("actor", "reference", mix=self.config.kl.sync_mix)
        return metrics

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        """Return the corrected policy terms, minus the entropy bonus, plus the KL penalty if `kl.where` is loss."""
        config = self.config
        log_probs, entropy = out.log_probs, out.entropy
        assert log_probs is not None, "the actor's outputs have log-probs"
        assert entropy is not None, "the actor's outputs have the entropy"
        old = log_probs.detach() if self.on_policy else batch["old_log_probs"]
        terms, metrics = self.policy_loss(log_probs, old, batch)
        terms, weights = correct(terms, old, batch, config.correction)
        metrics |= weights
        if self.entropy.adapts:
            terms = terms - batch.per_token("entropy_coefficient") * entropy
        elif config.entropy_coefficient:
            terms = terms - config.entropy_coefficient * entropy
        metrics["entropy"] = entropy.detach()
        if self.needs_reference:
            ref = batch["ref_log_probs"]
            if config.kl.coefficient and config.kl.where == "loss":
                terms = terms + config.kl.coefficient * kl_estimate(log_probs, ref, config.kl.estimator)
            metrics["kl_to_reference"] = kl_estimate(log_probs.detach(), ref, "k3")
        return LossTerms(terms=terms, average=config.average, metrics=metrics)

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy gradient's terms, [T], and metrics, without correction, entropy bonus and KL penalty."""
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

    def observe_kl(self, roles: Roles, kl: Tensor) -> None:
        """Adapt the coefficient to the KL of each response, [B]; called once per step, after the penalty."""
        roles.note("kl/per_response", Mean(float(kl.sum()), float(len(kl))))
        roles.note("kl/coefficient", Mean(self.kl.coefficient))
        self.kl.observe(float(kl.mean()), len(kl))

    def advantages(self, batch: Batch) -> Tensor:
        """Return the advantages of a micro-batch, [T]."""
        return batch.per_token(self.advantage_column)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kl": self.kl.state_dict(), "entropy": self.entropy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.kl.load_state_dict(state["kl"])
        if "entropy" in state:  # checkpoints of earlier versions have none
            self.entropy.load_state_dict(state["entropy"])


def sequence_kl(batch: Batch, *, estimator: str) -> Batch:
    """Compute the row column `kl`, the KL of each response over its loss tokens; runs next to the data."""
    kl = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], estimator)  # type: ignore[arg-type]
    return Batch.of(lengths=batch.lengths, rows={"kl": batch.per_row(torch.where(batch["loss_mask"], kl, 0.0))})
