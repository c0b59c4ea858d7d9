"""`rlcore train`: compose, plan, launch, train, print a summary."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.cli import make_parser

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.hooks.manager import Hooks
    from rlcore.trainer.plan import Plan
    from rlcore.trainer.run import Run

logger = logging.getLogger(__name__)
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
    plan, hooks = plan_run(overrides)
    from rlcore.trainer.describe import describe
    from rlcore.trainer.summary import summarize

    check_devices(plan)
    if not dry_run and not plan.config.run.name:
        plan = _in_a_new_directory(plan)
    print("\n".join(describe(plan)), flush=True)
    if dry_run:
        print("dry run: all checks passed; nothing was started")
        return 0
    return start(plan, hooks, lambda run, error: summarize(run, overrides, error))


def check_devices(plan: Plan) -> None:
    """Refuse a plan that this machine cannot hold."""
    from rlcore.controller.runtime import check_machine

    check_machine(plan.config.runtime, {name: plan.config.pools[name] for name in set(plan.placement.values())})


def plan_run(overrides: Sequence[str]) -> tuple[Plan, Hooks]:
    """Compose the settings and make the plan; `rlcore.trainer.launch.launch` starts it."""
    from rlcore.config.compose import compose
    from rlcore.errors import ConfigError
    from rlcore.hooks.manager import Hooks
    from rlcore.quickstart import locate_assets

    config = locate_assets(compose(overrides).config, print)
    from rlcore.trainer.plan import make_plan  # imports torch, so a wrong setting is reported first

    hooks = Hooks(config.plugins.hooks, config.plugins.on_hook_error)
    hooks.configure(config=config)
    directory = (Path(config.run.directory) / (config.run.name or _new_name(config, overrides))).absolute()
    if not is_writable(directory):
        raise ConfigError(f"run.directory={config.run.directory} cannot be written\nType  run.directory=DIR")
    plan = make_plan(config, directory)
    _warn_about_repeated_prompts(plan)
    return plan, hooks


def is_writable(folder: Path) -> bool:
    """Return whether a directory, which may not exist yet, can be created and written."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _warn_about_repeated_prompts(plan: Plan) -> None:
    asked, there = plan.config.trainer.prompts_per_step, len(plan.prompts.batch)
    if asked > there:
        logger.warning(
            "trainer.prompts_per_step=%d is more than the %d prompts of %s, so each step repeats some; type  %s",
            *(asked, there, plan.prompts.name, f"trainer.prompts_per_step={there}"),
        )


def _in_a_new_directory(plan: Plan) -> Plan:
    """Create the run's directory under an unused name. If that is impossible, `launch` raises the error."""
    first, number = plan.directory, 1
    while True:
        try:
            plan.directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
            plan = replace(plan, directory=first.with_name(f"{first.name}-{number}"), resume=None)
            continue
        except OSError:
            pass
        return plan


def start(plan: Plan, hooks: Hooks, summary: Callable[[Run, BaseException | None], Mapping[str, Any]]) -> int:
    """Train as planned, give trackers the summary, and return the exit code."""
    from rlcore.trainer.launch import launch
    from rlcore.trainer.loop import train

    run = launch(plan, hooks)
    failure: BaseException | None = None
    try:
        train(run)
    except BaseException as error:
        failure = error
        raise
    finally:
        run.close(summary(run, failure))
    return 130 if run.signals.asked == signal.SIGINT else 0


def _new_name(config: Config, overrides: Sequence[str]) -> str:
    """Return preset or algorithm and the time: quickstart-20260131-120000."""
    preset = next((item.partition("=")[2] for item in overrides if item.lstrip("+").startswith("preset=")), "")
    name = Path(preset.partition("@")[0]).stem or config.algorithm.name.rpartition(":")[2]
    return f"{name[:100]}-{datetime.now():%Y%m%d-%H%M%S}"
