"""Sharded checkpoints with torch.distributed.checkpoint, as safetensors.

    shards/shard-00001-model-00001-of-00001.safetensors …   one file per rank, each with where its parts lie
    config.json, generation_config.json                      of the model
    backend.json                                             what belongs to the checkpoint; written last

Tensors are named model.NAME and optimizer.KEY.NAME. Nothing is pickled. A directory without backend.json, or that lacks a
file named in it, is no checkpoint.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
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
from rlcore.models.load import check_directory, fingerprint

MODEL, OPTIMIZER = "model.", "optimizer."
VALUE_HEAD, HEAD_FILE = "value_head.weight", "value_head.safetensors"
_STATE = "backend.json"
_SHARDS = "shards"
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a checkpoint is besides tensors: backend.json."""

    num_steps: int
    model_class: str
    model_path: str
    """Where the run began; adapters need the weights from there."""
    adapter: dict[str, Any] | None = None
    """rank, alpha and targets of LoRA."""
    base: int = 0
    """Fingerprint of the weights that adapters belong to; 0 without adapters."""
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    """Parameter -> what the optimiser counts for it."""
    tensors: dict[str, list[int]] = field(default_factory=dict)
    """Name -> shape of every whole tensor."""
    files: dict[str, int] = field(default_factory=dict)
    """Name -> size of every shard file."""


class Saving:
    """A checkpoint on its way to the disk. The tensors are those of the moment of the call, whatever comes after."""

    def __init__(self, directory: Path, state: State, future: Future[Any] | None) -> None:
        self._directory, self._state, self._future = directory, state, future

    def finish(self) -> None:
        """Wait until every rank has written; then rank 0 makes it a checkpoint."""
        if self._future is not None:
            self._future.result(timeout=_TIMEOUT_S)
        if dist.get_rank() == 0:
            shards = sorted((self._directory / _SHARDS).iterdir())
            whole = asdict(self._state) | {"files": {path.name: path.stat().st_size for path in shards}}
            temporary = self._directory / f".{_STATE}"
            temporary.write_text(json.dumps(whole, indent=1))
            temporary.rename(self._directory / _STATE)


def save(directory: Path, tensors: dict[str, Tensor], state: State, group: dist.ProcessGroup, *, wait: bool) -> Saving:
    """Write the shards; every rank calls it. With `wait` false it returns after a copy to host memory."""
    shards = directory / _SHARDS
    shards.mkdir(exist_ok=True)
    writer = HuggingFaceStorageWriter(str(shards), save_distributed=True)
    if wait:
        save_tensors(tensors, storage_writer=writer, process_group=group)
        return Saving(directory, state, None)
    future: Any = async_save(tensors, storage_writer=writer, process_group=group)
    return Saving(directory, state, future)


def read_state(directory: Path) -> State:
    """What the checkpoint is.

    Raises:
        ModelError: it is none, or a shard is missing or cut off.
    """
    path = directory / _STATE
    if not path.is_file():
        raise ModelError(f"{directory} is not a whole checkpoint: {_STATE} is missing\nNothing was loaded.")
    try:
        state = State(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is not from backend=fsdp: {error}\nResume with the backend that wrote it.") from error
    for name, size in state.files.items():
        file = directory / _SHARDS / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            what = f"has {found} bytes instead of {size}" if found else "is missing"
            raise ModelError(f"{directory} is not a whole checkpoint: {_SHARDS}/{name} {what}\nNothing was loaded.")
    return state


def fingerprint_of(model_path: str | Path) -> int:
    """The same wherever the weights lie."""
    files = check_directory(str(model_path)).glob("*.safetensors")
    return fingerprint(path for path in files if path.name != HEAD_FILE)


def check_same_adapters(directory: Path, state: State, adapter: Mapping[str, Any] | None, model_path: str) -> None:
    """Raises: ModelError: what the checkpoint adds to is another model, or it adds another multiple."""
    if state.adapter is None or adapter is None:
        return
    found, wanted = ({name: of[name] for name in ("lora_rank", "lora_alpha")} for of in (state.adapter, adapter))
    if found != wanted:
        differ = ", ".join(
            f"{name}={value:g} and not {wanted[name]:g}" for name, value in found.items() if value != wanted[name]
        )
        raise ModelError(
            f"{directory} holds adapters with {differ}\n"
            "Give the backend settings that the run began with. Nothing was loaded."
        )
    if state.base and state.base != fingerprint_of(model_path):
        raise ModelError(
            f"{directory} holds adapters of the weights in {state.model_path}, and model.path={model_path} has others\n"
            "Give the model.path that the run began with, or a copy of it. Nothing was loaded."
        )


def check_same_model(directory: Path, state: State, model_class: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises: ModelError: the checkpoint is of another model."""
    stored = {name: shape for name, shape in state.tensors.items() if name.startswith(MODEL)}
    own = {name: list(tensor.shape) for name, tensor in tensors.items() if name.startswith(MODEL)}
    different = sorted(name for name in {*stored, *own} if stored.get(name) != own.get(name))
    if different or state.model_class != model_class:
        first = f": {len(different)} parameters differ, the first is {different[0]}" if different else ""
        raise ModelError(
            f"{directory} is a checkpoint of another model, {state.model_class} and not {model_class}{first}\n"
            "Give the model.path and the backend settings that the run began with. Nothing was loaded."
        )


def read_tensors(
    directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None, *, alone: bool = False
) -> None:
    """Fill tensors (whole ones or DTensors) from the shards; every rank calls it, unless `alone`.

    Raises:
        ModelError: a shard cannot be read.
    """
    reader = HuggingFaceStorageReader(str(directory / _SHARDS))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what `alone` means
            load_tensors(tensors, storage_reader=reader, process_group=group, no_dist=alone)
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ModelError(f"{directory} cannot be read: {reason}\nNothing was loaded.") from error


def export(source: Path, target: Path) -> None:
    """A Hugging Face model from a checkpoint, in one process without devices."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlcore_fsdp.lora import export_adapters

    state = read_state(source)
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
