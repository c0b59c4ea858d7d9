"""Backends that fail on purpose; tests select them with `backend=fsdp_faults.py:Name`."""

import os
import signal

from rlcore_fsdp import FSDPBackend


class DiesInStep(FSDPBackend):
    """Backend whose rank 1 is killed in the fifth optimizer step."""

    def step(self):
        if self.num_steps == 4 and self.mesh.rank == 1 and not os.environ.get("RLCORE_TEST_RESUMED"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


class DiesWhileSaving(FSDPBackend):
    """Backend whose rank 1 is killed when the second checkpoint is half written."""

    def save_async(self, directory):
        _die_at_the_second(directory, self.mesh.rank)
        return super().save_async(directory)


class DiesWhileTrainingOn(FSDPBackend):
    """Backend whose rank 1 is killed one step after the second checkpoint was written, before it is complete."""

    def save_async(self, directory):
        saving = super().save_async(directory)

        class Dying:
            def finish(_):
                _die_at_the_second(directory, self.mesh.rank)
                saving.finish()

        return Dying()


def _die_at_the_second(directory, rank):
    earlier = len(list(directory.parent.parent.glob("step_*")))
    if earlier == 1 and rank == 1 and not os.environ.get("RLCORE_TEST_RESUMED"):
        os.kill(os.getpid(), signal.SIGKILL)
