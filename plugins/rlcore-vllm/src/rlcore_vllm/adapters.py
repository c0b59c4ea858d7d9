"""Adapter-only updates: the trainer sends LoRA factors, and the engine computes W + B A with the model in `model.path`.

vLLM loads an adapter from a directory in peft's format. The directory is kept in memory and deleted after loading.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlcore.kits.engine.checks import ExpectedWeights, unfit

_NAME, _NUMBER = "policy", 1
_IN_MEMORY = Path("/dev/shm")


class ExpectedAdapters:
    """Matrices of a model that may have LoRA factors; after the first update, those that must have them."""

    def __init__(self, path: str, max_rank: int) -> None:
        self._matrices = {
            name: shape for name, shape in ExpectedWeights(path).shapes.items() if len(shape) == 2 and "weight" in name
        }
        self._max_rank = max_rank
        self._layers: set[str] = set()

    def nothing(self) -> Iterator[tuple[str, Tensor]]:
        """Yield zero factors, which an engine uses before the first update."""
        layer = next(name for name in self._matrices if any(part.isdigit() for part in name.split(".")))
        rows, columns = self._matrices[layer]
        layer = layer.removesuffix(".weight")
        yield f"{layer}.lora_A.weight", torch.zeros(1, columns)
        yield f"{layer}.lora_B.weight", torch.zeros(rows, 1)

    def checked(self, weights: Iterator[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the same factors after checking them.

        Raises:
            ModelError: a factor is unknown, does not fit its matrix, or is missing at the end.
        """
        ranks: dict[str, dict[str, int]] = {}
        for name, tensor in weights:
            layer, _, part = name.partition(".lora_")
            if part not in ("A.weight", "B.weight"):
                raise unfit(version, f"'{name}' is not a LoRA factor, and rollout.lora_rank={self._max_rank}", _BOTH)
            shape = self._matrices.get(f"{layer}.weight", (0, 0))
            rank = tensor.shape[0 if part == "A.weight" else 1]
            if tuple(tensor.shape) != ((rank, shape[1]) if part == "A.weight" else (shape[0], rank)):
                raise unfit(version, f"'{name}' {tuple(tensor.shape)} does not fit '{layer}.weight' {shape}", _BOTH)
            if rank > self._max_rank:
                raise unfit(version, f"'{name}' has rank {rank}", f"Type  rollout.lora_rank={rank}")
            ranks.setdefault(layer, {})[part] = rank
            yield name, tensor.detach()
        single = [layer for layer, found in ranks.items() if len(found) != 2 or len(set(found.values())) != 1]
        missing = sorted({*single, *(self._layers - set(ranks))})
        if missing or not ranks:
            raise unfit(version, f"adapters of {len(missing)} matrices are incomplete: {missing[:1]}", _BOTH)
        self._layers = set(ranks)


_BOTH = "Give trainer and rollout the same model.path, and type  backend.lora_sync=adapters"


def engine_options(max_rank: int) -> dict[str, Any]:
    """Return vLLM's `EngineArgs` for one adapter of at most this rank, rounded up to a rank that vLLM supports."""
    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= max_rank),
    }


def asked_with(path: str = "unused: loaded before", *, replace: bool = False) -> Any:
    """Return vLLM's `LoRARequest`: for generating or, with a path and `replace`, for loading new factors."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _NUMBER, path, load_inplace=replace)


@contextmanager
def written(factors: Iterator[tuple[str, Tensor]]) -> Iterator[str]:
    """Write the adapter to a temporary directory in peft's format and yield its path."""
    tensors = {f"base_model.model.{name}": tensor.to("cpu", copy=True).contiguous() for name, tensor in factors}
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,  # the factors are already scaled
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        "bias": "none",
    }
    with tempfile.TemporaryDirectory(prefix="rlcore-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as directory:
        (Path(directory) / "adapter_config.json").write_text(json.dumps(described))
        save_file(tensors, Path(directory) / "adapter_model.safetensors")
        yield directory
