"""Contract of an algorithm. Its roles are `FakeRoles`, so that no model runs.

Shapes: T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.data.shares import UNIT, run_sizes
from rlcore.data.units import whole_units
from rlcore.protocols.algorithm import Algorithm
from rlcore.protocols.optional import TrainsUnits
from rlcore.registry import resolve
from rlcore.testing.expect import allowed, equal, no_misspelled_member
from rlcore.testing.fakes import FakeRoles
from rlcore.types import LossTerms, Mean, TokenOutputs
from rlcore.workers.averaging import count, reduce_metrics, reduce_terms

_ALWAYS = ("input_ids", "loss_mask", "rollout_log_probs", UNIT)
Loss = Callable[[TokenOutputs, Batch], LossTerms]


class AlgorithmContract:
    """Override `make`; write one subclass for each configuration that changes the data flow or the loss."""

    keeps_every_sample = True
    """False for an algorithm that drops some on purpose, such as best of n."""

    def make(self) -> Algorithm:
        """Return a new instance, always with the same settings."""
        raise NotImplementedError(f"{type(self).__name__} must override make(self)")

    def test_no_optional_member_is_misspelled(self) -> None:
        no_misspelled_member("algorithm", self.make())

    def test_roles_contain_an_actor_and_all_readers(self) -> None:
        names = [role.name for role in self.make().roles()]
        assert "actor" in names and len(names) == len(set(names)), (
            f"roles() must have an actor and no duplicates; got {names}"
        )
        equal(sorted({*self.make().reads()} - {*names}), [], f"reads() may name only the roles {names}, not these")

    def test_collect_provides_every_column_that_it_promises(self) -> None:
        algorithm, _, experience = self.collected()
        promised = {*algorithm.writes(), *(name for names in algorithm.reads().values() for name in names)}
        equal(
            sorted(promised - {*experience.columns}),
            [],
            "collect() must return the columns of writes() and reads(); these are missing",
        )

    def test_collect_keeps_every_sample_with_its_own_tokens(self) -> None:
        _, roles, experience = self.collected()
        equal(roles.store.num_far_reads, 0, "token columns must stay in the workers: fetch row columns, use apply()")
        assert roles.generated is not None, "collect() must use roles.generate or roles.demonstrations"
        found, drawn = by_sample(experience.local()), by_sample(roles.generated)
        wanted = drawn if self.keeps_every_sample else [sample for sample in drawn if sample in found]
        equal(found, wanted, "collect() must return every sample once, with its own tokens")

    def test_a_step_without_scored_samples_succeeds(self) -> None:
        with allowed("if every reward failed, no row is left and the run must continue"):
            algorithm, roles, experience = self.collected(keep_scored=False)
            metrics = algorithm.update(roles, experience)
        assert all(isinstance(mean, Mean) for mean in metrics.values()), (
            f"metrics must be Mean, so that they can be merged: {metrics}"
        )

    def test_losses_read_only_declared_columns_and_modify_nothing(self) -> None:
        for (role, batch, loss), (_, fresh, _) in zip(self.losses(), self.losses()):
            with allowed(f"only what reads()[{role!r}] names is sent to the loss"):
                first, second = loss(outputs(batch), batch), loss(outputs(batch), batch)
            assert torch.equal(first.terms, second.terms), (
                f"the loss of {role} is a pure function; its second call differs"
            )
            changed = [name for name in batch.columns if not torch.equal(batch[name], fresh[name])]
            equal(changed, [], f"the loss of {role} must not write into the batch; it changed")
            with allowed("metrics of a loss are one value per token, per row or per unit"):
                reduce_metrics(first.metrics, batch)

    def test_the_gradient_does_not_depend_on_micro_batches(self) -> None:
        for role, batch, loss in self.losses():
            whole = gradient(loss, batch)
            with allowed(f"the loss of {role} must work for any rows; if it compares rows, declare their `unit`"):
                cut = gradient(loss, batch, parts_of(batch)[::-1])
            assert float(whole.abs().max()) > 0, f"the loss of {role} has no gradient at all"
            gap = float((cut - whole).abs().max())
            assert gap <= 1e-6, (
                f"the loss of {role} returns terms and the core averages; cut by {'unit' if UNIT in batch else 'row'}"
                f" it is off by {gap:.3g}"
            )

    def test_tokens_outside_the_mask_do_not_matter(self) -> None:
        for role, batch, loss in self.losses():
            names = [name for name in batch.columns if batch.level(name) == "token" and name not in _ALWAYS]
            noise = {name: torch.where(batch["loss_mask"], batch[name], other(batch[name])) for name in names}
            plain = gradient(loss, batch)
            gap = gradient(loss, batch.with_tokens(**noise), outside=-5.0) - plain
            assert not bool(gap.any()), f"the loss of {role} lets tokens of the prompt change its gradient"
            assert not bool(plain[~batch["loss_mask"]].any()), (
                f"the loss of {role} has a gradient at tokens of the prompt"
            )

    def test_extreme_ratios_stay_finite(self) -> None:
        for role, batch, loss in self.losses():
            finite = [bool(gradient(loss, batch, shift=shift).isfinite().all()) for shift in (-100.0, 100.0)]
            equal(
                finite, [True, True], f"the loss of {role} far from the old outputs: exp() of a log-ratio needs a bound"
            )

    def test_better_responses_become_more_likely(self) -> None:
        _, batch, loss = self.losses()[0]
        push, best = -batch.per_row(gradient(loss, batch)), self.better(self.collected()[2])
        others = push[~best] if not bool(best.all()) else torch.zeros(1)
        assert float(push[best].min()) > float(others.max()), (
            f"rewarded responses must become more likely than others; their changes: {push[best]}, of others: {push[~best]}"
        )

    def test_update_trains_on_every_sample_with_counts_of_the_mini_batch(self) -> None:
        algorithm, roles, experience = self.collected()
        algorithm.update(roles, experience)
        for name in algorithm.reads():
            updates = roles.groups[name].updates
            trained = sorted(int(number) for mini, _ in updates for number in mini.fetch("sample_id"))
            wanted = sorted(experience.fetch("sample_id").tolist() * (len(trained) // len(experience)))
            equal(trained, wanted, f"{name} must train on each sample equally often")
            for mini, counts in updates:
                of_mini = count(mini.fetch("num_loss_tokens"), mini.unit_sizes())
                equal(counts, of_mini, f"{name} is averaged over its mini-batch")

    def test_update_keeps_units_whole(self) -> None:
        algorithm, roles, experience = self.collected()
        if not isinstance(algorithm, TrainsUnits):
            return
        whole = members(experience, algorithm.unit.column)
        algorithm.update(roles, experience)
        for name in algorithm.reads():
            for mini, _ in roles.groups[name].updates:
                assert UNIT in mini, f"the update of {name} must have the column '{UNIT}' of `whole_units`"
                equal(
                    [rows for rows in members(mini, UNIT) if rows not in whole],
                    [],
                    f"a mini-batch of {name} must have all samples of a unit, in the order of collect",
                )

    def test_incomplete_units_are_not_trained(self) -> None:
        algorithm, roles, experience = self.collected()
        if not (isinstance(algorithm, TrainsUnits) and algorithm.unit.size):
            return
        *complete, _ = members(experience, algorithm.unit.column)
        algorithm.update(roles, experience.take(range(len(experience) - 1)))
        for name in algorithm.reads():
            trained = {number for mini, _ in roles.groups[name].updates for number in mini.fetch("sample_id").tolist()}
            equal(
                sorted(trained),
                sorted(number for unit in complete for number in unit),
                f"a unit that has lost a sample is not trained by {name}, and the others are",
            )

    def test_update_reports_a_skipped_step(self) -> None:
        algorithm, roles, experience = self.collected()
        roles.actor.skipped = 1.0
        found = algorithm.update(roles, experience).get("actor/skipped", Mean(0.0)).value
        equal(found > 0, True, "update() must return 'actor/skipped'; the loop ends runs that only skip steps")

    def test_state_is_json_and_a_resume_is_exact(self) -> None:
        algorithm, resumed = self.make(), self.make()
        self.step(algorithm)
        with allowed("state_dict() must be JSON: it is written to a file"):
            resumed.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
        equal(self.step(resumed), self.step(algorithm), "a resumed run must train on the same mini-batches")
        equal(resumed.state_dict(), algorithm.state_dict(), "after the same steps the state must be the same")

    def better(self, experience: Batch) -> Tensor:
        """Return [B] bool: samples that must become more likely than the others, or than before if there are no others."""
        reward: Tensor = experience.fetch("reward")
        return reward > reward.max() / 2

    def collected(
        self, algorithm: Algorithm | None = None, *, keep_scored: bool = True
    ) -> tuple[Algorithm, FakeRoles, Batch]:
        """Return an instance, its roles and its experience from four prompts."""
        algorithm = algorithm or self.make()
        roles, prompts = self.roles_and_prompts(algorithm, keep_scored=keep_scored)
        return algorithm, roles, algorithm.collect(roles, prompts)

    def roles_and_prompts(self, algorithm: Algorithm, *, keep_scored: bool = True) -> tuple[FakeRoles, Batch]:
        """Return the requested roles, without models, and four prompts."""
        roles = FakeRoles(algorithm.roles(), keep_scored=keep_scored)
        rows = {"prompt_id": [8, 5, 9, 2], "group_id": [0, 1, 2, 3], "seed": [11, 12, 13, 14]}
        prompts = Batch.of(lengths=[3, 1, 4, 2], tokens={"input_ids": list(range(3, 13))}, rows=rows)
        return roles, BatchRef.publish(prompts, roles.store)

    def step(self, algorithm: Algorithm) -> list[list[int]]:
        """Run one step; return the sample ids of each mini-batch of the actor."""
        _, roles, experience = self.collected(algorithm)
        algorithm.update(roles, experience)
        return [mini.fetch("sample_id").tolist() for mini, _ in roles.actor.updates]

    def losses(self) -> list[tuple[str, Batch, Loss]]:
        """Return (role, batch for its loss, loss) of each trained role, the actor first."""
        algorithm, _, experience = self.collected()
        if isinstance(algorithm, TrainsUnits):
            experience, _ = whole_units(experience, algorithm.unit)
        found = []
        for role, columns in sorted(algorithm.reads().items()):
            loss = loss_of(algorithm, role)
            always = [name for name in _ALWAYS if name in experience]  # demonstrations have no rollout_log_probs
            found.append((role, experience.select(*{*always, *columns}).local(), loss))
        return found


def loss_of(algorithm: Algorithm, role: str) -> Loss:
    """Return the method that computes the loss of a trained role."""
    spec = next(spec for spec in algorithm.roles() if spec.name == role)
    loss: Loss = getattr(algorithm, spec.loss or resolve("worker", spec.worker).object.default_loss)
    return loss


def other(column: Tensor) -> Tensor:
    """Return different values of the same dtype."""
    return ~column if column.dtype == torch.bool else column + 3


def by_sample(batch: Batch) -> list[tuple[int, list[int]]]:
    """Return (sample id, tokens) in order of the ids."""
    parts = zip(batch["sample_id"].tolist(), batch["input_ids"].split(batch.lengths.tolist()))
    return sorted((number, ids.tolist()) for number, ids in parts)


def parts_of(batch: Batch) -> list[list[int]]:
    """Return the smallest parts into which the core may split a batch: its units, or its rows."""
    return [rows.tolist() for rows in np.split(np.arange(len(batch)), batch.unit_sizes().cumsum()[:-1])]


def members(batch: Batch, column: str) -> list[list[int]]:
    """Return the sample ids of each unit, in row order."""
    cuts = run_sizes(batch.fetch(column).numpy(), column).cumsum()[:-1]
    return [numbers.tolist() for numbers in np.split(batch.fetch("sample_id").numpy(), cuts)]


def outputs(batch: Batch, *, outside: float = 0.0, shift: float = 0.0) -> TokenOutputs:
    """Return outputs of a model close to the old policy, as leaves of a graph."""
    known = [name for name in ("old_log_probs", "rollout_log_probs") if name in batch]
    old = batch[known[0]] if known else torch.where(batch["loss_mask"], -1.0, 0.0)
    new = torch.where(batch["loss_mask"], old + torch.sin(torch.arange(len(old)) * 1.7) / 20 + shift, outside)
    log_probs, values = (new.clone().requires_grad_() for _ in range(2))
    return TokenOutputs(log_probs=log_probs, entropy=new.abs(), values=values)


def gradient(
    loss: Loss, batch: Batch, parts: Sequence[Sequence[int]] | None = None, *, outside: float = 0.0, shift: float = 0.0
) -> Tensor:
    """Return the [T] gradient of the averaged loss for log-probs and values, with the batch split into `parts`."""
    out = outputs(batch, outside=outside, shift=shift)
    columns = {"log_probs": out.log_probs, "entropy": out.entropy, "values": out.values}
    whole = Batch.of(lengths=batch.lengths, tokens=columns)
    counts = count(batch.per_row(batch["loss_mask"].long()), batch.unit_sizes())
    for rows in parts or [range(len(batch))]:
        part = whole.take(rows)
        terms = loss(TokenOutputs(**{name: part[name] for name in part.columns}), batch.take(rows))
        reduce_terms(terms, batch.take(rows), counts).backward()  # type: ignore[no-untyped-call]
    grads = [leaf.grad for leaf in (out.log_probs, out.values) if leaf is not None and leaf.grad is not None]
    return torch.stack(grads).sum(0)
