"""Contract of a dataset."""

from __future__ import annotations

from rlcore.protocols.dataset import Dataset
from rlcore.protocols.optional import NamesRows
from rlcore.testing.expect import equal, well_spelt


class DatasetContract:
    """Override `make`."""

    def make(self) -> Dataset:
        """Return a new instance over the same source, with at least two rows."""
        raise NotImplementedError(f"{type(self).__name__} must override make(self)")

    def test_no_optional_member_is_misspelt(self) -> None:
        well_spelt("dataset", self.make())

    def test_rows_are_the_same_again_in_the_same_order(self) -> None:
        data, again = self.make(), self.make()
        rows = [dict(data[i]) for i in range(len(data))]
        assert len(rows) > 1, f"make() must give a dataset of two rows at least, got {len(rows)}"
        equal([dict(again[i]) for i in range(len(again))], rows, "a resumed run must find the rows in their order")
        equal([dict(data[i]) for i in reversed(range(len(rows)))], rows[::-1], "a row must not depend on what was read")

    def test_columns_are_those_of_the_rows(self) -> None:
        data = self.make()
        found = {name for i in range(len(data)) for name in data[i]}
        equal(sorted(data.columns), sorted(found), "the planner checks rewards against `columns`, each name once")

    def test_messages_can_say_what_and_where_it_is(self) -> None:
        data = self.make()
        assert data.name, "messages about the data need its name"
        places = [data.where(i) for i in range(len(data))] if isinstance(data, NamesRows) else []
        equal(len(set(places)), len(places), f"where(i) must return a different location for each row: {places}")
