"""An algorithm as a plugin author would write it; `tests/test_typing.py` runs mypy over it.

A line that ends in `# error: CODE` must be reported by mypy with that code, and no other line may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlcore import Batch, LossTerms, TokenOutputs
from rlcore.algorithms.base import Epochs
from rlcore.protocols import Roles, RoleSpec
from rlcore.workers.policy import ReferenceWorker


class Mine(Epochs):
    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="policy"), RoleSpec(name="teacher", worker="reference")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": ["ref_log_probs"]}

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        samples = roles.score(roles.generate(prompts)).balance(roles.actor.dp_size)
        samples |= roles.actor.log_probs(samples).rename(log_probs="old_log_probs")
        samples |= roles.group("teacher", ReferenceWorker).log_probs(samples)
        pending = roles.actor.log_probs.submit(samples)
        return samples | pending.result().drop("entropy")

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        assert out.log_probs is not None
        return LossTerms(terms=-out.log_probs)


def misused(roles: Roles, prompts: Batch) -> None:
    roles.genrate(prompts)  # error: attr-defined
    roles.actor.log_prob(prompts)  # error: attr-defined
    roles.actor.log_probs(3)  # error: arg-type
    roles.generate(prompts).ballance(2)  # error: attr-defined
    print(roles.teacher)  # error: attr-defined
