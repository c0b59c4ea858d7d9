"""Every error that rlcore raises on purpose.

    RlcoreError
      UserError                  the user's input is wrong: exit code 2, no traceback
        ConfigError              (ValueError)  a key, a value, or two values that contradict
        PluginError              (LookupError) a name that cannot become an object; see registry/errors.py
        DataError                (ValueError)  a file, a line or a column of a data set
        ModelError               (ValueError)  a model directory or its tokenizer
        CapacityError            (ValueError)  more devices asked for than there are
      ColumnError                (KeyError)    a column that a batch does not have
      RunError                   the run failed: exit code 1
        InfrastructureError      (RuntimeError) a process, a device, the disk: elsewhere it may work
          DeadlineExceeded       (TimeoutError) a wait that ended without its answer
          HostDied               a process that held workers is gone
        TrackerError             a tracker could not write; what was learned can still be saved
        SampleError              (ValueError)  this sample, this reward: others may be fine
        NumericalError           (ArithmeticError) a loss or a gradient that is not finite

The first line of a message says what is wrong, with the name and value that the user wrote;
the second says what to type. All of them pickle: they cross processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LOST_PEER = "by peer"
"""In what gloo says when the process at the other end is gone: connection closed, or reset, by peer."""


class RlcoreError(Exception):
    """Base of every error that rlcore raises on purpose."""


class UserError(RlcoreError):
    """The user's input is wrong; the command line prints only the message and exits with 2."""


class ConfigError(UserError, ValueError):
    """A configuration key or value that cannot be used."""


class PluginError(UserError, LookupError):
    """A plugin name that cannot be resolved; `rlcore.registry.errors` has one class for each reason."""


class DataError(UserError, ValueError):
    """A data file, line or column that cannot be used."""


class ModelError(UserError, ValueError):
    """A model directory or tokenizer that cannot be used."""


class CapacityError(UserError, ValueError):
    """The cluster cannot hold what the placement asks for."""


class ColumnError(RlcoreError, KeyError):
    """A column that a batch does not have; the nearest name is in the message."""

    __str__ = Exception.__str__  # KeyError would quote the message


class RunError(RlcoreError):
    """The run failed for a reason that is not in the user's input."""


class InfrastructureError(RunError, RuntimeError):
    """A process, device, disk or network failed; a retry elsewhere may work."""


class DeadlineExceeded(InfrastructureError, TimeoutError):
    """A wait ended at its deadline; the message says phase, role, rank and what the rank was doing."""


class HostDied(InfrastructureError):
    """A host process ended while its workers were needed."""


class TrackerError(RunError):
    """A tracker that could not start, write or finish; what was learned can still be saved."""


class SampleError(RunError, ValueError):
    """One sample cannot be processed; the message names it."""


class NumericalError(RunError, ArithmeticError):
    """Losses or gradients were not finite for more steps in a row than the config allows."""


def require(holds: bool, setting: str, expected: str, got: object, example: object) -> None:
    """For `__post_init__` of settings: raise ConfigError with the field and what to type, unless `holds`."""
    if not holds:
        raise ConfigError(f"{setting}: expected {expected}, got {got}\nType  {setting}={example}")


def nearest(name: str, known: list[str]) -> str | None:
    """Return the known name closest to `name`, or None; difflib is imported only when something is wrong."""
    import difflib

    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    return matches[0] if matches else None


def did_you_mean_path(path: Path, others: Iterable[Path]) -> str:
    """The same for a path that is not there; only names are compared, as the folders are alike."""
    match = nearest(path.name, [other.name for other in others])
    return f" Did you mean '{path.with_name(match)}'?" if match else ""


def did_you_mean(name: str, known: list[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or an empty string."""
    match = nearest(name, known)
    return f" Did you mean '{match}'?" if match else ""
