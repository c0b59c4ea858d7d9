"""`rlcore train`: compose, plan, launch, train, print a summary."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.cli import make_parser
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.api.run import PlannedRun
    from rlcore.hooks.manager import Hooks
    from rlcore.trainer.plan import Plan

_EXAMPLES = """\
examples:
  rlcore train preset=quickstart                           a tiny model that learns to sort, about a minute
  rlcore train preset=quickstart runtime=local             the same in one process, for debugging
  rlcore train model.path=DIR data.train=train.jsonl data.eval=test.jsonl reward=gsm8k
  rlcore train ... reward=my_rewards.py:score              your own reward
  rlcore train ... --dry-run                               check everything, print the plan, stop
  rlcore train outputs/RUN                                 continue a run with its own settings
  rlcore train outputs/RUN trainer.steps=200               the same with more steps
  rlcore train ... --supervise                             start again when a process, node or disk failed
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    description = "Train a language model by reinforcement learning. Settings are key=value; rlcore config lists all."
    parser = make_parser("train", description, _EXAMPLES)
    override = "settings, which override those of a preset, or of a run to continue: its directory"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=override)
    parser.add_argument("--dry-run", action="store_true", help="resolve and check everything, print the plan, stop")
    again = "train in a child process, and continue from the last checkpoint when the infrastructure failed"
    parser.add_argument("--supervise", action="store_true", help=f"{again} (recovery.max_restarts)")
    options = parser.parse_intermixed_args(list(argv))
    if options.supervise and not options.dry_run:
        return _supervise(options.overrides, ["--traceback"] if options.traceback else [])
    return run(options.overrides, dry_run=options.dry_run)


def run(overrides: Sequence[str], *, dry_run: bool) -> int:
    """Plan and train, or with `dry_run` only print the plan; return the exit code."""
    from rlcore.api.run import started

    planned = _planned(overrides)
    if dry_run:
        print(planned.describe())
        print("dry run: all checks passed; nothing was started")
        return 0
    with started(planned, lambda text: print(text, flush=True)) as running:
        for _ in running:
            pass
    return 130 if running.signal == signal.SIGINT else 0


def plan_run(overrides: Sequence[str]) -> tuple[Plan, Hooks]:
    """Compose the settings and make the plan; `rlcore.trainer.launch.launch` starts it."""
    planned = _planned(overrides)
    return planned.plan, planned.hooks


def _supervise(overrides: Sequence[str], flags: Sequence[str]) -> int:
    from rlcore.api.run import run_directory
    from rlcore.cli.supervise import supervise
    from rlcore.config.compose import compose

    settings, base = _split(overrides)
    composed = compose(settings, base=base, origin="config.yaml")
    directory = run_directory(composed)
    return supervise([*flags, *overrides, f"run.name={directory.name}"], directory, composed.config.recovery)


def _planned(overrides: Sequence[str]) -> PlannedRun:
    """Plan a new run, or one to continue if an argument is its directory."""
    from rlcore.api.inputs import Inputs
    from rlcore.api.run import plan_run

    settings, base = _split(overrides)
    return plan_run(Inputs(settings=settings), base=base)


def _split(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """Return the settings, and those of the run to continue if an argument is its directory."""
    from rlcore.trainer.starts import recorded_config

    if "" in overrides:
        raise ConfigError("an argument is empty\nType  key=VALUE  or the directory of a run:  rlcore train outputs/RUN")
    runs = [it for it in overrides if os.path.isdir(it) or ("=" not in it and not it.startswith("~"))]
    run = next(iter(runs), None)
    settings = [it for it in overrides if it is not run]
    return settings, recorded_config(Path(run)) if run else None
