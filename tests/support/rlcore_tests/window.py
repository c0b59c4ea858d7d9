"""`NoStepsAhead`: a hook that lets a run with schedule=sync take its samples from the window of the other schedules."""

from rlcore import hookimpl
from rlcore.trainer.launch import sampling
from rlcore.trainer.prefetch import Prefetcher

NO_STEPS_AHEAD = f"plugins.hooks=['{__name__}:NoStepsAhead']"


class NoStepsAhead:
    """A hook that requests all groups in the step that trains on them, as whole batches."""

    @hookimpl
    def rlcore_run_start(self, run):
        roles, config = run.roles, run.config
        roles.prefetcher = Prefetcher(run.source, roles.groups, sampling(config), config, lambda: False)
        roles._source = roles.prefetcher


def without_schedule(lines):
    """Return lines of metrics without those of schedules."""
    return [{name: value for name, value in line.items() if not name.startswith("schedule/")} for line in lines]
