"""From hidden states to the log-probability and entropy of tokens, for the tokens that a loss sees and no others.

Logits exist for one chunk of tokens at a time, and are computed again in the backward pass when there are several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.errors import ModelError
from rlcore.models import attention
from rlcore.models.attention import Packing

_CHUNK_VALUES = 2**25
"""Logits in one chunk: 128 MB in float32."""
_TOLERANCE = 1e-4
"""Of float32 logits, relative to the largest."""


class TokenHead:
    """The output embedding of a model, with what its family does to logits."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._embedding = model.get_output_embeddings()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        self._chunk = max(1, _CHUNK_VALUES // config.vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] in float32."""
        logits: Tensor = self._embedding(hidden).float() * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def __call__(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of `targets` [n] and entropy [n], float32, from hidden states [n, hidden]."""
        if len(targets) <= self._chunk:
            return self._statistics(hidden, targets, temperature)
        parts = [
            self._part(h, t, temperature)
            for h, t in zip(torch.split(hidden, self._chunk), torch.split(targets, self._chunk))
        ]
        return torch.cat([log_probs for log_probs, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _part(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return self._statistics(hidden, targets, temperature)
        result: tuple[Tensor, Tensor] = checkpoint(self._statistics, hidden, targets, temperature, use_reentrant=False)
        return result

    def _statistics(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.logits(hidden) / temperature
        normaliser = logits.logsumexp(-1)
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
        entropy = normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
        return chosen - normaliser, entropy


def hidden_states(model: Any, input_ids: Tensor, packing: Packing) -> Tensor:
    """[T, hidden] of packed samples, after the last norm."""
    out = model.base_model(
        input_ids=input_ids, position_ids=packing.position_ids, attention_mask=None, use_cache=False, packing=packing
    )
    states: Tensor = out.last_hidden_state[0]
    return states


@torch.no_grad()
def use_packed_attention(model: Any, head: TokenHead) -> None:
    """Switch the model to the packed attention, and compare two packed samples with what it computes by itself.

    Raises:
        ModelError: samples reach each other by another way than attention, or its class does something to attention or
            logits that is not known here.
    """
    device = next(model.parameters()).device
    ids = torch.arange(1, 7, device=device) % model.config.get_text_config().vocab_size
    samples = (ids, ids[2:])
    own = torch.cat([model(sample[None], use_cache=False).logits[0].float() for sample in samples])
    packing = Packing([len(sample) for sample in samples], device)
    try:
        model.set_attn_implementation(attention.NAME)
        found = head.logits(hidden_states(model, torch.cat(samples)[None], packing))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(_unsupported(model, str(error))) from error
    difference = float((found - own).abs().max()) / max(1.0, float(own.abs().max()))
    if not difference <= _TOLERANCE:
        raise ModelError(_unsupported(model, f"its logits differ by {difference:.2g} when samples are packed"))


def _unsupported(model: Any, reason: str) -> str:
    return f"backend=local cannot train {type(model).__name__}: {reason}\nUse another backend for this model."
