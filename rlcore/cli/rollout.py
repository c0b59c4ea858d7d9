"""`rlcore rollout`: generate and score samples of a data set, and write them in the format of a recorded run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.cli import make_parser

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.trainer.plan import Plan
    from rlcore.trainer.run import Run

_EXAMPLES = """\
examples:
  rlcore rollout DIR samples data.train=train.jsonl reward=gsm8k rollout=vllm sampling.samples_per_prompt=16
  rlcore rollout outputs/RUN samples                       the newest checkpoint, with the settings of its run
  rlcore rollout DIR samples preset=quickstart trainer.steps=10
"""
_SAME = ("data", "environment", "episode", "model", "reward", "rollout", "sampling")
"""Sections that cannot change when an interrupted command continues."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    description = (
        "Generate and score samples for data.train, once for every prompt or for trainer.steps steps, without training."
        " Settings are key=value, as for train. The same command continues after an interruption."
        " Train on the samples with  rlcore train … schedule.replay=DIRECTORY"
    )
    parser = make_parser("rollout", description, _EXAMPLES)
    parser.add_argument("model", type=Path, help="a run, one of its checkpoints, or a model directory")
    parser.add_argument("directory", type=Path, help="a new directory for the samples, or one to continue")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    options = parser.parse_intermixed_args(list(argv))

    from rlcore.cli.eval import located
    from rlcore.cli.train import check_devices, start
    from rlcore.hooks.manager import Hooks
    from rlcore.trainer.plan import leave_out, make_plan
    from rlcore.trainer.summary import summarize

    def summary(run: Run, error: BaseException | None) -> dict[str, Any]:
        facts = summarize(run, [], error)
        typed = " ".join(shlex.quote(item) for item in argv)
        own = {
            "resume_command": f"rlcore rollout {typed}",
            "next_command": f"rlcore train … schedule.replay={directory}",
        }
        return {name: value for name, value in (facts | own).items() if name not in ("checkpoint", "report_command")}

    directory = options.directory.absolute()
    with located(options.model) as (model, base):
        config = _config(model, base, options.overrides, directory)
        hooks = Hooks(config.plugins.hooks, config.plugins.on_hook_error)
        hooks.configure(config=config)
        plan = _with_steps(leave_out(make_plan(config, directory), "actor"), options.overrides)
        check_devices(plan)
        _check_directory(plan)
        done = plan.resume.step if plan.resume else 0
        code = start(plan, hooks, summary) if done < plan.config.trainer.steps else 0
    _report(directory)
    return code


def _config(model: Path, base: dict[str, Any] | None, overrides: Sequence[str], directory: Path) -> Config:
    """Compose the config of a run that only generates."""
    from rlcore.config.compose import compose
    from rlcore.config.schema import CheckpointConfig, Choice, ScheduleConfig
    from rlcore.quickstart import locate_assets

    composed = compose([*overrides, f"model.path={model}"], complete=False, base=base, origin="checkpoint")
    config = locate_assets(composed.config, print)
    absent = set((base or {}).get("placement", {})) - {"rollout", "reward", "reward_model", "default"}
    return replace(
        config,
        algorithm=Choice(name="rlcore.trainer.recording:Generate"),
        checkpoint=CheckpointConfig(every_steps=1, keep_last=1),
        data=replace(config.data, eval=""),
        placement={role: pool for role, pool in config.placement.items() if role not in absent},
        run=replace(config.run, directory=str(directory.parent), name=directory.name, resume="auto"),
        schedule=ScheduleConfig(record=True),
    )


def _with_steps(plan: Plan, overrides: Sequence[str]) -> Plan:
    """Return the plan with as many steps as the data needs, unless they are given."""
    trainer, num_prompts = plan.config.trainer, len(plan.prompts.batch)
    if not any(item.startswith("trainer.steps=") for item in overrides):
        trainer = replace(trainer, steps=-(-num_prompts // trainer.prompts_per_step))
    total, each = trainer.steps * trainer.prompts_per_step, plan.config.sampling.samples_per_prompt
    again = f", {total - num_prompts:,} of them again to fill the last step" if total - num_prompts > 0 else ""
    print(f"data       {plan.prompts.name}: {num_prompts:,} prompts")
    print(f"samples    {total:,} prompts{again} × {each} in {trainer.steps} steps: {plan.directory}", flush=True)
    return replace(plan, config=replace(plan.config, trainer=trainer))


def _check_directory(plan: Plan) -> None:
    """Refuse a directory that holds something else.

    Raises:
        ConfigError: samples of other settings, or no samples.
    """
    from rlcore.config.build import flatten
    from rlcore.errors import ConfigError
    from rlcore.trainer.recording import STEPS

    directory = plan.directory
    if plan.resume is None:
        if directory.exists() and any(directory.iterdir()) and not (directory / STEPS).is_dir():
            raise ConfigError(f"{directory} is not empty, and holds no samples\nType another directory.")
        return
    before, now = flatten(plan.resume.state["config"]), flatten(plan.config)
    if before["algorithm.name"] != now["algorithm.name"]:
        raise ConfigError(f"{directory} is a training run\nType another directory.")
    for name in sorted({*before, *now}):
        if (name == "trainer.prompts_per_step" or name.partition(".")[0] in _SAME) and before.get(name) != now.get(
            name
        ):
            raise ConfigError(
                f"{directory} has samples with {name}={before.get(name)}, not {now.get(name)}\n"
                "Use these settings to continue, or type another directory."
            )


def _report(directory: Path) -> None:
    """Print how many samples there are, and how many have no reward."""
    from rlcore.data.recorded import open_batch
    from rlcore.trainer.recording import STEPS, recorded_steps

    steps = recorded_steps(directory / STEPS)
    statuses = [open_batch(directory / STEPS / f"{step:06d}")["reward_status"] for step in steps]
    counts = [sum(int((it == status).sum()) for it in statuses) for status in range(4)]
    print(f"samples    {sum(counts):,} in {len(steps)} steps: {directory / STEPS}")
    if sum(counts[1:]):
        print(f"no reward  {counts[1]:,} skipped, {counts[2]:,} timed out, {counts[3]:,} failed")
