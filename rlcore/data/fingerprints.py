"""Fingerprints of columns, equal in every process for equal values, so that a resume detects changed data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

_CHUNK: Final = 1024


def fingerprint_of(values: Sequence[Any]) -> str:
    """Return the fingerprint of a column."""
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(values), _CHUNK):
        digest.update(json.dumps(values[start : start + _CHUNK], default=_stable).encode())
    return digest.hexdigest()


def _stable(value: Any) -> Any:
    """Return a stable replacement for a value that JSON cannot encode."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text  # a memory address differs in every process
