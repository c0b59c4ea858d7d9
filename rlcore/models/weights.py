"""Weight files of a model directory, and checks that they match its config.json.

Every loader calls both checks: `local` and `hf` through `load_model`, the others when they read the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rlcore.errors import ModelError

_COMPUTED = r"rotary_emb\.inv_freq$"
"""Tensors in old files that are now computed from the configuration."""
_DRAFT = "eh_proj.weight"
"""Weight that marks a multi-token-prediction layer, such as those after the last layer of DeepSeek V3."""


def weight_files(directory: Path) -> list[Path]:
    """Return the files that transformers reads; a directory may also hold the same weights in another layout."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(directory.glob("*.safetensors"))


def check_names(unexpected: Iterable[str], path: str | Path, ignored: Iterable[str] = ()) -> None:
    """Check the names of weights for which the model has no parameter.

    Args:
        ignored: patterns of names that the model's class ignores.

    Raises:
        ModelError: other names are present.
    """
    names = sorted(unexpected)
    known = re.compile("|".join([_COMPUTED, *ignored]))
    drafts = tuple(name.removesuffix(_DRAFT) for name in names if name.endswith(_DRAFT))
    extra = [name for name in names if not known.search(name) and not name.startswith(drafts)]
    if extra:
        raise ModelError(
            f"model.path={path} holds {len(extra)} weights that do not fit its config.json, the first is"
            f" {extra[0]}\n"
            "Use the config.json of these weights: with fewer layers, for example, a smaller model would be trained."
        )


def check_finite(named: Iterable[tuple[str, Tensor]], path: str | Path, *, together: bool = False) -> None:
    """Check the values of all weights.

    Args:
        together: each rank has a part of the weights; every rank calls it and raises if any finds a problem.

    Raises:
        ModelError: a weight has values that are not finite; the message names it.
    """
    found = next(filter(None, (_not_finite(name, weight) for name, weight in named)), "")
    if together:
        reports = [found] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(reports, found)
        found = max(reports)
    if found:
        raise ModelError(
            f"model.path={path}: {found}\n"
            "Copy the whole directory again; if it came from training, use an earlier checkpoint."
        )


@torch.no_grad()
def _not_finite(name: str, weight: Tensor) -> str:
    if bool(weight.sum().isfinite()):  # one pass without a copy, unlike isfinite of all values
        return ""
    count = int((~weight.isfinite()).sum())
    return f"{name} has {count} values that are not finite" if count else ""
