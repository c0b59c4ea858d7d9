"""Text that UTF-8 cannot encode: a JSON escape such as "\\ud83d" gives half of a surrogate pair.

Prompts and settings with such text are refused; in other columns it is logged as its escape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def unencodable(text: str) -> str | None:
    """Return the first character that UTF-8 cannot encode, or None."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def encodable(value: Any) -> Any:
    """Return JSON-like data with every character that UTF-8 cannot encode replaced by its escape."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {encodable(name): encodable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(item) for item in value]
    return value
