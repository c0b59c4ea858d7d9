"""Activation checkpointing of Hugging Face models without enabling dropout."""

from __future__ import annotations

from typing import Any

from torch import nn


def checkpoint_activations(model: Any) -> None:
    """Recompute the activations of each layer in the backward pass; results are those of evaluation mode."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:  # its name before transformers 5.23
        model.gradient_checkpointing_enable(options)
    model.train()  # transformers checkpoints only in training mode
    _no_dropout(model)


def _no_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # type: ignore[assignment]
