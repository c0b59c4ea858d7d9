"""Every error that rlcore raises on purpose.

    RlcoreError
      UserError                  the user's input is wrong: exit code 2, no traceback
        ConfigError              (ValueError)  a key, a value, or two contradictory values
        PluginError              (LookupError) a name that cannot be resolved; see registry/errors.py
        DataError                (ValueError)  a file, a line or a column of a dataset
        ModelError               (ValueError)  a model directory or its tokenizer
        CapacityError            (ValueError)  more devices requested than available
      ColumnError                (KeyError)    a column that a batch does not have
      RunError                   the run failed: exit code 1
        InfrastructureError      (RuntimeError) a process, a device or the disk failed; a retry elsewhere may work
          DeadlineExceeded       (TimeoutError) a wait that timed out
          HostDied               a host process ended while its workers were needed
        TrackerError             a tracker failed; training progress can still be saved
        SampleError              (ValueError)  a single sample failed; others may be fine
        NumericalError           (ArithmeticError) a loss or a gradient that is not finite

The first line of a message states the problem, with the name and value that the user wrote; the second states what to
type. All of them can be pickled, because they cross processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LOST_PEER = "by peer"
"""Part of gloo's messages when the remote process is gone: connection closed, or reset, by peer."""


class RlcoreError(Exception):
    """Base of every error that rlcore raises on purpose."""


class UserError(RlcoreError):
    """The user's input is wrong; the command line prints only the message and exits with 2."""


class ConfigError(UserError, ValueError):
    """A configuration key or value that cannot be used."""


class PluginError(UserError, LookupError):
    """A plugin name that cannot be resolved; `rlcore.registry.errors` has one subclass per reason."""


class DataError(UserError, ValueError):
    """A data file, line or column that cannot be used."""


class ModelError(UserError, ValueError):
    """A model directory or tokenizer that cannot be used."""


class CapacityError(UserError, ValueError):
    """The placement requests more devices than the cluster has."""


class ColumnError(RlcoreError, KeyError):
    """A column that a batch does not have; the message suggests the nearest name."""

    __str__ = Exception.__str__  # KeyError would quote the message


class RunError(RlcoreError):
    """The run failed, and not because of the user's input."""


class InfrastructureError(RunError, RuntimeError):
    """A process, device, disk or network failed; a retry elsewhere may work."""


class DeadlineExceeded(InfrastructureError, TimeoutError):
    """A wait reached its deadline; the message names phase, role, rank and the rank's activity."""


class HostDied(InfrastructureError):
    """A host process ended while its workers were needed."""


class TrackerError(RunError):
    """A tracker could not start, write or finish; training progress can still be saved."""


class SampleError(RunError, ValueError):
    """One sample cannot be processed; the message names it."""


class NumericalError(RunError, ArithmeticError):
    """Losses or gradients were not finite for more steps in a row than the config allows."""


def require(holds: bool, setting: str, expected: str, got: object, example: object) -> None:
    """Raise a ConfigError with the setting and what to type, unless `holds`; for `__post_init__` of settings."""
    if not holds:
        raise ConfigError(f"{setting}: expected {expected}, got {got}\nType  {setting}={example}")


def require_at_least(config: Any, **lowest: float) -> None:
    """Raise a ConfigError if a field of a settings dataclass is below its lowest value, infinite or NaN."""
    for name, low in lowest.items():
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        example = default if isinstance(default, int | float) else low
        require(low <= value < float("inf"), name, f"{low} or more", value, example)


def import_optional(module: str, user: str, install: str) -> Any:
    """Import a module that rlcore does not depend on; raise a UserError with what to `install` if it is missing."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(
            f"{user} needs the Python package '{package}', which is not installed\nType  pip install '{install}'"
        ) from error


def nearest(name: str, known: list[str]) -> str | None:
    """Return the known name closest to `name`, or None."""
    import difflib

    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    return matches[0] if matches else None


def did_you_mean_path(path: Path, others: Iterable[Path]) -> str:
    """Return " Did you mean 'x'?" for a missing path; only file names are compared."""
    match = nearest(path.name, [other.name for other in others])
    return f" Did you mean '{path.with_name(match)}'?" if match else ""


def did_you_mean(name: str, known: list[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or an empty string."""
    match = nearest(name, known)
    return f" Did you mean '{match}'?" if match else ""
