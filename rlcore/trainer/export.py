"""Export a checkpoint as a directory in Hugging Face layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError, UserError, did_you_mean, did_you_mean_path
from rlcore.models.load import TOKENIZER_FILES, copy_tokenizer
from rlcore.registry import resolve
from rlcore.trainer.checkpoint import Checkpoint, checkpoint_paths, newest, read_checkpoint

_GIVE = "Give a run or one of its checkpoints:  outputs/RUN  or  outputs/RUN/checkpoints/step_000100"


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at a path, or the newest complete one of a run's directory or its `checkpoints`.

    Raises:
        UserError: no complete checkpoint is there.
    """
    for directory in (path, path / "checkpoints"):
        if paths := checkpoint_paths(directory):
            return newest(directory, checksums=True) or read_checkpoint(paths[-1])
    if not path.is_dir():
        siblings = [p for p in path.parent.glob("*") if p.is_dir()]
        raise UserError(f"there is no directory {path}.{did_you_mean_path(path, siblings)}\n{_GIVE}")
    if not (path / "trainer.json").is_file():
        raise UserError(f"{path} contains no checkpoint\n{_GIVE}")
    return read_checkpoint(path)


def export(checkpoint: Checkpoint, target: Path, role: str = "actor", dtype: str = "") -> None:
    """Write the model of a role and its tokenizer to a new directory, under a temporary name until complete.

    Args:
        dtype: type of the weights, such as "bfloat16"; empty: that of the checkpoint.

    Raises:
        UserError: the role has no model in this checkpoint, `target` exists, or a weight overflows `dtype`.
    """
    source = role_directory(checkpoint, role)
    if target.exists():
        raise UserError(f"{target} already exists\nGive a new directory, or remove it:  rm -r {target}")
    beside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}\nGive another directory.") from error
    try:
        backend: Any = resolve("backend", checkpoint.state["config"]["backend"]["name"]).object
        backend.export(source, beside)
        if dtype:
            _convert(beside, dtype)
        copy_tokenizer(source, beside)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _convert(directory: Path, dtype: str) -> None:
    """Convert the weights of a Hugging Face model in place, one file at a time."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in directory.glob("model*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.to(getattr(torch, dtype))
                if not tensors[name].isfinite().all():
                    raise UserError(f"weight '{name}' is too large for {dtype}\nType  --dtype bfloat16")
        save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def is_model(directory: Path) -> bool:
    """Return whether a backend saved a Hugging Face model with its tokenizer, which needs no export."""
    weights = ("model.safetensors", "model.safetensors.index.json")
    config, found = (directory / "config.json").is_file(), any((directory / name).is_file() for name in weights)
    return config and found and any((directory / name).is_file() for name in TOKENIZER_FILES)


def role_directory(checkpoint: Checkpoint, role: str) -> Path:
    """Return the directory of a role in a checkpoint."""
    roles = sorted(path.name for path in checkpoint.path.iterdir() if path.is_dir())
    if role not in roles:
        raise UserError(
            f"{checkpoint.path} has no role '{role}'.{did_you_mean(role, roles)}\nRoles with a model: {', '.join(roles)}"
        )
    return checkpoint.path / role
