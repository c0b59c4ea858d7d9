"""`Roles`: the groups of a run by role name, passed to an algorithm's `collect` and `update`.

It also offers two steps that every algorithm needs and that do bookkeeping: `generate` and `score`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlcore.config.schema import RewardConfig
from rlcore.controller.group import Group
from rlcore.data.batch import Batch
from rlcore.data.columns import REWARD_PREFIX
from rlcore.errors import ConfigError, require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.environment import OUT_OF_TOKENS, OUT_OF_TURNS
from rlcore.protocols.reward import RewardSpec
from rlcore.protocols.roles import WorkerType
from rlcore.protocols.transfer import Transfer
from rlcore.rewards.pipeline import FinalRewards, final_rewards
from rlcore.rewards.relative import relative
from rlcore.trainer.prefetch import Prefetcher
from rlcore.trainer.recording import Replay
from rlcore.trainer.sharing import DeviceSharing
from rlcore.trainer.step import PromptSource, Step
from rlcore.types import Mean, Sampling
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
        specs: Mapping[str, RoleSpec] = MappingProxyType({}),
        transfers: Mapping[tuple[str, str], Transfer] = MappingProxyType({}),
        sharing: DeviceSharing | None = None,
        source: PromptSource | None = None,
        prefetcher: Prefetcher | Replay | None = None,
        on_scored: Callable[[Step, Batch], None] | None = None,
        step: Step | None = None,
    ) -> None:
        """Bundle groups with what they need to work together.

        Args:
            specs: role -> specification with its defaults.
            transfers: (source, target) -> how weights travel.
            source: prompts for `more_prompts`, unless there is a prefetcher.
            prefetcher: prompts whose samples are generated ahead, or were recorded.
            on_scored: called with the samples of each `score`, before any is dropped.
            step: where metrics and costs are noted; `during` binds the roles to another one.
        """
        self.groups = dict(groups)
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self.rewards = rewards
        self._reward_config = reward
        self._specs = specs
        self._transfers = transfers
        self._sharing = sharing
        self.prefetcher = prefetcher
        self._source = prefetcher or source
        self._on_scored = on_scored
        self._warnings: set[str] = set()
        self._bind(step or Step(number=0))

    def during(self, step: Step) -> Roles:
        """Return the same roles with the metrics and costs of their calls noted in `step`."""
        bound = copy(self)
        bound._bind(step)
        return bound

    def _bind(self, step: Step) -> None:
        self.step = step
        acquire = self._sharing.acquire if self._sharing else None
        self.groups = {name: group.recording(step, acquire) for name, group in self.groups.items()}

    def __getattr__(self, name: str) -> Any:
        groups = self.__dict__.get("groups", {})
        if name in groups:
            return groups[name]
        if name == "rollout" and isinstance(self.__dict__.get("prefetcher"), Replay):
            raise ConfigError(
                "the algorithm generates with roles.rollout itself, and schedule.replay starts no engine\n"
                "Train with an engine:  schedule.replay=''"
            )
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

    @property
    def trained(self) -> list[str]:
        """Names of the trained roles."""
        return [name for name in self.groups if self._specs[name].loss]

    def with_state(self) -> list[Group]:
        """Return the groups whose state is part of checkpoints."""
        return [group for name, group in self.groups.items() if group.worker_class.has_state(self._specs[name])]

    def generate(self, prompts: Batch, rollout: str = "rollout") -> Batch:
        """Return the configured number of samples for each prompt, adjacent and in prompt order.

        They are generated now, or were generated ahead for prompts that `more_prompts` returned.
        """
        ahead = self.prefetcher.samples(prompts) if self.prefetcher and rollout == "rollout" else None
        if ahead is None:
            ahead = getattr(self, rollout).generate(prompts, self.sampling, self.samples_per_prompt)
        if self.step.generated is not None and rollout == "rollout":
            self.step.generated.append(ahead)
        return self._counted(ahead)

    def more_prompts(self, count: int) -> Batch:
        """Return prompts for this step: at its start, and to replace prompts whose samples are not used."""
        assert self._source is not None, "roles without data"
        return self._source.take(count, self.step)

    def demonstrations(self, prompts: Batch, columns: Sequence[str]) -> Batch:
        """Build samples from responses in the data: one per column, adjacent and in prompt order.

        Their columns are those of `generate` except those that only an engine knows: rollout_log_probs and versions.
        """
        limit = self.sampling.max_response_tokens
        samples = self._counted(self.actor.demonstrations(prompts, tuple(columns), limit))
        num_cut = int(samples.fetch("truncated").sum())
        self.step.note("response_length/truncated", num_cut, len(samples))
        if num_cut and "truncated" not in self._warnings:
            self._warnings.add("truncated")
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
        self.step.note("response_length/truncated", scored.fetch("truncated").sum(), len(scored))
        for status, count in final.counts.items():
            self.step.note(f"reward/num_{status}", count, 1.0)
        for name, mean in final.metrics.items():
            self.step.note(name, mean.total, mean.weight)
        for name in scored.columns:
            if name.startswith(REWARD_PREFIX):
                part = scored.fetch(name)
                present = ~part.isnan()
                self.step.note(f"reward/{name.removeprefix(REWARD_PREFIX)}", part[present].sum(), present.sum())
        if keep.any():
            self.step.note("reward/mean", values[keep].sum(), keep.sum())
            self.step.note("reward/std", values[keep].std(), 1.0)
        else:
            logger.warning("no sample of this step has a reward; nothing is learned from it")
        self.step.scored = scored
        if self._on_scored:
            self._on_scored(self.step, scored)
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
        """Return the samples with the scores of the reward model, if any, and of the rewards.

        They are computed now, or were ahead for samples that `generate` returned, if these are unchanged.
        """
        if self.prefetcher is None:
            return self._score_now(samples)
        return self.prefetcher.scored(samples, self.step, self._score_now)

    def _score_now(self, samples: Batch) -> Batch:
        if self.has("reward_model"):
            samples |= self.groups["reward_model"].scores(samples)
        return samples | self.reward.score(samples)

    def final_rewards(self, scored: Batch) -> FinalRewards:
        """Convert reward outcomes to numbers; log failures, or raise, per `reward.on_error`."""
        final = final_rewards(outcomes(scored), self._reward_config.on_error)
        if final.messages:
            logger.warning("%d of %d samples have no reward: %s", len(final.messages), len(scored), final.messages[0])
        return final

    def sync(self, version: int) -> None:
        """Send the weights of trained models to the rollouts that use them, as `version`."""
        if self.prefetcher is not None:
            self.prefetcher.before_weights(self.step)
        for source, target in self._transfers:
            if self.groups[target].worker_class.updated_every_step:
                self._send(source, target, version, "weight sync")

    def send(self, source: str, target: str, mix: float = 1.0) -> None:
        """Set each parameter p of the model `target` to (1 - mix) · p + mix · the parameter of `source`.

        Raises:
            AttributeError: the run has no such role.
            ConfigError: `target` does not declare that it receives the weights of `source`, or is an engine and mix < 1.
        """
        for name in (source, target):
            getattr(self, name)
        require(0 < mix <= 1, "mix", "more than 0, at most 1", mix, 1.0)
        if (source, target) not in self._transfers:
            raise ConfigError(
                f"roles.send('{source}', '{target}'): '{target}' does not receive the weights of '{source}'\n"
                f'Declare it in roles():  RoleSpec(name="{target}", …, weights_from="{source}")'
            )
        is_engine = self.groups[target].worker_class.updated_every_step
        if is_engine and mix < 1:
            raise ConfigError(
                f"roles.send('{source}', '{target}', mix={mix:g}): an engine replaces its weights, it cannot mix them\n"
                f"Send all of them:  roles.send('{source}', '{target}')"
            )
        if not is_engine:
            self.step.collecting = False
        self._send(source, target, self.step.number, f"{target}.load_weights", mix)

    def _send(self, source: str, target: str, version: int, what: str, mix: float = 1.0) -> None:
        if self._sharing is not None:
            self._sharing.acquire(self.groups[target], resume=False)
        start, groups = time.perf_counter(), (self.groups[source], self.groups[target])
        with self.step.blocked():
            self._transfers[source, target].send(version, mix)
        self.step.sent(what, {group.pool: group.ranks for group in groups}, time.perf_counter() - start)

    def note(self, name: str, mean: Mean) -> None:
        """Add a metric of the step."""
        self.step.note(name, mean.total, mean.weight)

    def _counted(self, samples: Batch) -> Batch:
        self.step.num_samples += len(samples)
        self.step.num_tokens += samples.num_tokens
        self.step.note("response_length/mean", samples.fetch("num_loss_tokens").double().sum(), len(samples))
        if "num_turns" in samples.columns:
            self._count_episodes(samples)
        return samples

    def _count_episodes(self, samples: Batch) -> None:
        turns, ends, prompt_id = samples.fetch("num_turns", "episode_end", "prompt_id")
        self.step.note("environment/turns", turns.double().sum(), len(samples))
        for end, (name, limit) in _LIMITS.items():
            cut = ends == end
            self.step.note(f"environment/num_{name}", cut.sum(), 1.0)
            if cut.any():
                first = int(prompt_id[cut][0])
                logger.warning("%d of %d episodes reached %s, first for prompt %d", cut.sum(), len(cut), limit, first)
