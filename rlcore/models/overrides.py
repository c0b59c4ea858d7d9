"""`model.overrides`: a model directory with other values in its config.json, which trainer and engine read alike."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError, did_you_mean
from rlcore.models.load import check_directory, read_config

_CONFIG = "config.json"
_ROPE_IN_PARTS = {"rope_theta", "rope_scaling"}
"""Names in a config.json of transformers before version 5, which has `rope_parameters` instead."""
_OWN_SETTING = {"dtype": "model.precision=bfloat16", "torch_dtype": "model.precision=bfloat16"}


def override_config(path: str, overrides: Mapping[str, Any], cache: Path) -> str:
    """Return a directory below `cache` with the files of a model, as links, and a config.json with other values.

    It is made once for each model and its overrides. A mapping changes only the values that it names. The path itself
    is returned if config.json has these values already.

    Raises:
        ModelError: there is no such model, or transformers does not accept the values.
        ConfigError: the model's configuration has no such value.
    """
    directory = check_directory(path).resolve()
    before = json.loads((directory / _CONFIG).read_text())
    known = read_config(directory).to_dict() | before
    if "rope_parameters" not in before and _ROPE_IN_PARTS & before.keys():
        known = {name: value for name, value in known.items() if name != "rope_parameters"} | {"rope_scaling": {}}
    after = _merged(before, overrides, known, "")
    if after == before:
        return path
    text = json.dumps(after, indent=2)
    files = [file for file in sorted(directory.iterdir()) if file.name != _CONFIG]
    key = hashlib.sha256("\n".join([text, *map(str, files)]).encode()).hexdigest()[:16]
    target = cache / "models" / f"{directory.name}-{key}"
    if not target.is_dir():
        _make(target, text, files)
    return str(target)


def _merged(before: Mapping[str, Any], new: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return `before` with new values; a value of the configuration, or of a part `..._config`, must be known."""
    after = copy.deepcopy(dict(before))
    for name, value in new.items():
        setting = f"model.overrides.{prefix}{name}"
        if name in _OWN_SETTING:
            raise ConfigError(
                f"{setting} has no effect: the type of the numbers is a setting\nType  {_OWN_SETTING[name]}"
            )
        if name not in known:
            raise ConfigError(
                f"{setting}: config.json has no '{prefix}{name}'.{did_you_mean(name, list(known))}\n"
                f"There are: {', '.join(sorted(known))}."
            )
        if not isinstance(value, Mapping):
            after[name] = value
        elif not isinstance(known[name], Mapping | None):
            raise ConfigError(
                f"{setting}: expected a value such as {known[name]!r}, got a mapping\nType  {setting}=VALUE"
            )
        elif name.endswith("_config"):
            after[name] = _merged(before.get(name) or {}, value, known[name] or {}, f"{prefix}{name}.")
        else:
            after[name] = (before.get(name) or {}) | dict(value)
    return after


def _make(target: Path, config: str, files: list[Path]) -> None:
    """Make the directory under a temporary name; one that another process made at the same time is as good."""
    target.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        (making / _CONFIG).write_text(config)
        for file in files:
            os.symlink(file, making / file.name)
        read_config(making)
        try:
            making.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
