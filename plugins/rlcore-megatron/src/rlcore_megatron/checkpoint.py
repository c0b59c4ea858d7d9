"""Checkpoints as slices of Hugging Face tensors, readable by any grid. Nothing is pickled.

    shards/rank-00000.safetensors …       tensors of each rank that no lower rank holds
    config.json, generation_config.json   configuration of the model
    backend.json                          list of files and other state; written last

Tensors are named param.NAME, exp_avg.NAME and exp_avg_sq.NAME, all float32. megatron-core's own checkpoints are not used,
because parts of them are pickles.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from rlcore.errors import ModelError
from rlcore.kits.backend.checkpoint import SHARDS, ShardSaving, State, read_state
from rlcore.kits.backend.value_head import HEAD_FILE, VALUE_HEAD
from rlcore.models.load import check_directory, read_config
from rlcore_megatron.families import TOP
from rlcore_megatron.files import TensorFiles, write
from rlcore_megatron.layout import Slice

_CONFIGS = ("config.json", "generation_config.json")
_FILE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronState(State):
    """Contents of backend.json."""

    model: dict[str, int | str]
    """Sizes of the model, and its head."""


def save(
    directory: Path,
    source: Path,
    state: MegatronState,
    tensors: Mapping[str, Tensor],
    slices: Mapping[str, Slice],
    group: dist.ProcessGroup,
) -> ShardSaving:
    """Begin to write this rank's file in a thread, if the rank has tensors to save. Rank 0 copies the configuration."""
    shards, rank = directory / SHARDS, dist.get_rank()
    shards.mkdir(exist_ok=True)
    for name in _CONFIGS if rank == 0 else ():
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    thread = ThreadPoolExecutor(1, "checkpoint")
    path = shards / f"rank-{rank:05}.safetensors"
    written = thread.submit(write, path, tensors, slices) if tensors else None
    thread.shutdown(wait=False)
    return ShardSaving(directory, state, written, group)


def read(directory: Path) -> MegatronState:
    """Read backend.json and check that all shards are there.

    Raises:
        ModelError: the checkpoint is incomplete or was written by another backend.
    """
    return read_state(directory, MegatronState, "megatron")


def check_same_model(directory: Path, state: MegatronState, own: Mapping[str, int | str]) -> None:
    """Check that the checkpoint is of this model.

    Raises:
        ModelError: it is of another one; the message names the difference.
    """
    for name, value in own.items():
        if state.model.get(name) != value:
            raise ModelError(
                f"{directory} is a checkpoint of another model: {name} is {state.model.get(name)} there and {value} here\n"
                "Use the model.path that the run started with. Nothing was loaded."
            )


def open_shards(directory: Path, state: MegatronState) -> TensorFiles:
    """Open the shards of a checkpoint."""
    return TensorFiles(directory, [directory / SHARDS / name for name in state.files])


def export(source: Path, target: Path) -> None:
    """Write a Hugging Face model from a checkpoint, in one process on the CPU, a few gigabytes at a time."""
    state = read(source)
    with open_shards(source, state) as files:
        prefix = "param."
        names = [key.removeprefix(prefix) for key in files.shapes if key.startswith(prefix)]
        every = [_whole(name, files.shapes[prefix + name]) for name in sorted(names)]
        files.check(every, prefix)
        wholes = {where.name: where for where in every if where.name != VALUE_HEAD}
        empty = {name: torch.empty(where.shape, device="meta") for name, where in wholes.items()}
        groups = split_torch_state_dict_into_shards(empty, max_shard_size=_FILE_BYTES).filename_to_tensors
        weight_map: dict[str, str] = {}
        num_bytes = 0
        for file, group in groups.items():
            tensors = {name: files.read(wholes[name], prefix).contiguous() for name in group}
            if not weight_map and state.model["head"] == "value":
                tensors |= _not_trained(source, state)
            save_file(tensors, target / file, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        for head in (where for where in every if where.name == VALUE_HEAD):
            save_file({VALUE_HEAD: files.read(head, prefix).contiguous()}, target / HEAD_FILE)
    if len(groups) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for name in _CONFIGS:
        if (source / name).is_file():
            config = json.loads((source / name).read_text())
            config.pop("torch_dtype", None)  # older name of dtype
            config |= {"dtype": "float32"} if name == "config.json" else {}
            (target / name).write_text(json.dumps(config, indent=2))


def _not_trained(source: Path, state: MegatronState) -> dict[str, Tensor]:
    """Return the untied output embedding of a critic, from the model that the run started from."""
    if read_config(source).tie_word_embeddings:
        return {}
    began = check_directory(state.model_path, f"model.path of the run of {source}, now")
    with TensorFiles(began, began.glob("*.safetensors")) as files:
        (name,) = TOP["output_layer.weight"].theirs
        where = _whole(name, files.shapes.get(name, (0,)))
        files.check([where])
        return {name: files.read(where).float().contiguous()}


def _whole(name: str, shape: tuple[int, ...]) -> Slice:
    return Slice(name, 0, 0, shape[0], shape)
