"""`Roles`: the groups of a run by role name, passed to an algorithm's `collect` and `update`.

It also offers two steps that every algorithm needs and that do bookkeeping: `generate` and `score`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlcore.config.schema import RewardConfig
from rlcore.controller.group import Group
from rlcore.data.batch import Batch
from rlcore.data.columns import REWARD_PREFIX
from rlcore.protocols.environment import OUT_OF_TOKENS, OUT_OF_TURNS
from rlcore.protocols.reward import RewardSpec
from rlcore.protocols.roles import WorkerType
from rlcore.protocols.transfer import Transfer
from rlcore.rewards.pipeline import FinalRewards, final_rewards
from rlcore.rewards.relative import relative
from rlcore.trainer.sharing import DeviceSharing
from rlcore.types import Mean, Metrics, Sampling
from rlcore.workers.reward import outcomes

logger = logging.getLogger(__name__)
if TYPE_CHECKING:
    from rlcore.workers.critic import CriticWorker
    from rlcore.workers.policy import PolicyWorker, ReferenceWorker
    from rlcore.workers.reward import RewardWorker
    from rlcore.workers.rollout import RolloutWorker


_LIMITS = {OUT_OF_TURNS: ("out_of_turns", "episode.max_turns"), OUT_OF_TOKENS: ("out_of_tokens", "their token limit")}
"""`episode_end` -> metric name and limit. Timeouts and errors are counted with those of rewards."""


class Roles:
    """The roles of a run as attributes. A role that the algorithm did not request raises AttributeError."""

    actor: PolicyWorker
    rollout: RolloutWorker
    reward: RewardWorker
    reference: ReferenceWorker
    critic: CriticWorker

    def __init__(
        self,
        groups: Mapping[str, Any],
        *,
        sampling: Sampling,
        samples_per_prompt: int,
        reward: RewardConfig,
        rewards: Sequence[RewardSpec] = (),
        on_scored: Callable[[Batch], None],
    ) -> None:
        self.groups = dict(groups)
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self.metrics: Metrics = {}
        """Metrics of `generate` and `score` since the last `take_metrics`."""
        self.transfer: Transfer | None = None
        self.issue: Callable[[int], Batch] | None = None
        """Takes more prompts from the data."""
        self.sharing: DeviceSharing | None = None
        self._num_samples = self._num_tokens = 0
        self._warned_of_cut = False
        self._reward_config = reward
        self.rewards = rewards
        self._on_scored = on_scored

    def __getattr__(self, name: str) -> Any:
        groups = self.__dict__.get("groups", {})
        if name in groups:
            return groups[name]
        raise AttributeError(f"this run has no role '{name}'; its algorithm asked for {', '.join(groups)}")

    def has(self, name: str) -> bool:
        """Return whether the run has this role."""
        return name in self.groups

    def group(self, name: str, worker: type[WorkerType]) -> WorkerType:
        """Return the group of any role, typed as its worker class.

        Raises:
            AttributeError: the run has no role of this name.
            TypeError: the role has workers of another class.
        """
        group: Any = getattr(self, name)
        if not issubclass(group.worker_class, worker):
            raise TypeError(f"role '{name}' has workers of {group.worker_class.__name__}, not {worker.__name__}")
        return cast(WorkerType, group)

    def trained(self) -> list[Group]:
        """Return the groups whose models are updated."""
        return [self.groups[name] for name in ("actor", "critic") if name in self.groups]

    def generate(self, prompts: Batch) -> Batch:
        """Generate the configured number of samples for each prompt, adjacent and in prompt order."""
        return self._counted(self.rollout.generate(prompts, self.sampling, self.samples_per_prompt))

    def more_prompts(self, count: int) -> Batch:
        """Return more prompts for this step, to replace prompts whose samples are not used."""
        assert self.issue is not None, "roles without data"
        return self.issue(count)

    def demonstrations(self, prompts: Batch, columns: Sequence[str]) -> Batch:
        """Build samples from responses in the data: one per column, adjacent and in prompt order.

        Their columns are those of `generate` except those that only an engine knows: rollout_log_probs and versions.
        """
        limit = self.sampling.max_response_tokens
        samples = self._counted(self.actor.demonstrations(prompts, tuple(columns), limit))
        num_cut = int(samples.fetch("truncated").sum())
        self._note("response_length/truncated", num_cut, len(samples))
        if num_cut and not self._warned_of_cut:
            self._warned_of_cut = True
            logger.warning(
                "%d of the %d responses of this step have more than %d tokens and are truncated, so their end is not learned;"
                " type  sampling.max_response_tokens=%d  (response_length/truncated is the fraction in each step)",
                *(num_cut, len(samples), limit, 2 * limit),
            )
        return samples

    def score(self, samples: Batch) -> Batch:
        """Add rewards; samples without one are counted and dropped, kept or end the run, per `reward.on_error`."""
        scored = self.compute_rewards(samples)
        final = self.final_rewards(scored)
        values, keep = np.array(final.rewards), np.array(final.keep, dtype=bool)
        self._note("response_length/truncated", scored.fetch("truncated").sum(), len(scored))
        for status, count in final.counts.items():
            self._note(f"reward/num_{status}", count, 1.0)
        for name, mean in final.metrics.items():
            self._note(name, mean.total, mean.weight)
        for name in scored.columns:
            if name.startswith(REWARD_PREFIX):
                part = scored.fetch(name)
                present = ~part.isnan()
                self._note(f"reward/{name.removeprefix(REWARD_PREFIX)}", part[present].sum(), present.sum())
        if keep.any():
            self._note("reward/mean", values[keep].sum(), keep.sum())
            self._note("reward/std", values[keep].std(), 1.0)
        else:
            logger.warning("no sample of this step has a reward; nothing is learned from it")
        self._on_scored(scored)
        if any(spec.relative != "no" for spec in self.rewards):
            values = self._against_their_groups(scored, keep)
        return scored.with_rows(reward=values.astype(np.float32)).take(np.flatnonzero(keep))

    def _against_their_groups(self, scored: Batch, keep: np.ndarray) -> np.ndarray:
        """Return [B] float64 weighted sums, with relative rewards compared to the prompt's other samples.

        Samples kept without a score (`reward.on_error=zero`) count as 0 in every reward before the comparison.
        """
        failed, group_id = scored.fetch("reward").isnan().numpy(), scored.fetch("group_id").numpy()
        total = np.zeros(len(scored))
        for spec in self.rewards:
            part = scored.fetch(REWARD_PREFIX + spec.name).double().numpy()
            part = np.where(failed, np.where(keep, 0.0, np.nan), part)
            total += spec.weight * np.nan_to_num(relative(part, group_id, spec.relative))
        return total

    def compute_rewards(self, samples: Batch) -> Batch:
        """Return the samples with the scores of the reward model, if any, and of the rewards."""
        if self.has("reward_model"):
            samples |= self.groups["reward_model"].scores(samples)
        return samples | self.reward.score(samples)

    def final_rewards(self, scored: Batch) -> FinalRewards:
        """Convert reward outcomes to numbers; log failures, or raise, per `reward.on_error`."""
        final = final_rewards(outcomes(scored), self._reward_config.on_error)
        if final.messages:
            logger.warning("%d of %d samples have no reward: %s", len(final.messages), len(scored), final.messages[0])
        return final

    def share_devices(self, others: Sequence[Group]) -> None:
        """Let these groups, which are offloaded, share devices with the rollout from now on."""
        self.sharing = DeviceSharing(self.groups["rollout"], others, lambda name, value: self._note(name, value, 1.0))

    def sync(self, version: int) -> None:
        """Send the actor's weights to the rollout, if there is one, as `version`."""
        if self.sharing is not None:
            self.sharing.acquire(self.groups["rollout"])
        if self.transfer is not None:
            self.transfer.send(version)

    def take_metrics(self) -> Metrics:
        """Return the metrics and reset them."""
        taken, self.metrics = self.metrics, {}
        return taken

    def take_used(self) -> tuple[int, int]:
        """Return the numbers of samples and tokens since the last call, and reset them."""
        used = self._num_samples, self._num_tokens
        self._num_samples = self._num_tokens = 0
        return used

    def _counted(self, samples: Batch) -> Batch:
        self._num_samples += len(samples)
        self._num_tokens += samples.num_tokens
        self._note("response_length/mean", samples.fetch("num_loss_tokens").double().sum(), len(samples))
        if "num_turns" in samples.columns:
            self._count_episodes(samples)
        return samples

    def _count_episodes(self, samples: Batch) -> None:
        turns, ends, prompt_id = samples.fetch("num_turns", "episode_end", "prompt_id")
        self._note("environment/turns", turns.double().sum(), len(samples))
        for end, (name, limit) in _LIMITS.items():
            cut = ends == end
            self._note(f"environment/num_{name}", cut.sum(), 1.0)
            if cut.any():
                first = int(prompt_id[cut][0])
                logger.warning("%d of %d episodes reached %s, first for prompt %d", cut.sum(), len(cut), limit, first)

    def _note(self, name: str, total: Any, weight: float) -> None:
        self.metrics[name] = self.metrics.get(name, Mean(0.0, 0.0)) + Mean(float(total), float(weight))
