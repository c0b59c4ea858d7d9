"""Compare a model's logits under a replaced attention with those under its own attention.

Every backend and engine that replaces the attention of a transformers model calls `check_attention` at start. Attention
windows have thousands of tokens, and some families apply them where the replacement does not see them, so the
comparison is repeated with small windows. Shapes: T tokens of all samples, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlcore.errors import ModelError

_SMALL = 4
"""Window during the comparison, in tokens."""
_LENGTHS = (13, 9)
"""Lengths of the samples in tokens: three small windows plus one token, and a different length."""
_LIMITS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "attention_chunk_size",
    "floor_scale",
    "log_scaling_n_floor",
)
"""Settings of configurations and layers that limit attention to a number of tokens."""


@torch.no_grad()
def check_attention(
    model: Any,
    name: str,
    packed_logits: Callable[[Sequence[Tensor]], Tensor],
    *,
    tolerance: float,
    refuse: Callable[[str], ModelError],
    run: Callable[..., Tensor] = lambda compute, *args: compute(*args),
) -> None:
    """Switch `model` to the attention `name` and compare the logits with those of its own attention.

    Args:
        packed_logits: returns [T, V] logits of the samples with the new attention.
        tolerance: largest accepted difference, relative to the largest logit.
        refuse: creates the error for a reason.
        run: calls a function that reads parameters.

    Raises:
        ModelError: the logits differ, or the new attention does not support this model.
    """
    config = model.config.get_text_config()
    ids = torch.arange(1, 1 + _LENGTHS[0], device=next(model.parameters()).device)
    samples = [ids[len(ids) - length :] % config.vocab_size for length in _LENGTHS]

    def compare(when: str) -> Tensor:
        model.set_attn_implementation("eager")
        expected = run(own_logits, model, samples)
        model.set_attn_implementation(name)
        found = _attempt(run, packed_logits, samples, refuse)
        difference = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
        if not difference <= tolerance:
            raise refuse(f"its logits differ by {difference:.2g} when samples are {when}")
        return expected

    expected = compare("packed")
    with small_limits(model) as limits, _uncompiled():
        if limits and torch.equal(compare(f"longer than its {limits}"), expected) and _has_windows(config):
            raise refuse(f"its {limits} cannot be changed, so longer samples cannot be compared")


def _attempt(
    run: Callable[..., Tensor],
    packed_logits: Callable[[Sequence[Tensor]], Tensor],
    samples: Sequence[Tensor],
    refuse: Callable[[str], ModelError],
) -> Tensor:
    try:
        return run(packed_logits, samples)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, (ModelError, torch.OutOfMemoryError)):
            raise
        raise refuse(f"{type(error).__name__}: {error}") from error


def own_logits(model: Any, samples: Sequence[Tensor]) -> Tensor:
    """Return the model's own [T, V] logits; padding on the right does not change them."""
    logits = model(pad_sequence(list(samples), batch_first=True), use_cache=False).logits
    return torch.cat([row[: len(sample)] for row, sample in zip(logits, samples)]).float()


@contextmanager
def small_limits(model: Any) -> Iterator[str]:
    """Shorten every attention window; yield the settings with their original values."""
    modules = list(model.modules())
    configs = [module.config for module in modules if hasattr(module, "config")]
    owners = {id(owner): owner for owner in (model.config.get_text_config(), *configs, *modules)}
    changed = [
        (owner, limit, value)
        for owner in owners.values()
        for limit in _LIMITS
        if isinstance(value := vars(owner).get(limit), int) and value > _SMALL
    ]
    try:
        for owner, limit, _ in changed:
            setattr(owner, limit, _SMALL)
        yield ", ".join(sorted({f"{limit}={value}" for _, limit, value in changed}))
    finally:
        for owner, limit, value in changed:
            setattr(owner, limit, value)


def _has_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    return "sliding_attention" in kinds if kinds else getattr(config, "sliding_window", None) is not None


def _uncompiled() -> AbstractContextManager[Any]:
    """Prevent compilation of layers for windows that only the comparison has."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
