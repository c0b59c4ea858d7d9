"""Sharded checkpoints with torch.distributed.checkpoint, as safetensors.

    shards/shard-00001-model-00001-of-00001.safetensors …   one file per rank, with the positions of its parts
    config.json, generation_config.json                      configuration of the model
    backend.json                                             list of files and other state; written last

Tensors are named model.NAME and optimizer.KEY.NAME. Nothing is pickled. A checkpoint is incomplete if backend.json, or a
file listed in it, is missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from rlcore.errors import ModelError
from rlcore.kits.backend.checkpoint import SHARDS, ShardSaving, State, read_state
from rlcore.kits.backend.value_head import HEAD_FILE, VALUE_HEAD
from rlcore.models.load import check_directory, fingerprint

MODEL, OPTIMIZER = "model.", "optimizer."


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPState(State):
    """Contents of backend.json."""

    model_class: str
    adapter: dict[str, Any] | None = None
    """LoRA rank, alpha and targets."""
    base: int = 0
    """Fingerprint of the weights that the adapters belong to; 0 without adapters."""
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    """Parameter -> counters of the optimizer."""
    tensors: dict[str, list[int]] = field(default_factory=dict)
    """Name -> global shape of every tensor."""


def save(
    directory: Path, tensors: dict[str, Tensor], state: FSDPState, group: dist.ProcessGroup, *, wait: bool
) -> ShardSaving:
    """Write the shards. Collective. With wait=False, return once the tensors are copied to host memory."""
    shards = directory / SHARDS
    shards.mkdir(exist_ok=True)
    writer = HuggingFaceStorageWriter(str(shards), save_distributed=True)
    written: Any = None
    if wait:
        save_tensors(tensors, storage_writer=writer, process_group=group)
    else:
        written = async_save(tensors, storage_writer=writer, process_group=group)
    return ShardSaving(directory, state, written, group)


def read(directory: Path) -> FSDPState:
    """Read backend.json and check that all shards are there.

    Raises:
        ModelError: the checkpoint is incomplete or was written by another backend.
    """
    return read_state(directory, FSDPState, "fsdp")


def fingerprint_of(model_path: str | Path) -> int:
    """Return a fingerprint of the weights of a model, which does not depend on the directory."""
    files = check_directory(str(model_path)).glob("*.safetensors")
    return fingerprint(path for path in files if path.name != HEAD_FILE)


def check_same_adapters(directory: Path, state: FSDPState, adapter: Mapping[str, Any] | None, model_path: str) -> None:
    """Check that the adapters of a checkpoint belong to this model and have the same rank, alpha and scaling.

    Raises:
        ModelError: they do not.
    """
    if state.adapter is None or adapter is None:
        return
    scaling = {"lora_rank": 0, "lora_alpha": 0.0, "lora_rslora": False}
    found, wanted = ({name: of.get(name, unset) for name, unset in scaling.items()} for of in (state.adapter, adapter))
    if found != wanted:
        differ = ", ".join(
            f"{name}={value:g} and not {wanted[name]:g}" for name, value in found.items() if value != wanted[name]
        )
        raise ModelError(
            f"{directory} holds adapters with {differ}\n"
            "Use the backend settings that the run started with. Nothing was loaded."
        )
    if state.base and state.base != fingerprint_of(model_path):
        raise ModelError(
            f"{directory} holds adapters for the weights in {state.model_path}, but model.path={model_path} has others\n"
            "Use the model.path that the run started with, or a copy of it. Nothing was loaded."
        )


def check_same_model(directory: Path, state: FSDPState, model_class: str, tensors: Mapping[str, Tensor]) -> None:
    """Check that the checkpoint is of this model.

    Raises:
        ModelError: the class, the parameters or their shapes differ.
    """
    stored = {name: shape for name, shape in state.tensors.items() if name.startswith(MODEL)}
    own = {name: list(tensor.shape) for name, tensor in tensors.items() if name.startswith(MODEL)}
    different = sorted(name for name in {*stored, *own} if stored.get(name) != own.get(name))
    if different or state.model_class != model_class:
        first = f": {len(different)} parameters differ, the first is {different[0]}" if different else ""
        raise ModelError(
            f"{directory} is a checkpoint of another model, {state.model_class} and not {model_class}{first}\n"
            "Use the model.path and the backend settings that the run started with. Nothing was loaded."
        )


def read_tensors(
    directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None, *, alone: bool = False
) -> None:
    """Fill tensors (plain ones or DTensors) from the shards. Collective, unless `alone`.

    Raises:
        ModelError: a shard cannot be read.
    """
    reader = HuggingFaceStorageReader(str(directory / SHARDS))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected with `alone`
            load_tensors(tensors, storage_reader=reader, process_group=group, no_dist=alone)
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ModelError(f"{directory} cannot be read: {reason}\nNothing was loaded.") from error


def export(source: Path, target: Path) -> None:
    """Write a Hugging Face model from a checkpoint, in one process on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlcore_fsdp.lora import export_adapters

    state = read(source)
    whole = {name: torch.empty(shape) for name, shape in state.tensors.items() if name.startswith(MODEL)}
    read_tensors(source, whole, None, alone=True)
    named = {name.removeprefix(MODEL): tensor for name, tensor in whole.items()}
    if VALUE_HEAD in named:
        save_file({VALUE_HEAD: named.pop(VALUE_HEAD)}, target / HEAD_FILE)
    if state.adapter is not None:
        check_same_adapters(source, state, state.adapter, state.model_path)
        export_adapters(state.model_path, state.adapter, named, target)
        return
    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    loaded = model.load_state_dict(named, strict=False, assign=True)
    assert not loaded.unexpected_keys, f"{source} holds tensors that are not the model's: {loaded.unexpected_keys[:3]}"
    model.tie_weights()
    model.save_pretrained(target)
