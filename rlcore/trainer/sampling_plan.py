"""Checks of sampling that changes the model's distribution: penalties for repetition, and structured output."""

from __future__ import annotations

from typing import Any

from rlcore.config.schema import Config
from rlcore.errors import ConfigError
from rlcore.protocols.optional import CorrectsStaleness, ReshapesSampling
from rlcore.types import RESHAPING, Sampling
from rlcore.workers.plan import ChosenPlugin


def check_sampling(config: Config, rollout: ChosenPlugin, algorithm: Any) -> None:
    """Check that the engine can reshape the model's distribution as asked, and that the loss does not assume otherwise.

    Raises:
        ConfigError: the engine would ignore a setting, or the algorithm would learn from samples of another policy.
    """
    engine = rollout.resolved.object
    for name in RESHAPING:
        value, setting = getattr(config.sampling, name), f"sampling.{name}"
        if value == getattr(Sampling(), name):
            continue
        if not isinstance(engine, ReshapesSampling) or name not in engine.reshapes:
            raise ConfigError(
                f"{setting}={value}: rollout={config.rollout.name} does not have it\nType  rollout=vllm   or remove  {setting}"
            )
        if isinstance(algorithm, CorrectsStaleness):  # a policy gradient
            raise ConfigError(
                f"{setting}={value}: algorithm '{config.algorithm.name}' needs samples of the model's own distribution: the"
                " log-probs in its loss do not include this\n"
                f"Remove it, and evaluate with it afterwards:  rlcore eval RUN {setting}={value}"
            )
