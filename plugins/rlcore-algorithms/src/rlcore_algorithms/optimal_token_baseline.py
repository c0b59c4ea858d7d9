"""OTB: the optimal token baseline, arXiv 2602.07078.

    w_t = 1 - 2 p(y_t) + Σ_v p(v)²,   W_t = w_1 + … + w_t
    A_t = R - Σ_i R_i · W_t,i / Σ_i W_t,i   over the responses i to the same prompt that have a token t

w_t is the squared norm of the gradient of log p(y_t) for the logits, so responses weigh more in the baseline of a
token if they have moved the policy more up to there. p is the policy before the update. The last tokens of the
longest response have no other response to compare with, and no advantage.

Σ_v p(v)² takes one more forward pass of the policy in each step. Departures: the return of a token is the reward of
its response, and the loss is PPO's clipped loss, which has the paper's gradient in the first optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore_algorithms.family import Estimator, Family, FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalTokenBaselineConfig(FamilyConfig):
    """Settings of the optimal token baseline."""

    estimator: Estimator = "optimal_token_baseline"


class OptimalTokenBaseline(Family):
    """Policy gradient with a baseline per token, weighted by the norm of the gradient up to it."""

    Config = OptimalTokenBaselineConfig
