"""Contract of a dispatch mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlcore.data.batch import Batch
from rlcore.protocols.dispatch import Call, Dispatch
from rlcore.testing.expect import allowed, equal
from rlcore.types import Mean, Mesh

_GRIDS = [
    [Mesh(rank=r, world_size=d * t, dp_rank=r // t, dp_size=d, returns=r % t == t - 1) for r in range(d * t)]
    for d, t in ((1, 1), (3, 1), (2, 2))
]
"""One rank; three shares; two shares of two ranks each, of which the second returns."""


class DispatchContract:
    """Override `make`, and `call` if the mode needs arguments other than a batch and a number."""

    def make(self) -> Dispatch:
        """Return the mode."""
        raise NotImplementedError(f"{type(self).__name__} must override make(self)")

    def call(self, meshes: Sequence[Mesh], num_rows: int = 5) -> Call:
        """Return a call that the mode can split over these ranks."""
        return Call((rows(num_rows),), {"temperature": 0.7})

    def answer(self, call: Call, mesh: Mesh) -> Any:
        """Return the result of a worker's method."""
        return f"rank {mesh.rank}"

    def test_every_rank_gets_a_call_or_none(self) -> None:
        for meshes in _GRIDS:
            calls = self.make().split(self.call(meshes), meshes)
            equal(len(calls), len(meshes), "split must return one entry for each rank, in rank order")
            good = any(calls) and all(one is None or isinstance(one, Call) for one in calls)
            assert good, f"each entry must be a Call or None, and at least one a Call; got {calls}"

    def test_split_does_not_modify_its_arguments(self) -> None:
        for meshes in _GRIDS:
            call = self.call(meshes)
            self.make().split(call, meshes)
            equal(show(call), show(self.call(meshes)), "split must not change its arguments")

    def test_results_are_in_rank_order_and_skip_ranks_not_called(self) -> None:
        for meshes in _GRIDS:
            mode = self.make()
            calls = mode.split(self.call(meshes), meshes)
            outputs = [None if one is None else self.answer(one, mesh) for one, mesh in zip(calls, meshes)]
            with allowed("collect must accept None for a rank that was not called"):
                result = mode.collect(outputs, meshes)
            assert result is not None, "a rank was called, so collect() must return its result"
            if isinstance(result, list):
                equal(result, [one for one in outputs if one in result], "results must be in rank order")


class RowDispatchContract(DispatchContract):
    """Contract of a mode that splits batches by rows. Results are metrics if `metrics`, else batches."""

    metrics = False

    def answer(self, call: Call, mesh: Mesh) -> Any:
        share: Batch = call.args[0] if mesh.returns else call.args[0].take([])
        return {"rows": Mean(float(len(share)), 1.0)} if self.metrics else share

    def test_each_row_is_in_one_share_and_ranks_of_a_share_get_the_same(self) -> None:
        for meshes in _GRIDS:
            for num_rows in (5, 4, 1, 0):
                calls = self.make().split(self.call(meshes, num_rows), meshes)
                shares = [one.args[0]["row"].tolist() for one in calls if one is not None]
                equal(len(shares), len(meshes), "every rank must be called, even without rows: collectives wait for it")
                first = {mesh.dp_rank: share for share, mesh in reversed(list(zip(shares, meshes)))}
                equal(shares, [first[mesh.dp_rank] for mesh in meshes], "ranks of one dp_rank must get the same rows")
                laid = [row for dp_rank in sorted(first) for row in first[dp_rank]]
                equal(laid, list(range(num_rows)), "the shares in order of dp_rank must be the rows in order")

    def test_rows_of_a_unit_are_in_one_share(self) -> None:
        units = [[0, 1, 2], [3], [4, 5]]
        batch = rows(6).with_rows(unit_id=torch.tensor([5, 5, 5, 8, 9, 9]))
        for meshes in _GRIDS:
            calls = self.make().split(Call((batch, 3)), meshes)
            shares = {mesh.dp_rank: one.args[0]["row"].tolist() for one, mesh in zip(calls, meshes) if one is not None}
            for unit in units:
                whole = any(set(unit) <= set(share) for share in shares.values())
                assert whole, f"rows with one unit_id must be in one share; {unit} are cut: {shares}"

    def test_collect_merges_one_result_per_share_in_row_order(self) -> None:
        for meshes in _GRIDS:
            for num_rows in (5, 1, 0):
                calls = self.make().split(self.call(meshes, num_rows), meshes)
                outputs = [self.answer(one, mesh) for one, mesh in zip(calls, meshes) if one is not None]
                result = self.make().collect(outputs, meshes)
                found = result["rows"].total if self.metrics else result["row"].tolist()
                wanted = num_rows if self.metrics else list(range(num_rows))
                equal(found, wanted, "collect must use the ranks whose mesh has `returns`, in row order")

    def test_named_batches_are_split_and_other_arguments_replicated(self) -> None:
        for meshes in _GRIDS:
            calls = self.make().split(Call((3,), {"batch": rows(4), "name": "x"}), meshes)
            sizes = {mesh.dp_rank: len(one.kwargs["batch"]) for one, mesh in zip(calls, meshes) if one is not None}
            equal(sum(sizes.values()), 4, f"batch=… must be split like a positional batch: {sizes}")
            rest = [(one.args, one.kwargs["name"]) for one in calls if one is not None]
            equal(rest, [((3,), "x")] * len(meshes), "arguments other than batches must go to every rank unchanged")


def rows(number: int) -> Batch:
    """Return rows with their numbers in the column `row`, of 1, 2, 1, 2, … tokens."""
    lengths = [1 + i % 2 for i in range(number)]
    ids = torch.arange(sum(lengths))
    return Batch.of(lengths=lengths, tokens={"input_ids": ids}, rows={"row": torch.arange(number)})


def show(call: Call) -> str:
    """Format all arguments of a call."""
    plain = [one["row"].tolist() if isinstance(one, Batch) else one for one in (*call.args, *call.kwargs.values())]
    return f"{plain} {sorted(call.kwargs)}"
