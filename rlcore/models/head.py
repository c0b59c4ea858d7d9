"""Log-probability and entropy of tokens from hidden states, only for the tokens in the loss.

Logits exist for one chunk of tokens at a time; with several chunks, the backward pass recomputes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcore.errors import ModelError
from rlcore.models import attention
from rlcore.models.attention import Packing
from rlcore.models.comparison import check_attention

_CHUNK_VALUES = 2**25
"""Logits in one chunk: 128 MB in float32."""
_TOLERANCE = 1e-4
"""Tolerance for float32 logits, relative to the largest."""


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Scaling and soft-capping that a model family applies to its logits."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        """Return the rule of a text configuration."""
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, raw: Tensor) -> Tensor:
        """Return logits […, V] in float32 from the product with the embedding."""
        logits = raw.float() if self.scale == 1.0 else raw.float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d raw, computed from the logits."""
        return self.scale if self.softcap is None else self.scale * (1.0 - (logits / self.softcap) ** 2)


class TokenHead:
    """The output embedding of a model, with its family's rule for logits."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._embedding = model.get_output_embeddings()
        self._rule = LogitRule.of(config)
        self._chunk = max(1, _CHUNK_VALUES // config.vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [n, V] logits in float32."""
        return self._rule(self._embedding(hidden))

    def __call__(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probability of `targets` [n] and entropy [n], float32, from hidden states [n, hidden]."""
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
        normalizer = logits.logsumexp(-1)
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
        entropy = normalizer - (torch.softmax(logits, -1) * logits).sum(-1)
        return chosen - normalizer, entropy


def hidden_states(model: Any, input_ids: Tensor, packing: Packing) -> Tensor:
    """Return the [T, hidden] states of packed samples after the last norm."""
    out = model.base_model(
        input_ids=input_ids, position_ids=packing.position_ids, attention_mask=None, use_cache=False, packing=packing
    )
    states: Tensor = out.last_hidden_state[0]
    return states


def use_packed_attention(model: Any, head: TokenHead) -> None:
    """Switch the model to the packed attention and compare it with the model's own attention.

    Raises:
        ModelError: samples affect each other, or the class changes attention or logits in an unsupported way.
    """

    def logits(samples: Sequence[Tensor]) -> Tensor:
        packing = Packing([len(sample) for sample in samples], samples[0].device)
        return head.logits(hidden_states(model, torch.cat(list(samples))[None], packing))

    def refuse(reason: str) -> ModelError:
        return ModelError(f"backend=local cannot train {type(model).__name__}: {reason}\n{attention.ADVICE}")

    attention.check_kind(model.config)
    check_attention(model, attention.NAME, logits, tolerance=_TOLERANCE, refuse=refuse)
