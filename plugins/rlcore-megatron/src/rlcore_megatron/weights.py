"""All parameters under their Hugging Face names on every rank: gathered one bucket at a time, or taken from a stream.

A bucket is a few concatenated parameters, or one matrix of all experts of a layer, which is one tensor in transformers.
The stage that holds a bucket broadcasts it over the pipeline; then the devices of each stage all-gather their parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.kits.backend.value_head import VALUE_HEAD
from rlcore_megatron.grid import Grid
from rlcore_megatron.layout import Entry
from rlcore_megatron.memory import HostCopy
from rlcore_megatron.model import Model


class WeightStream:
    """Buckets of the parameters of all stages."""

    def __init__(self, model: Model, grid: Grid, bucket_mb: int) -> None:
        self._grid = grid
        mine = [
            (parameter, entry)
            for parameter, entry in model.entries.items()
            if not entry.is_copy and entry.names != (VALUE_HEAD,)
        ]
        mine.sort(key=lambda pair: (pair[1].together, pair[1].expert or 0))
        self._parameters: list[nn.Parameter] = [parameter for parameter, _ in mine]
        stages: list[list[Entry]] = [[] for _ in range(grid.pipeline.size())]
        dist.all_gather_object(stages, [entry for _, entry in mine], group=grid.pipeline)
        self._stages = [_buckets(entries, bucket_mb * 2**20) for entries in stages]
        self._targets: dict[str, list[tuple[nn.Parameter, Entry]]] = {}
        """Hugging Face name -> this rank's parameters that have a part of it."""
        for parameter, entry in model.entries.items():
            for name in (entry.together,) if entry.is_expert else entry.names:
                self._targets.setdefault(name, []).append((parameter, entry))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> full shape of the parameters of all stages."""
        found: dict[str, tuple[int, ...]] = {}
        for bucket in (bucket for buckets in self._stages for bucket in buckets):
            if bucket[0].is_expert:
                found[bucket[0].together] = (len(bucket) * self._grid.expert.size(), *bucket[0].shape)
            else:
                found |= {where.name: where.shape for entry in bucket for where in entry.slices(0)}
        return found

    def own_parts(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the parameters of this rank, with their values from a stream of full tensors with the names of `shapes`.

        A parameter made from several tensors is yielded when the last of them has arrived.
        """
        parts: dict[nn.Parameter, dict[str, Tensor]] = {}
        for name, tensor in weights:
            for parameter, entry in self._targets.get(name, ()):
                if entry.is_expert:
                    yield parameter, tensor[entry.expert]
                    continue
                where = next(it for it in entry.slices(self._grid.tensor.rank()) if it.name == name)
                part = tensor.narrow(where.axis, where.start, where.stop - where.start)
                own = parts.setdefault(parameter, {})
                own[name] = part if len(entry.names) == 1 else part.clone()
                if len(own) == len(entry.names):
                    yield parameter, entry.weave([own[each] for each in entry.names])
                    del parts[parameter]

    @torch.no_grad()
    def walk(self, away: HostCopy | None) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters, the same on every rank; read them from host memory while they are `away`."""
        remaining = iter(self._parameters)
        device = self._parameters[0].device
        for sender, buckets in enumerate(self._stages):
            for bucket in buckets:
                flat = torch.empty(sum(map(_numel, bucket)), dtype=bucket[0].dtype, device=device)
                if sender == self._grid.pipeline.rank():
                    own = [next(remaining).detach() for _ in bucket]
                    for place, parameter in zip(torch.split(flat, list(map(_numel, bucket))), own):
                        place.copy_((parameter if away is None else away.of(parameter)).reshape(-1))
                if len(self._stages) > 1:
                    dist.broadcast(flat, group=self._grid.pipeline, group_src=sender)
                yield from self._whole(bucket, flat)

    def _whole(self, bucket: Sequence[Entry], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        shards = _gathered(flat, self._grid.expert if bucket[0].is_expert else self._grid.tensor)
        if bucket[0].is_expert:
            yield bucket[0].together, torch.cat([shard.view(-1, *bucket[0].shape) for shard in shards])
            return
        parts = [torch.split(shard, list(map(_numel, bucket))) for shard in shards]
        for i, entry in enumerate(bucket):
            yield from zip(entry.names, entry.whole([part[i].view(entry.shape) for part in parts]))


def _gathered(flat: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [flat]
    shards = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(shards, flat, group=group)
    return shards


def _numel(entry: Entry) -> int:
    return torch.Size(entry.shape).numel()


def _buckets(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Group consecutive parameters of one type into buckets of up to `max_bytes`.

    A larger parameter has its own bucket; the experts of a layer are always in one bucket.
    """
    buckets: list[list[Entry]] = []
    room = 0
    for entry in entries:
        size = _numel(entry) * entry.dtype.itemsize
        last = buckets[-1][-1] if buckets else None
        alike = last is not None and (last.dtype, last.together) == (entry.dtype, entry.together)
        if alike and (size <= room or entry.is_expert):
            buckets[-1].append(entry)
        else:
            buckets.append([entry])
            room = max_bytes
        room -= size
    return buckets
