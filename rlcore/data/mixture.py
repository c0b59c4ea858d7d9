"""`Mixture`: the data set from which each position of a `PromptLoader` takes its prompt.

Positions are divided into blocks. In each block, every set has its share of the positions by weight, at even distances
from a seeded start. The set of a position depends only on the seed and the weights, so a checkpoint needs no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import numpy as np

from rlcore.errors import ConfigError

_BLOCK: Final = 10_000


class Mixture:
    """An endless sequence of data sets. Example: Mixture({"math": 0.7, "code": 0.3}, seed=0).at(5) == (0, 3)"""

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        shares = np.array(list(weights.values())) / sum(weights.values()) * _BLOCK
        quotas = np.floor(shares).astype(np.int64)
        # The largest remainders get the rest, the first of equals: the sum is _BLOCK.
        order = np.argsort(quotas - shares, kind="stable")
        quotas[order[: _BLOCK - quotas.sum()]] += 1
        for name, quota in zip(weights, quotas, strict=True):
            if not quota:
                raise ConfigError(
                    f"data.weights.{name}={weights[name]:g} is less than 0.01 % of the sum of all weights\n"
                    f"Remove it from data.train, or type a larger  data.weights.{name}={sum(weights.values()) / 100:g}"
                )
        self._quotas, self._seed = quotas, seed

    def at(self, position: int) -> tuple[int, int]:
        """Return the number of the set at a position, and the number of earlier positions with the same set."""
        block, offset = divmod(position, _BLOCK)
        sets, places = _interleaved(tuple(self._quotas.tolist()), self._seed, block)
        number = int(sets[offset])
        return number, block * int(self._quotas[number]) + int(places[offset])


@lru_cache(maxsize=4)
def _interleaved(quotas: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the set of each position of a block, and its place among the positions of this set, each [_BLOCK] int64."""
    bits = np.random.Philox(key=np.array([seed & (2**64 - 1), block], dtype=np.uint64)).random_raw(len(quotas))
    sets = np.repeat(np.arange(len(quotas)), quotas)
    places = np.concatenate([np.arange(quota) for quota in quotas])
    due = (places + (bits / 2.0**64)[sets]) / np.array(quotas)[sets]
    order = np.argsort(due, kind="stable")
    return sets[order], places[order]
