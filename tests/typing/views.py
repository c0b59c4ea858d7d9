"""The trainer's objects as algorithms and hooks see them; `tests/test_typing.py` runs mypy over it."""

from __future__ import annotations

from pathlib import Path

from rlcore import hookimpl
from rlcore.hooks import RunView
from rlcore.protocols import Roles
from rlcore.protocols.groups import CriticGroup
from rlcore.trainer.roles import Roles as RunningRoles
from rlcore.trainer.run import Run
from rlcore.workers.policy import ReferenceWorker


class Notes:
    @hookimpl
    def rlcore_run_start(self, run: RunView) -> None:
        seen = run.counters.samples + run.counters.tokens
        (run.directory / f"step-{run.counters.step}.txt").write_text(f"{run.config.run.name} {seen}")


def as_seen_by_hooks(run: Run) -> RunView:
    return run


def as_seen_by_algorithms(roles: RunningRoles) -> Roles:
    return roles


def misused(run: RunView, worker: ReferenceWorker) -> CriticGroup:
    run.directory = Path()  # error: misc
    run.counters.step = 3  # error: misc
    run.loader.issue(1)  # error: attr-defined
    print(run.roles.reference.update)  # error: attr-defined
    return worker  # error: return-value
