"""Size of a YAML text with its aliases expanded: a few lines with aliases can stand for billions of values."""

from __future__ import annotations

from math import inf
from typing import Any

MOST_VALUES = 100_000


def num_values(text: str) -> float:
    """Return the number of values in a YAML text with all aliases expanded; infinity if one contains itself."""
    import yaml  # type: ignore[import-untyped]

    return _size(yaml.compose(text, yaml.SafeLoader), {})


def _size(node: Any, known: dict[int, float]) -> float:
    if id(node) not in known:
        known[id(node)] = inf  # for an alias that contains itself
        children = node.value if isinstance(getattr(node, "value", None), list) else []
        nodes = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        known[id(node)] = 1 + sum(_size(part, known) for part in nodes)
    return known[id(node)]
