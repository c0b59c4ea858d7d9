"""Readers for options and files that the commands share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.data.files import read_jsonl
from rlcore.errors import ConfigError


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parse options: ["kl.coefficient=0.1"] -> {"kl": {"coefficient": 0.1}}; values are JSON, otherwise text."""
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--option {text}: expected NAME=VALUE\nType  --option {key or 'NAME'}=VALUE")
        *sections, name = key.split(".")
        place = options
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--option {text}: '{section}' already has a value\nLeave out one of them.")
        if name in place:
            raise ConfigError(f"--option {text}: '{key}' is given twice\nLeave out one of them.")
        place[name] = _value(value)
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_rows(path: Path, what: str) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file.

    Raises:
        UserError: the file is missing or empty, or a line is not a JSON object; names file and line.
    """
    try:
        rows = read_jsonl(path).rows
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}\nGive a JSONL file of {what}.") from error
    if not rows:
        raise ConfigError(f"{path} has no rows\nGive a JSONL file of {what}.")
    return rows


def flat_sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample as a reward sees it, also from a run's samples.jsonl, where data columns are under `columns`."""
    columns = row.get("columns")
    if "completion" not in row or not isinstance(columns, Mapping):
        return dict(row)
    own = {name: value for name, value in row.items() if name not in ("columns", "reward", "parts", "step")}
    return {**columns, **own}
