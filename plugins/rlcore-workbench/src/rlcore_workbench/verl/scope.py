"""Checks for launches that `rlcore migrate` refuses, because the command would train something else."""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.errors import ConfigError
from rlcore_workbench.migration.answer import Line, available
from rlcore_workbench.migration.launch import Launch, Unreadable
from rlcore_workbench.verl.command import TRAINER
from rlcore_workbench.verl.devices import backend_of
from rlcore_workbench.verl.loss import LOSS, chosen
from rlcore_workbench.verl.names import ESTIMATOR

_OTHER_ROOTS = ("async_training", "engine", "model", "optim", "rollout")
"""Roots of keys that main_ppo does not have."""
_KINDS = "  rlcore list-plugins --all"


def check_scope(launch: Launch) -> None:
    """Refuse a launch of another trainer, algorithm or backend.

    Raises:
        ConfigError: names the key that is the reason.
    """
    try:
        _check_trainer(launch)
        _check_plugin("algorithm", chosen(launch)[0], ESTIMATOR)
        _check_plugin("backend", backend_of(launch), "strategy or model_engine")
    except Unreadable as error:
        raise ConfigError(
            f"the launch {error}\nType the launch with the value written out:  rlcore migrate 'key=value …'"
        ) from None


def _check_trainer(launch: Launch) -> None:
    foreign = [key for key in launch.texts if key.partition(".")[0] in _OTHER_ROOTS]
    if foreign and launch.trainer == "ppo":
        raise ConfigError(
            f"{foreign[0]} is a setting of a trainer other than {TRAINER}\n"
            f"Leave out  {', '.join(foreign)}  if the launch is one of {TRAINER}; otherwise type its module, too."
        )


def _check_plugin(kind: str, name: str, key: str) -> None:
    if name not in available(kind):
        raise ConfigError(f"{key}: no {kind} '{name}'\nTo list what is available, type{_KINDS} --kind {kind}")


def check_algorithm(lines: Sequence[Line]) -> None:
    """Refuse a launch whose estimator or loss has no counterpart; the command would train with another one.

    Raises:
        ConfigError: gives the reason.
    """
    for line in lines:
        if line.key in (ESTIMATOR, LOSS) and line.answer.how == "none":
            raise ConfigError(
                f"{line.key}={line.value}: {line.answer.note}\nTo list the algorithms, type{_KINDS} --kind algorithm"
            )
