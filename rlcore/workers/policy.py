"""The trained policy and the frozen reference."""

from __future__ import annotations

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.types import Mean, Metrics, TokenOutputs
from rlcore.workers.model import ModelWorker, TrainedWorker

_SEEN = ("input_ids", "loss_mask")


class PolicyWorker(TrainedWorker):
    """The actor."""

    @dispatch("dp", reads=_SEEN)
    def log_probs(self, batch: Batch, temperature_factor: float = 1.0) -> Batch:
        """Compute the columns `log_probs` and `entropy` of the current policy, zero outside `loss_mask`.

        Args:
            temperature_factor: multiplies the sampling temperature of the outputs.
        """
        out = self.forward(batch, temperature_factor)
        return Batch.of(lengths=batch.lengths, tokens={"log_probs": out.log_probs, "entropy": out.entropy})

    def observe(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """Return the distance in log-probs between the policy before the update and those that sampled, in nats.

        `policy_gap` is over all tokens. `rollout_logprob_gap` compares engine and trainer with the same weights, so only
        samples whose first token comes from the newest version count: later tokens of other samples may depend on a KV
        cache of older weights.
        """
        known = "old_log_probs" in batch or not self.has_stepped
        if "rollout_log_probs" not in batch or out.log_probs is None or not known:
            return {}
        mask = batch["loss_mask"]
        trainer = batch["old_log_probs"] if "old_log_probs" in batch else out.log_probs.detach()
        gap = (trainer - batch["rollout_log_probs"]).abs()
        found = {"policy_gap": mask, "rollout_logprob_gap": mask & (batch.per_token("first_version") == self.version)}
        return {name: Mean(float(gap[it].sum()), float(it.sum())) for name, it in found.items() if it.any()}


class ReferenceWorker(ModelWorker):
    """A frozen policy, such as the one before training, or one that receives the weights of another role."""

    @dispatch("dp", reads=_SEEN)
    def log_probs(self, batch: Batch) -> Batch:
        """Compute the column `ref_log_probs`."""
        return Batch.of(lengths=batch.lengths, tokens={"ref_log_probs": self.forward(batch).log_probs})
