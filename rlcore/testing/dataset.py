"""Contract of a dataset."""

from __future__ import annotations

from rlcore.protocols.dataset import Dataset
from rlcore.protocols.optional import NamesRows
from rlcore.testing.expect import equal, no_misspelled_member


class DatasetContract:
    """Override `make`."""

    def make(self) -> Dataset:
        """Return a new instance over the same source, with at least two rows."""
        raise NotImplementedError(f"{type(self).__name__} must override make(self)")

    def test_no_optional_member_is_misspelled(self) -> None:
        no_misspelled_member("dataset", self.make())

    def test_rows_are_reproducible(self) -> None:
        data, again = self.make(), self.make()
        rows = [dict(data[i]) for i in range(len(data))]
        assert len(rows) > 1, f"make() must return a dataset with at least two rows, got {len(rows)}"
        equal([dict(again[i]) for i in range(len(again))], rows, "a resumed run must read the same rows")
        equal(
            [dict(data[i]) for i in reversed(range(len(rows)))],
            rows[::-1],
            "rows must not depend on the order of reading",
        )

    def test_columns_match_the_rows(self) -> None:
        data = self.make()
        found = {name for i in range(len(data)) for name in data[i]}
        equal(sorted(data.columns), sorted(found), "`columns` must contain the name of each column of the rows once")

    def test_the_dataset_and_its_rows_have_names(self) -> None:
        data = self.make()
        assert data.name, "messages about the data need its name"
        places = [data.where(i) for i in range(len(data))] if isinstance(data, NamesRows) else []
        equal(len(set(places)), len(places), f"where(i) must return a different location for each row: {places}")
