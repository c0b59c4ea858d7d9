"""Scores of a reward relative to the other samples of a prompt: `reward=[{name: length, relative: rank}]`."""

from __future__ import annotations

import numpy as np

from rlcore.protocols.reward import Relative

_EPS = 1e-6


def relative(scores: np.ndarray, group_id: np.ndarray, how: Relative) -> np.ndarray:
    """Return [B] float64 scores relative to their groups; NaN (no score) stays NaN and is ignored.

    mean: s_i - mean. std: (s_i - mean) / (sample standard deviation + 1e-6); summed over rewards, this is GDPO's
    advantage before its normalization over the batch (arXiv 2601.05242). rank: the fraction of the other samples that it
    beats, ties counting half. A sample without others to compare with has 0, and rank 0.5.
    """
    found = scores.astype(np.float64)
    for group in np.unique(group_id):
        rows = np.flatnonzero((group_id == group) & ~np.isnan(found))
        values = found[rows]
        if how in ("mean", "std"):
            found[rows] = values - values.mean() if len(rows) else values
        if how == "std" and len(rows) > 1:
            found[rows] /= values.std(ddof=1) + _EPS
        if how == "rank":
            beaten = (values[:, None] > values).sum(1) + 0.5 * ((values[:, None] == values).sum(1) - 1)
            found[rows] = beaten / (len(rows) - 1) if len(rows) > 1 else 0.5
    return found
