"""`rlcore train`: compose, plan, launch, train, print a summary."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcore.cli import make_parser

if TYPE_CHECKING:
    from rlcore.hooks.manager import Hooks
    from rlcore.trainer.plan import Plan

_EXAMPLES = """\
examples:
  rlcore train preset=quickstart                           a tiny model that learns to sort, about a minute
  rlcore train preset=quickstart runtime=local             the same in one process, for debugging
  rlcore train model.path=DIR data.train=train.jsonl data.eval=test.jsonl reward=gsm8k
  rlcore train ... reward=my_rewards.py:score              your own reward
  rlcore train ... --dry-run                               check everything, print the plan, stop
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    description = "Train a language model by reinforcement learning. Settings are key=value; rlcore config lists all."
    parser = make_parser("train", description, _EXAMPLES)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, which override those of a preset")
    parser.add_argument("--dry-run", action="store_true", help="resolve and check everything, print the plan, stop")
    options = parser.parse_intermixed_args(list(argv))
    return run(options.overrides, dry_run=options.dry_run)


def run(overrides: Sequence[str], *, dry_run: bool) -> int:
    """Plan and train, or with `dry_run` only print the plan; return the exit code."""
    from rlcore.api.inputs import Inputs
    from rlcore.api.run import plan_run, started

    planned = plan_run(Inputs(settings=overrides), overrides)
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
    from rlcore.api.inputs import Inputs
    from rlcore.api.run import plan_run

    planned = plan_run(Inputs(settings=overrides), overrides)
    return planned.plan, planned.hooks
