"""Load weights from safetensors into a sharded model; each rank reads only its own part.

Weights that transformers stores under other names or in pieces (the experts of a mixture) are assembled by transformers'
own conversion, one parameter at a time. The peak memory of a rank is its shard and one such parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.errors import ModelError
from rlcore.models.weights import check_names, weight_files


class Conversion:
    """Mapping from tensors in files to parameters. Create it before sharding, which renames the model's classes."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        rules = get_model_conversion_mapping(model)
        self._model = model
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        self._wanted = dict(model.named_parameters(remove_duplicate=False)) | persistent_buffers(model)

    def target(self, key: str) -> tuple[str, str | None]:
        """Return the parameter of a stored tensor, and the pattern of its converter if the tensor is only a part."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        renamed: tuple[str, str | None] = rename_source_key(
            key, self._renamings, self._converters, prefix, self._wanted
        )
        return renamed

    def check_names(self, names: Iterable[str], directory: Path) -> None:
        """Check that the model knows all names, or declares that it ignores them.

        Raises:
            ModelError: a name is unknown.
        """
        ignored = self._model._keys_to_ignore_on_load_unexpected or ()
        check_names(set(names) - self._wanted.keys(), directory, ignored)

    def convert(self, name: str, parts: list[tuple[str, str, Callable[[], Tensor]]]) -> dict[str, Tensor]:
        """Return parameters made from parts (key, pattern, reader); `name` is the first of the parameters."""
        pattern = parts[0][1]
        rule = next(rule for rule in self._converters if pattern in rule.source_patterns)
        fresh = deepcopy(rule)
        for key, part_pattern, read in parts:
            fresh.add_tensor(name, key, part_pattern, read)
        made = fresh.convert(name, model=self._model, config=self._model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> buffer stored in files, such as the bias that balances the experts of a mixture."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def load_shards(parameters: Mapping[str, Tensor], directory: Path, conversion: Conversion) -> None:
    """Fill parameters and buffers (Hugging Face name -> local tensor or DTensor) from the files of a model directory.

    Raises:
        ModelError: a weight is missing, unknown or of another shape, or a file is damaged.
    """
    missing = set(parameters)
    with ExitStack() as files, torch.no_grad():
        try:
            whole, pieces = _sources(directory, conversion, files)
            conversion.check_names([*(name for name, _, _ in whole), *pieces], directory)
            for name, file, key in whole:
                if name in parameters:
                    _fill(parameters[name], file.get_slice(key), name, directory)
                    missing.discard(name)
            for name, parts in pieces.items():
                for made, tensor in conversion.convert(name, parts).items():
                    if made in parameters:
                        _fill(parameters[made], tensor, made, directory)
                        missing.discard(made)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"model.path={directory} has a damaged file: {error}\nCopy the whole directory again."
            ) from error
    if missing:
        raise ModelError(
            f"model.path={directory} lacks {len(missing)} weights of {type(conversion._model).__name__}, the first is"
            f" {min(missing)}\nCopy the whole directory again:  hf download OWNER/NAME --local-dir DIR"
        )


def _sources(directory: Path, conversion: Conversion, files: ExitStack) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return [(name, file, key)] for stored parameters, and name -> parts for parameters that are converted."""
    whole: list[Any] = []
    pieces: dict[str, list[Any]] = {}
    for path in weight_files(directory):
        file = files.enter_context(safe_open(path, "pt"))
        for key in list(file.keys()):
            name, pattern = conversion.target(key)
            if pattern is None:
                whole.append((name, file, key))
            else:
                pieces.setdefault(name, []).append((key, pattern, _reader(file, key)))
    for parts in pieces.values():
        parts.sort(key=lambda part: _natural(part[0]))
    return whole, pieces


def _reader(file: Any, key: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(key)


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts experts.10 after experts.9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def _fill(parameter: Tensor, source: Any, name: str, directory: Path) -> None:
    shape = list(source.get_shape() if hasattr(source, "get_shape") else source.shape)
    if shape != list(parameter.shape):
        raise ModelError(
            f"model.path={directory}: {name} has shape {shape}, but its config.json requires {list(parameter.shape)}\n"
            "Copy the whole directory again."
        )
    local = local_part(parameter)
    if local.numel():
        local.copy_(source[own_part(parameter)])


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank stores."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_as(like: Tensor, local: Tensor) -> Tensor:
    """Return a tensor with the sharding of `like` from the part of this rank."""
    if not isinstance(like, DTensor):
        return local
    mesh, places = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, places, shape=like.shape, stride=like.stride(), run_check=False)


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of this rank's part in the global tensor; like fully_shard, split the tensor axis (last) first."""
    begin, size = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the mesh"
        for axis in reversed(range(tensor.device_mesh.ndim)):
            placement: Any = tensor.placements[axis]
            if placement.is_replicate():
                continue
            dim, parts = placement.dim, tensor.device_mesh.size(axis)
            step = -(-size[dim] // parts)
            before = min(size[dim], step * coordinate[axis])
            begin[dim] += before
            size[dim] = min(step, size[dim] - before)
        assert size == list(tensor.to_local().shape), f"part {size} of a shard of {list(tensor.to_local().shape)}"
    return tuple(slice(start, start + length) for start, length in zip(begin, size))
