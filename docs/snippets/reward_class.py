"""A reward as a class, with settings in `Config` and a metric."""

from dataclasses import dataclass

from rlcore import RewardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliteConfig:
    words: tuple[str, ...] = ("please", "thank you")
    bonus: float = 0.5


class Polite:
    Config = PoliteConfig

    def __init__(self, config: PoliteConfig) -> None:
        self._config = config

    def __call__(self, completion: str) -> RewardResult:
        found = sum(word in completion.lower() for word in self._config.words)
        return RewardResult(min(1.0, found * self._config.bonus), metrics={"words": found})


EXAMPLES = {"Polite": [({"completion": "Please!"}, 0.5), ({"completion": "Please, thank you"}, 1.0)]}
