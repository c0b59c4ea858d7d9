"""Learning from pairs: a logistic loss on the difference of two scores.

    loss = mean over pairs of -log sigmoid(x(chosen) - x(rejected))

Online DPO, offline DPO and reward models differ only in x. Shapes: P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from rlcore.algorithms.base import Epochs
from rlcore.protocols import Unit
from rlcore.types import LossTerms


class Pairwise(Epochs):
    """Base of algorithms that learn from pairs: two adjacent samples of a prompt, the chosen one first."""

    shows: Mapping[str, str] = {"actor/loss": "loss", "actor/accuracy": "accuracy"}
    unit = Unit(column="group_id", size=2)
    corrects = True
    """A pair says which response is better, whichever policy wrote it."""

    def writes(self) -> Sequence[str]:
        return []


def logistic(x: Tensor) -> LossTerms:
    """Return the logistic loss of scores x, [2P]; row 2k is preferred to row 2k + 1."""
    margin = x[0::2] - x[1::2]
    metrics = {"margin": margin.detach(), "accuracy": (margin > 0).to(x.dtype)}
    return LossTerms(terms=-F.logsigmoid(margin), average="unit-mean", metrics=metrics)
