"""Models and data sets of the Hugging Face hub by name: OWNER/NAME, and for data OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT.

Models are downloaded once to the cache of huggingface_hub. Data sets are read with the package `datasets`, which keeps
them in its cache and runs no code of a data set.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcore.errors import DataError, ModelError, import_optional

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+){0,2}")
_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "tokenizer.model")


def is_hub_name(text: str) -> bool:
    """Return whether a text that is not a path has the form of a name on the hub."""
    return _NAME.fullmatch(text) is not None and not Path(text).parent.exists()


def read_hub(text: str) -> list[dict[str, Any]]:
    """Return the rows of a split.

    Raises:
        UserError: `datasets` is not installed, there is no such data set or split, or it cannot be downloaded.
    """
    datasets = import_optional(
        "datasets", f"no such file: '{text}'; reading it from the Hugging Face hub", "rlcore[hub]"
    )
    name, *chosen = text.split(":")
    config, split = ([None, *chosen] if len(chosen) < 2 else chosen) if chosen else (None, None)
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of the hub, the network or a file; datasets documents no common type
        reason = " ".join(str(error).split())
        raise DataError(
            f"no such file: '{text}', and it cannot be read from the Hugging Face hub: {type(error).__name__}: {reason}\n"
            f"Type  {name}:SPLIT  or  {name}:CONFIG:SPLIT.  Without a network: "
            f" hf download --repo-type dataset {name} --local-dir DIR  elsewhere, and give its files."
        ) from error
    if isinstance(loaded, dict) and len(loaded) > 1:
        splits = list(loaded)
        raise DataError(f"'{text}' has several splits: {', '.join(splits)}\nType one of them:  {text}:{splits[0]}")
    rows: list[dict[str, Any]] = (next(iter(loaded.values())) if isinstance(loaded, dict) else loaded).to_list()
    return rows


def local_model(path: str, setting: str, progress: Callable[[str], object]) -> str:
    """Return the directory of a model; a path that does not exist is a name on the hub if it has this form.

    Raises:
        ModelError: there is no such model, or it cannot be downloaded.
    """
    if not is_hub_name(path) or ":" in path:
        return path
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(path, allow_patterns=list(_MODEL_FILES))
    except Exception as error:  # of the hub or the network; huggingface_hub documents no common type
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{setting}={path}: there is no such directory, and no model of this name can be downloaded:"
            f" {type(error).__name__}: {reason}\n"
            f"Check the name. Without a network:  hf download {path} --local-dir DIR  elsewhere, and  {setting}=DIR"
        ) from error
    progress(f"{setting}={path} is {directory}")
    return str(directory)
