"""`rollout`: generate and score samples of a data set and record them, on the path of `rlcore rollout`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.api.evaluate import compose_located, located, path_or_model
from rlcore.api.inputs import PREFIX, Inputs, read_inputs
from rlcore.api.run import PlannedRun, Result, in_python, launch
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.trainer.plan import Plan
    from rlcore.trainer.run import Run

_SAME = ("data", "environment", "episode", "model", "reward", "rollout", "sampling")
"""Sections that cannot change when an interrupted command continues."""


def rollout(
    model: Any,
    directory: str | os.PathLike[str],
    data: Any = None,
    *,
    reward: Any = None,
    rollout: str | None = None,
    runtime: str | None = None,
    tokenizer: Any = None,
    callbacks: Sequence[Any] = (),
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Generate and score samples without training, as `rlcore rollout` does.

    Args:
        model: a run (its directory, or the result of `train`), a checkpoint, a model directory, or a loaded model.
        directory: a new directory for the samples, or one to continue.

    The other arguments are those of `train`. `rlcore.train(…, settings={"schedule.replay": directory})` trains on the
    samples.
    """
    path, loaded = path_or_model(model)
    inputs = read_inputs(
        model=loaded,
        tokenizer=tokenizer,
        data=data,
        reward=reward,
        callbacks=callbacks,
        settings=settings,
        rollout=rollout,
        runtime=runtime,
    )
    target = Path(directory).absolute()
    with in_python():
        roll_out(path, target, inputs, "rlcore.rollout(…)")
    return Result(target)


def roll_out(
    path: Path | None,
    directory: Path,
    inputs: Inputs,
    again: str,
    show: Callable[[str], object] = lambda text: None,
) -> None:
    """Generate, or continue to.

    Args:
        path: as for `located`; None: the model is among the inputs.
        again: what continues after an interruption, for the summary.
        show: receives lines about the data and the samples.
    """
    from rlcore.trainer.plan import leave_out, make_plan
    from rlcore.trainer.summary import summarize

    def summary(run: Run, error: BaseException | None) -> dict[str, Any]:
        facts = summarize(run, error, in_python=False)
        own = {"resume_command": again, "next_command": f"rlcore train … schedule.replay={directory}"}
        return {name: value for name, value in (facts | own).items() if name not in ("checkpoint", "report_command")}

    with ExitStack() as stack:
        model, base = stack.enter_context(located(path)) if path else (None, None)
        config = _generating(compose_located(inputs, model, base), directory)
        with inputs.files(config, directory) as config:
            hooks = inputs.hooks(config)
            hooks.configure(config=config)
            plan = leave_out(make_plan(config, directory, inputs.objects), "actor")
            plan = _with_steps(plan, inputs, show)
            _check_directory(plan)
        done = plan.resume.step if plan.resume else 0
        if done < plan.config.trainer.steps:
            planned = PlannedRun(plan=plan, hooks=hooks, summarize=summary, has_directory=True)
            with launch(planned) as run:
                for _ in run:
                    pass


def _generating(config: Config, directory: Path) -> Config:
    """Return the config of a run that only generates."""
    from rlcore.config.schema import CheckpointConfig, Choice, ScheduleConfig
    from rlcore.trainer.starts import GENERATE

    return replace(
        config,
        algorithm=Choice(name=GENERATE),
        checkpoint=CheckpointConfig(every_steps=1, keep_last=1),
        data=replace(config.data, eval=""),
        run=replace(config.run, directory=str(directory.parent), name=directory.name, resume="auto"),
        schedule=ScheduleConfig(record=True),
        trainer=replace(config.trainer, patience=0),
    )


def _with_steps(plan: Plan, inputs: Inputs, show: Callable[[str], object]) -> Plan:
    """Return the plan with as many steps as the data needs, unless they are given."""
    trainer, num_prompts = plan.config.trainer, len(plan.prompts.batch)
    keys = [item.partition("=")[0] if isinstance(item, str) else item[0] for item in inputs.settings]
    if "trainer.steps" not in keys and not ("trainer.epochs" in keys and trainer.epochs):
        trainer = replace(trainer, steps=-(-num_prompts // trainer.prompts_per_step))
    total, each = trainer.steps * trainer.prompts_per_step, plan.config.sampling.samples_per_prompt
    again = f", {total - num_prompts:,} of them again to fill the last step" if total - num_prompts > 0 else ""
    again = ", in the shares of data.weights, so some repeat or are left out" if plan.config.data.weights else again
    show(f"data       {plan.prompts.name}: {num_prompts:,} prompts")
    show(f"samples    {total:,} prompts{again} × {each} in {trainer.steps} steps: {plan.directory}")
    return replace(plan, config=replace(plan.config, trainer=trainer))


def _check_directory(plan: Plan) -> None:
    """Refuse a directory that holds something else.

    Raises:
        ConfigError: samples of other settings, or no samples.
    """
    from rlcore.config.build import flatten
    from rlcore.trainer.recording import STEPS

    directory = plan.directory
    if plan.resume is None:
        others = [path for path in directory.glob("*") if path.name != PREFIX]
        if others and not (directory / STEPS).is_dir():
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
