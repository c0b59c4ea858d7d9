"""How a command ends: exit codes, by which schedulers decide whether to start a job again; see docs/operations.md."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

FAILED: Final = 1
"""The run failed for a reason that would fail again: a bug, a reward that raises, numbers that are not finite."""
INPUT: Final = 2
"""A setting, a file or a model that cannot be used; nothing was started."""
RETRY: Final = 75
"""A process, node, disk or network failed (EX_TEMPFAIL): the same command continues from the last checkpoint."""
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141
REPORT: Final = "RLCORE_SUPERVISED"
"""Environment variable with the file descriptor on which a supervised command tells that it ends by itself."""


@contextmanager
def reported() -> Iterator[None]:
    """Tell a supervising process, if there is one, when the command inside the context has ended by itself."""
    descriptor = int(os.environ.pop(REPORT, "-1"))
    if descriptor >= 0:
        os.set_inheritable(descriptor, False)
    try:
        yield
    finally:
        if descriptor >= 0:
            with suppress(OSError):  # the supervisor has ended
                os.write(descriptor, b".")
