"""A `Batch` as a safetensors file, so that a loss can be tried on the same samples again."""

from __future__ import annotations

import json
from pathlib import Path

from rlcore import Batch
from rlcore.errors import ConfigError

_LENGTHS, _LEVELS = "lengths", "rlcore_levels"


def save_batch(batch: Batch, path: Path) -> None:
    """Write numeric columns and lengths; the metadata marks columns with one value per token."""
    from safetensors.torch import save_file

    names = [name for name in batch.columns if batch.level(name) != "object"]
    tensors = {name: batch[name].detach().clone().contiguous() for name in names}
    levels = {name: batch.level(name) for name in names}
    save_file({**tensors, _LENGTHS: batch.lengths.clone()}, path, metadata={_LEVELS: json.dumps(levels)})


def load_batch(path: Path) -> Batch:
    """Read a batch from a file of `save_batch`. Without metadata, columns with one value per token are found by length.

    Raises:
        ConfigError: the file is missing, not safetensors, or without `lengths`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            levels = json.loads((file.metadata() or {}).get(_LEVELS, "{}"))
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}\nTo write one:  rlcore try algorithm NAME --save {path}"
        ) from error
    if _LENGTHS not in tensors:
        raise ConfigError(
            f"{path} has no tensor '{_LENGTHS}' with the number of tokens of each sample\nIt has: {', '.join(tensors)}."
        )
    lengths = tensors.pop(_LENGTHS)
    num_tokens = int(lengths.sum())
    of_tokens = {
        name
        for name, tensor in tensors.items()
        if levels.get(name, "token" if len(tensor) == num_tokens else "row") == "token"
    }
    try:
        return Batch.of(
            lengths=lengths,
            tokens={name: tensors[name] for name in of_tokens},
            rows={name: tensor for name, tensor in tensors.items() if name not in of_tokens},
        )
    except ValueError as error:
        raise ConfigError(f"{path}: {error}\nA column has one value per token, or one per sample.") from error
