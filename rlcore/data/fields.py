"""Fields of nested columns: `reward_model.ground_truth` is the field `ground_truth` of the column `reward_model`.

A column whose own name has a dot comes first. Rows without the field have None.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from rlcore.errors import ConfigError, did_you_mean

Table: TypeAlias = Mapping[str, list[Any]]
_MOST_FIELDS: Final = 50
"""A column of objects with more fields is listed by its own name only: its keys are data."""


def values_of(name: str, table: Table) -> list[Any] | None:
    """Return the values of a column or a field; None if there is neither. Longer names of columns come first."""
    if name in table:
        return table[name]
    for column, rest in _splits(name):
        if column in table and (values := values_of(rest, _fields(table[column], rest))) is not None:
            return values
    return None


def names_of(table: Table) -> list[str]:
    """Return the columns, for a message; of a column with objects, its fields: `reward_model.ground_truth`."""
    names: list[str] = []
    for column, values in table.items():
        entries: dict[str, list[Any]] = {}
        for key, value in (item for it in values if isinstance(it, Mapping) for item in it.items()):
            entries.setdefault(key, []).append(value)
        inner = names_of(entries)
        names += [f"{column}.{name}" for name in inner] if 0 < len(inner) <= _MOST_FIELDS else [column]
    return names


def renamed(table: Table, rename: Mapping[str, str], source: str) -> dict[str, list[Any]]:
    """Return the columns under their new names, and fields that have one."""
    found: dict[str, list[Any]] = {}
    olds: dict[str, str] = {}
    for old in dict.fromkeys([*table, *rename]):
        new, values = rename.get(old, old), values_of(old, table)
        if values is None:
            raise ConfigError(f"data.rename: {no_column(old, source, table)}")
        if new in found:
            raise ConfigError(
                f"data.rename: the columns '{olds[new]}' and '{old}' of {source} would both be '{new}'\n"
                "Give each its own name."
            )
        found[new], olds[new] = values, old
    return found


def no_column(name: str, source: str, table: Table) -> str:
    """Return the message about a column that does not exist, with those that do."""
    names = names_of(table)
    return f"{source} has no column '{name}'.{did_you_mean(name, names)}\nIt has: {', '.join(names)}."


def _splits(name: str) -> list[tuple[str, str]]:
    """Return the ways to split at a dot, longest beginning first."""
    parts = name.split(".")
    return [(".".join(parts[:n]), ".".join(parts[n:])) for n in range(len(parts) - 1, 0, -1)]


def _fields(values: list[Any], name: str) -> Table:
    """Return those fields of the objects in a column, as columns, that `name` is or may begin with."""
    objects = [value if isinstance(value, Mapping) else {} for value in values]
    wanted = [name, *(beginning for beginning, _ in _splits(name))]
    return {key: [it.get(key) for it in objects] for key in wanted if any(key in it for it in objects)}


class FieldFormatter(string.Formatter):
    """Format strings in which `{column.field}` is a field; `[index]` after it and attributes work as usual."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        column = field_name if field_name in kwargs else field_name.partition("[")[0]
        if column not in kwargs:
            return super().get_field(field_name, args, kwargs)
        value, _ = super().get_field("0" + field_name.removeprefix(column), [kwargs[column]], kwargs)
        return value, field_name
