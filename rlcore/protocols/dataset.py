"""`Dataset`: rows with named columns, from wherever they lie; `rlcore.data.files` is the first example.

Made once per run for each of `data.train` and `data.eval`, on the controller, which reads every row once at start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Dataset(Protocol):
    """Rows in a fixed order: the same `path` and `config` give the same rows again, or a resumed run is refused.

    Optional member: `NamesRows` of `rlcore.protocols.optional`.
    Raise DataError for what cannot be read, in the constructor.
    """

    def __init__(self, path: str, config: object) -> None:
        """`path` is what the user wrote for `data.train` or `data.eval`; `config` is the whole `data` section."""

    @property
    def name(self) -> str:
        """What messages call it; usually `path`."""

    @property
    def columns(self) -> Sequence[str]:
        """Every column that some row has."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, object]:
        """Row `index`, from 0. A column that it lacks counts as None."""
