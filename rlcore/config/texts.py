"""Texts in a config: characters that none may have, and ${interpolations} of other settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.config.build import flatten
from rlcore.data.text import unencodable
from rlcore.errors import ConfigError


def check_texts(plain: Mapping[str, Any]) -> None:
    """Refuse text that cannot be part of a path, a log or a checkpoint."""
    for key, value in flatten(plain).items():
        for text in (key, *_texts(value)):
            character = "\0" if "\0" in text else unencodable(text)
            if character:
                raise ConfigError(f"{key}: {text!r} has the character {character!r}\nType it without that character.")


def resolved(plain: Mapping[str, Any]) -> Any:
    """Return the values with every ${interpolation} resolved."""
    if not any("${" in text for text in _texts(plain)):
        return plain
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(dict(plain)), resolve=True)
    except OmegaConfBaseException as error:
        reason, *_ = str(error).splitlines()
        where = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise ConfigError(
            f"{where}{reason}\nAn interpolation names another setting that is given: ${{model.path}}"
        ) from None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)
