"""The core's PPO with dual clip (arXiv 1912.09729) enabled by default.

A < 0:  term = min(max(-ratio · A, -clip(ratio) · A), -dual_clip · A)
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.algorithms.ppo import PPO, PPOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DualClipPPOConfig(PPOConfig):
    """Settings of PPO with dual clip."""

    dual_clip: float = 3.0


class DualClipPPO(PPO):
    """PPO whose loss is also bounded for negative advantages."""

    Config = DualClipPPOConfig
