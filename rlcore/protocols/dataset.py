"""`Dataset`: rows with named columns, from any source; `rlcore.data.files` is an example.

Created once per run for each of `data.train` and `data.eval`, on the controller, which reads every row once at start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Dataset(Protocol):
    """Rows in a fixed order: the same `path` and `config` must give the same rows, or a resume is refused.

    Optional member: `NamesRows` of `rlcore.protocols.optional`.
    The constructor raises DataError for anything that it cannot read.
    """

    def __init__(self, path: str, config: object) -> None:
        """Open `path`, the value of `data.train` or `data.eval`; `config` is the whole `data` section."""

    @property
    def name(self) -> str:
        """Name used in messages, usually `path`."""

    @property
    def columns(self) -> Sequence[str]:
        """All columns that occur in any row."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, object]:
        """Return row `index`, from 0. A missing column counts as None."""
