"""Combination of several rewards: gate, product, minimum or maximum. The core sums rewards: reward=[a, b].

With `gate`, the sum of the other rewards counts only if the first reward is at least `threshold`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.errors import ConfigError, SampleError, require
from rlcore.protocols.reward import RewardResult, RewardSpec
from rlcore.registry import resolve
from rlcore.rewards.pipeline import RewardPart
from rlcore.rewards.runner import build_reward, part_of
from rlcore.rewards.signature import arguments, read_signature, required_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedConfig:
    """Options of `combined`."""

    rewards: tuple[Any, ...]
    """Names, or {name: …, weight: …} with the options of the reward; a gate has no weight."""
    how: Literal["gate", "product", "min", "max"] = "gate"
    threshold: float = 1.0
    """Lowest score of the first reward that opens the gate; for how=gate."""
    otherwise: float = 0.0
    """Reward if the gate is closed; for how=gate."""


class Combined:
    """Combination of several rewards, each logged as `reward/combined/NAME` with its own metrics below.

    A reward that does not apply is left out; if it is the gate, the combination does not apply either.

    Example: rlcore train reward='[{name: combined, how: gate, rewards: [gsm8k, {name: length, max: 200}]}]'
    """

    Config = CombinedConfig

    def __init__(self, config: CombinedConfig) -> None:
        if config.how not in ("gate", "product", "min", "max"):
            raise ConfigError(f"how={config.how!r} of reward 'combined' is unknown\nUse gate, product, min or max.")
        items = [item if isinstance(item, Mapping) else {"name": item} for item in config.rewards]
        if len(items) < 2 or not all(isinstance(item.get("name"), str) for item in items):
            raise ConfigError(
                f"rewards={list(config.rewards)!r} of reward 'combined': expected two or more names\n"
                "Type  {name: combined, rewards: [gsm8k, {name: length, max: 200}]}"
            )
        if config.how == "gate":
            weight = items[0].get("weight", 1.0)
            require(weight == 1, "weight", "1 for the gate, because its score is not added", weight, 1.0)
        else:
            for setting, default in (("threshold", 1.0), ("otherwise", 0.0)):
                value = getattr(config, setting)
                require(value == default, setting, f"{default}, because how={config.how} has no gate", value, default)
        self._config = config
        self._weights = [float(item.get("weight", 1.0)) for item in items]
        self._names = _unique([resolve("reward", item["name"]).name for item in items])
        self._rewards = [_make(item) for item in items]
        self._signatures = [read_signature(reward) for reward in self._rewards]
        for name, signature in zip(self._names, self._signatures, strict=True):
            if signature.batched:
                raise ConfigError(
                    f"reward {name!r} scores batches and cannot be part of reward 'combined', which scores samples\n"
                    "Add it separately:  reward=[combined, OTHER]"
                )
        self.required_columns = tuple(sorted({name for it in self._rewards for name in required_columns(it)}))

    async def __call__(self, completion: str, **columns: Any) -> RewardResult:
        row = {"completion": completion, **columns}
        gated = self._config.how == "gate"
        answers = [await self._ask(0, row)] if gated else []
        if gated and (answers[0].value is None or answers[0].value < self._config.threshold):
            shut = None if answers[0].value is None else self._config.otherwise
            return RewardResult(shut, metrics=self._metrics(answers))
        answers += [await self._ask(i, row) for i in range(len(answers), len(self._rewards))]
        counted = list(zip(self._weights, answers, strict=True))[1 if gated else 0 :]
        weighted = [weight * answer.value for weight, answer in counted if answer.value is not None]
        return RewardResult(self._joined(weighted), metrics=self._metrics(answers))

    def _joined(self, values: list[float]) -> float | None:
        if not values:
            return None
        joins: dict[str, Callable[[list[float]], float]] = {
            "gate": math.fsum,
            "product": math.prod,
            "min": min,
            "max": max,
        }
        return float(joins[self._config.how](values))

    def _metrics(self, answers: list[RewardPart]) -> dict[str, float]:
        """Return the score of each reward, and its metrics below its name."""
        found: dict[str, float] = {}
        for name, answer in zip(self._names, answers):
            found |= {} if answer.value is None else {name: answer.value}
            found |= {f"{name}/{measured}": value for measured, value in answer.metrics.items()}
        return found

    async def _ask(self, index: int, row: Mapping[str, object]) -> RewardPart:
        """Call one reward, and return its score and metrics."""
        signature = self._signatures[index]
        answer = self._rewards[index](**arguments(signature, row))
        answer = await answer if inspect.isawaitable(answer) else answer
        try:
            return part_of(answer, signature)
        except SampleError as error:
            raise SampleError(f"reward {self._names[index]!r}: {error}") from error


def _make(item: Mapping[str, Any]) -> Any:
    options = {name: value for name, value in item.items() if name not in ("name", "weight")}
    found = resolve("reward", item["name"])
    return build_reward(RewardSpec(name=found.name, target=found.target, options=options))


def _unique(names: list[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}#{names[: i + 1].count(name)}" for i, name in enumerate(names)]
