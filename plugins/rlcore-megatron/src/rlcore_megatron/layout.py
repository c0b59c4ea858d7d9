"""Mapping between the parameters of a rank and slices of Hugging Face tensors. Pure functions without communication.

Tensor-parallel device r of R has rows r·n/R to (r+1)·n/R of each of q, k and v, and interleaves its own heads. So every
part of a parameter is a slice of one Hugging Face tensor; loading, checkpoints and weight updates are built on this. The
vocabulary is padded to R equal parts; padding is never saved.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import ModelError
from rlcore.kits.backend.value_head import VALUE_HEAD
from rlcore_megatron.families import TOP, Family, Join, Rule


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows (or columns) start to stop of a tensor. Example: Slice("lm_head.weight", 0, 64, 128, (128, 32))"""

    name: str
    axis: int
    start: int
    stop: int
    shape: tuple[int, ...]
    """Shape of the full tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter of one rank. Plain data that ranks exchange."""

    theirs: tuple[str, ...]
    """Hugging Face names of its parts; {expert} stands for the index of an expert."""
    shape: tuple[int, ...]
    """Shape of the parameter on this rank."""
    dtype: torch.dtype
    cut: int | None
    join: Join
    devices: int
    """Number of tensor-parallel devices that the parameter is split over; 1 if replicated."""
    vocabulary: int | None = None
    """Number of rows without padding, if the rows are the vocabulary."""
    per_group: int = 0
    """Query heads per key head."""
    head_size: int = 0
    expert: int | None = None
    """Index of the expert in the whole model, for a parameter of an expert."""
    together: str = ""
    """Name in transformers of the tensor of all experts in the layer."""
    is_copy: bool = False
    """True for the copy of a tied embedding on the last stage of a pipeline: loaded, but not saved."""

    @property
    def is_expert(self) -> bool:
        return self.expert is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names of its parts."""
        return tuple(name.replace("{expert}", str(self.expert)) for name in self.theirs)

    def split(self, parameter: Tensor) -> list[Tensor]:
        """Split a parameter of this rank into its parts, including padding."""
        if self.join == "one":
            return [parameter]
        if self.join == "stacked":
            return list(parameter.chunk(len(self.theirs), 0))
        rest = self.shape[1:]
        woven = parameter.reshape(-1, self.per_group + 2, self.head_size, *rest)
        return [part.reshape(-1, *rest) for part in (woven[:, :-2], woven[:, -2], woven[:, -1])]

    def weave(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parameter made from its parts; the inverse of `split`."""
        if self.join == "one":
            part = parts[0]
            return part if self.vocabulary is None else _padded(part, self.shape[0])
        if self.join == "stacked":
            return torch.cat(list(parts))
        rest = self.shape[1:]
        groups = [part.reshape(-1, n, self.head_size, *rest) for part, n in zip(parts, (self.per_group, 1, 1))]
        return torch.cat(groups, 1).reshape(self.shape)

    def slices(self, device: int) -> list[Slice]:
        """Return the slices of the full tensors that are the parts of a tensor-parallel device."""
        axis = self.cut or 0
        found = []
        for name, shape in zip(self.names, self._part_shapes()):
            rows = shape[axis]
            whole = self.vocabulary or rows * self.devices
            start = rows * device if self.devices > 1 else 0
            outer = (*shape[:axis], whole, *shape[axis + 1 :])
            found.append(Slice(name, axis, min(start, whole), min(start + rows, whole), outer))
        return found

    def whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the full Hugging Face tensors from the parameters of all tensor-parallel devices."""
        if self.devices == 1:
            return [part[: self.vocabulary] for part in self.split(shards[0])]
        parts = zip(*(self.split(shard) for shard in shards))
        return [torch.cat(part, self.cut or 0)[: self.vocabulary] for part in parts]

    def _part_shapes(self) -> list[tuple[int, ...]]:
        rows, rest = self.shape[0], self.shape[1:]
        if self.join == "one":
            return [self.shape]
        if self.join == "stacked":
            return [(rows // len(self.theirs), *rest)] * len(self.theirs)
        one = rows // (self.per_group + 2)
        return [(one * self.per_group, *rest), (one, *rest), (one, *rest)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rules for mapping the parameters of a model."""

    family: Family
    config: Any
    """Configuration of the Hugging Face model."""
    devices: int
    """Number of tensor-parallel devices."""
    tied: bool
    is_critic: bool

    def entry(self, name: str, parameter: Tensor, *, first_layer: int, first_expert: int) -> Entry:
        """Return the entry of a parameter in a chunk whose first layer is layer `first_layer` of the model."""
        rule, prefix, expert = self._rule(name, first_layer, first_expert)
        in_vocabulary = rule in (TOP["embedding.word_embeddings.weight"], TOP["output_layer.weight"])
        is_copy = self.tied and name == "output_layer.weight" and not self.is_critic
        return Entry(
            theirs=TOP["embedding.word_embeddings.weight"].theirs
            if is_copy
            else tuple(prefix + n for n in rule.theirs),
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            cut=rule.cut,
            join=rule.join,
            devices=self.devices if rule.cut is not None else 1,
            vocabulary=self.config.vocab_size if in_vocabulary else None,
            per_group=self.config.num_attention_heads // self.config.num_key_value_heads,
            head_size=head_size(self.config),
            expert=expert if "{expert}" in rule.ours else None,
            together=prefix + rule.together if rule.together else "",
            is_copy=is_copy,
        )

    def _rule(self, name: str, first_layer: int, first_expert: int) -> tuple[Rule, str, int]:
        if self.is_critic and name == "output_layer.weight":
            return Rule(ours="", theirs=(VALUE_HEAD,)), "", 0
        if name in TOP:
            return TOP[name], "", 0
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if found is not None:
            for rule in self.family.rules:
                expert = rule.expert(found[2])
                if expert is not None:
                    return rule, f"model.layers.{int(found[1]) + first_layer}.", expert + first_expert
        raise ModelError(
            f"the table of model_type '{self.config.model_type}' has no rule for the parameter {name}\n"
            f"Add  Rule(ours='{found[2] if found else name}', theirs=(…,))  to its rules."
        )


def head_size(config: Any) -> int:
    """Return the size of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def check_once(entries: Iterable[Entry], model_type: str) -> None:
    """Check that no Hugging Face tensor is used by two parameters of this rank.

    Raises:
        ModelError: one is used twice.
    """
    names = Counter(name for entry in entries if not entry.is_copy for name in entry.names)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise ModelError(
            f"the table of model_type '{model_type}' uses {twice[0]} for two parameters\nUse each name in one rule only."
        )


def _padded(part: Tensor, rows: int) -> Tensor:
    missing = rows - part.shape[0]
    return part if not missing else torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
