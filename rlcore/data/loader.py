"""`PromptLoader`: chooses the next prompts and keeps a ledger of them, so that a resumed run loses none.

It handles only numbers, neither text nor tokens: a `prompt_id` is the index of a prompt in
`rlcore.data.prompts.PreparedPrompts`.

A position counts the prompts of a run over all epochs: position p is entry p % num_prompts of epoch
p // num_prompts. (In a mixture, p is the number of earlier positions with the same data set; see mixture.py.) The
run's seed determines prompt and seed of a position, so a checkpoint needs only the next position and those that were
issued but not consumed:

    issue -> (in flight) -> finish -> (finished) -> consume

Positions that were not consumed when the state was saved are issued again, in the same order, before new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from rlcore.data.mixture import Mixture
from rlcore.errors import ConfigError

_MASK_64: Final = 2**64 - 1
_OTHER_RUN: Final = "or start a new run with run.name=<another name>."
_SAME_DATA: Final = "Give the dataset and the data.* settings that the run began with, {otherwise}"
_MISMATCH: Final = {
    "num_prompts": f"{{made}} was made with {{then}} prompts; the dataset has {{now}} now\n{_SAME_DATA}",
    "seed": "{made} was made with run.seed={then}, not {now}\nType run.seed={then}, {otherwise}",
    "shuffle": "{made} was made with data.shuffle={then}, not {now}\nType data.shuffle={then}, {otherwise}",
    "weights": "{made} was made with data.weights={then}, not {now}\nType these weights, {otherwise}",
    "samples_per_prompt": "{made} was made with sampling.samples_per_prompt={then}, not {now}: sample ids would repeat\n"
    "Type sampling.samples_per_prompt={then}, {otherwise}",
    "fingerprint": "the prompts differ from those of {made} (fingerprint {now}, then {then})\n"
    "Give the dataset, the tokenizer and the data.* settings that the run began with, {otherwise}",
}


def mix(*values: int) -> int:
    """Mix integers into a seed in [0, 2**63): h = splitmix64(h ^ value) for each value, from h = 0; then h >> 1.

    The order of the values matters. The samples of a prompt use `mix(request_seed, number)`.
    """
    state = 0
    for value in values:
        state = _splitmix64(state ^ (value & _MASK_64))
    return state >> 1


def _splitmix64(state: int) -> int:
    # Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 14.
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


# a step may cross the end of an epoch, of each data set
@lru_cache(maxsize=64)
def _shuffled(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch: prompts sorted by 64 raw bits each, which do not depend on numpy's version."""
    bits = np.random.Philox(key=np.array([seed & _MASK_64, epoch], dtype=np.uint64)).random_raw(num_prompts)
    return np.argsort(bits, kind="stable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """An issued prompt. Example: Issued(prompt_id=41, epoch=0, position=3, request_seed=7044339834212543166)"""

    prompt_id: int
    """Index among the prepared prompts."""
    epoch: int
    position: int
    """Unique in the run; a prompt that occurs twice in a step, from two epochs, has two positions."""
    request_seed: int
    """In [0, 2**63): `mix(seed, position)`."""


class PromptLoader:
    """An endless sequence of prompts in seeded order; each epoch, of each data set, has every prompt once.

    A step may cross the end of an epoch, so none is dropped from an incomplete step. A prompt counts as consumed once
    it is trained on or dropped for good. `load_state_dict(state_dict())` on the same loader issues all outstanding
    prompts again.
    """

    def __init__(
        self,
        num_prompts: int,
        seed: int,
        shuffle: bool = True,
        fingerprint: str = "",
        columns: Mapping[str, str] | None = None,
        samples_per_prompt: int | None = None,
        mixture: Mapping[str, tuple[int, float]] = MappingProxyType({}),
    ) -> None:
        """Create a loader that refuses states of other data.

        Args:
            fingerprint: fingerprint of the prompts.
            columns: fingerprint of each column.
            samples_per_prompt: samples of each prompt, on which sample ids depend.
            mixture: name -> number of prompts and weight of each data set, in order; empty: there is one.
        """
        if num_prompts < 1:
            raise ConfigError(
                "there are no prompts to load\nCheck data.train, data.max_prompt_tokens and data.overlong."
            )
        weights = {name: weight for name, (_, weight) in mixture.items()}
        self._identity = {
            "num_prompts": num_prompts,
            "seed": seed,
            "shuffle": shuffle,
            "fingerprint": fingerprint,
            "samples_per_prompt": samples_per_prompt,
            "weights": weights,
        }
        self._mixture = Mixture(weights, seed) if mixture else None
        self._sizes = [size for size, _ in mixture.values()] or [num_prompts]
        self._columns = dict(columns or {})
        self._seed, self._shuffle = seed, shuffle
        self._next_position = 0
        self._again: list[int] = []
        self._in_flight: set[int] = set()
        self._finished: set[int] = set()

    @property
    def outstanding(self) -> list[int]:
        """Positions issued but not consumed, in order; a resumed run issues them first."""
        return sorted([*self._again, *self._in_flight, *self._finished])

    def issue(self, count: int) -> list[Issued]:
        """Issue `count` prompts in order of position and mark them as in flight."""
        again, self._again = self._again[:count], self._again[count:]
        end = self._next_position + count - len(again)
        positions = [*again, *range(self._next_position, end)]
        self._next_position = end
        self._in_flight.update(positions)
        return [self.at(position) for position in positions]

    def issue_at(self, positions: Collection[int]) -> None:
        """Mark these positions as in flight; those that they pass over are issued later."""
        end = max(self._next_position, *(position + 1 for position in positions))
        self._again = sorted({*self._again, *range(self._next_position, end)}.difference(positions))
        self._next_position = end
        self._in_flight.update(positions)

    def keep(self, positions: Collection[int]) -> None:
        """Mark positions as in flight that would be issued again; raise ValueError, changing nothing, for others."""
        again = set(self._again)
        _move(positions, again, "to be issued again")
        self._again = sorted(again)
        self._in_flight.update(positions)

    def finish(self, positions: Collection[int]) -> None:
        """Mark positions as finished generating; raise ValueError, changing nothing, if one is not in flight."""
        _move(positions, self._in_flight, "in flight")
        self._finished.update(positions)

    def consume(self, positions: Collection[int]) -> None:
        """Mark positions as done; raise ValueError, changing nothing, if one is not finished."""
        _move(positions, self._finished, "finished and waiting")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON data."""
        return {**self.identity, "next_position": self._next_position, "outstanding": self.outstanding}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, which must be of the same prompts in the same order."""
        self.check(state)
        self._next_position = state["next_position"]
        self._again = sorted(state["outstanding"])
        self._in_flight, self._finished = set(), set()

    @property
    def identity(self) -> dict[str, Any]:
        """Data, order and sample ids of a run as plain JSON data, for `check`."""
        return {**self._identity, "columns": self._columns}

    def check(self, identity: Mapping[str, Any], made: str = "the checkpoint", otherwise: str = _OTHER_RUN) -> None:
        """Raise a ConfigError if what was `made` with this identity has other data, order or sample ids."""
        for key, here in self._identity.items():
            then = identity.get(key)
            if None not in (then, here) and then != here:
                raise ConfigError(_MISMATCH[key].format(then=then, now=here, made=made, otherwise=otherwise))
        columns = dict(identity.get("columns", {}))
        changed = [name for name, fingerprint in columns.items() if self._columns.get(name) != fingerprint]
        if changed:
            raise ConfigError(
                f"the data differs from that of {made} in the column{'s'[: len(changed) > 1]} {', '.join(changed)}\n"
                f"{_SAME_DATA.format(otherwise=otherwise)}"
            )

    def at(self, position: int) -> Issued:
        """Return the prompt at a position, issued or not."""
        number, place = self._mixture.at(position) if self._mixture else (0, position)
        size, first = self._sizes[number], sum(self._sizes[:number])
        epoch, index = divmod(place, size)
        seed = mix(self._seed, number) if number else self._seed
        prompt_id = first + (int(_shuffled(size, seed, epoch)[index]) if self._shuffle else index)
        return Issued(prompt_id=prompt_id, epoch=epoch, position=position, request_seed=mix(self._seed, position))


def _move(positions: Collection[int], out_of: set[int], state: str) -> None:
    unknown = [position for position in positions if position not in out_of]
    if unknown:
        raise ValueError(f"positions {unknown[:8]} are not {state}")
    if len(set(positions)) != len(positions):
        raise ValueError(f"a position is named twice in {sorted(positions)[:8]}")
    out_of.difference_update(positions)
