"""Parameters under their Hugging Face names on every rank: one bucket at a time comes from its stage and is gathered.

A bucket is a few parameters end to end. The stage that has them sends this tensor-parallel device's part down the
pipeline; then the devices of each stage gather the parts. Experts are gathered from the devices that share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore_megatron.grid import Grid
from rlcore_megatron.layout import VALUE_HEAD, Entry
from rlcore_megatron.model import Model


class WeightStream:
    """Knows which parameters the other stages have."""

    def __init__(self, model: Model, grid: Grid, bucket_mb: int) -> None:
        self._grid = grid
        self._parameters: list[nn.Parameter] = []
        mine: list[tuple[Entry, int]] = []
        order = sorted(model.entries.items(), key=lambda item: item[1].is_expert)
        for parameter, entry in order:
            if not entry.is_copy and entry.names != (VALUE_HEAD,):
                self._parameters.append(parameter)
                mine.append((entry, parameter.element_size()))
        self._stages: list[list[list[Entry]]] = []
        for entries in self._exchange(mine, grid.pipeline):
            self._stages.append(_buckets(entries, bucket_mb * 2**20))
        self._experts_per_rank = (model.config.num_moe_experts or 0) // grid.expert.size()

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        device = torch.device(torch.cuda.current_device()) if not self._parameters else self._parameters[0].device
        at, stage = 0, self._grid.pipeline.rank()
        for sender, buckets in enumerate(self._stages):
            for bucket in buckets:
                flat = torch.empty(sum(_numel(entry) for entry in bucket), dtype=bucket[0].dtype, device=device)
                if sender == stage:
                    own = self._parameters[at : at + len(bucket)]
                    torch.cat([parameter.detach().reshape(-1) for parameter in own], out=flat)
                    at += len(bucket)
                if self._grid.pipeline.size() > 1:
                    dist.broadcast(flat, group=self._grid.pipeline, group_src=sender)
                yield from self._whole(bucket, flat)

    def _whole(self, bucket: Sequence[Entry], flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        group = self._grid.expert if bucket[0].is_expert else self._grid.tensor
        shards = [flat]
        if group.size() > 1:
            gathered = flat.new_empty(group.size(), len(flat))
            dist.all_gather(list(gathered), flat, group=group)
            shards = list(gathered)
        parts = [shard.split([_numel(entry) for entry in bucket]) for shard in shards]
        for i, entry in enumerate(bucket):
            own = [part[i].view(entry.shape) for part in parts]
            if entry.is_expert:
                for rank, expert in enumerate(own):
                    yield from zip(self._names_at(entry, rank), entry.split(expert))
            else:
                yield from zip(entry.names, entry.whole(own))

    def _names_at(self, entry: Entry, rank: int) -> tuple[str, ...]:
        """Names on another of the ranks that share the experts."""
        assert entry.expert is not None
        return entry.names_of(entry.expert + (rank - self._grid.expert.rank()) * self._experts_per_rank)

    @staticmethod
    def _exchange(mine: Any, group: dist.ProcessGroup) -> list[Any]:
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, mine, group=group)
        return found


def _numel(entry: Entry) -> int:
    return int(torch.Size(entry.shape).numel())


def _buckets(entries: Sequence[tuple[Entry, int]], max_bytes: int) -> list[list[Entry]]:
    """Parameters of one type and kind, in order, up to `max_bytes` together; a larger one is alone."""
    buckets: list[list[Entry]] = []
    room = 0
    for entry, element_size in entries:
        size = _numel(entry) * element_size
        last = buckets[-1][-1] if buckets else None
        alike = last is not None and (last.dtype, last.is_expert) == (entry.dtype, entry.is_expert)
        if alike and size <= room:
            buckets[-1].append(entry)
            room -= size
        else:
            buckets.append([entry])
            room = max_bytes - size
    return buckets
