"""Plugins that fail on purpose; tests select them as `faults.py:Name`."""

import os
import signal
from pathlib import Path

from rlcore import hookimpl
from rlcore.algorithms.grpo import GRPO
from rlcore.backends.local import LocalBackend
from rlcore.controller.dispatch import dispatch
from rlcore.protocols.algorithm import RoleSpec
from rlcore.workers.policy import PolicyWorker


class DiesWhileSaving(LocalBackend):
    """Backend whose process is killed when the second checkpoint is half written."""

    def save(self, directory: Path) -> None:
        super().save(directory)
        if len(list(directory.parent.parent.glob("step_*"))) == 1 and not os.environ.get("RLCORE_TEST_RESUMED"):
            os.kill(os.getpid(), signal.SIGKILL)


class DiesInStep(LocalBackend):
    """Backend whose process is killed in the fifth optimizer step."""

    def step(self):
        if self.num_steps == 4 and not os.environ.get("RLCORE_TEST_RESUMED"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


class WritesLater(LocalBackend):
    """Backend that saves in the background; `written.txt` has its number of optimizer steps at the end of the save."""

    def save_async(self, directory: Path):
        aside = directory / "aside"
        aside.mkdir()
        self.save(aside)
        return Later(self, directory, aside)


class Later:
    def __init__(self, backend, directory, aside):
        self.backend, self.directory, self.aside = backend, directory, aside

    def finish(self):
        for path in self.aside.iterdir():
            path.rename(self.directory / path.name)
        self.aside.rmdir()
        (self.directory / "written.txt").write_text(str(self.backend.num_steps))


class AlwaysNaN(LocalBackend):
    """Backend whose gradient is never finite."""

    def step(self):
        for parameter in self._names:
            parameter.grad.fill_(float("nan"))
        return super().step()


class OnAnotherNode(PolicyWorker):
    """Policy worker that saves to a directory that the controller does not read."""

    @dispatch("all")
    def save(self, directory: str, wait: bool = True) -> bool:
        (Path(directory) / "elsewhere" / self.context.role).mkdir(parents=True)
        return self.save_to(Path(directory) / "elsewhere" / self.context.role, wait)

    @dispatch("all")
    def saved(self, directory: str) -> dict[str, int]:
        return PolicyWorker.saved.function(self, f"{directory}/elsewhere")


class Elsewhere(GRPO):
    """GRPO with `OnAnotherNode` as the actor."""

    def roles(self):
        return [RoleSpec(name="actor", worker=f"{__file__}:OnAnotherNode"), *super().roles()[1:]]


class Raises:
    """A hook that ends the run after its fourth step."""

    @hookimpl
    def rlcore_step_end(self, step):
        if step == 4:
            raise RuntimeError("the fourth step is the last one")


raises = Raises()
