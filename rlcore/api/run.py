"""`train`, `plan` and `launch`: a training run from Python, on the path of `rlcore train`."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.api.inputs import Inputs, local_paths, read_inputs
from rlcore.errors import ConfigError, UserError

if TYPE_CHECKING:
    from rlcore.config.compose import Composed
    from rlcore.config.schema import Config
    from rlcore.hooks.manager import Hooks
    from rlcore.hooks.specs import RunView
    from rlcore.trainer.plan import Plan
    from rlcore.trainer.run import Run

Summary = Mapping[str, Any]
_active = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A checked run, which `launch` starts."""

    plan: Plan
    hooks: Hooks
    summarize: Callable[[Run, BaseException | None], Summary]
    """Returns the summary for trackers at the end of the run."""
    has_directory: bool
    """The directory of the run is chosen; otherwise `launch` chooses an unused name."""

    def describe(self) -> str:
        """Return the plan as text, one fact a line, as `rlcore train --dry-run` prints it.

        Raises:
            UserError: this machine cannot hold the run.
        """
        from rlcore.trainer.describe import describe

        check_devices(self.plan)
        return "\n".join(describe(self.plan))


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has ended."""

    directory: Path
    """Directory of the run: checkpoints, metrics, samples, and the data and model that were given as objects."""

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Lines of metrics.jsonl: `step` and what was logged for it; step 0 is the evaluation before training.

        A value that is not finite is NaN.
        """
        path = self.directory / "metrics.jsonl"
        if not path.is_file():
            raise UserError(f"{path} was not written\nTrain with the tracker jsonl:  trackers=[console,jsonl]")
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [
            {name: math.nan if value is None else value for name, value in line.items() if name != "non_finite"}
            for line in lines
        ]

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the model of the newest checkpoint as a new Hugging Face directory, as `rlcore export` does."""
        from rlcore.trainer.export import export, find_checkpoint

        export(find_checkpoint(self.directory), Path(path))
        return Path(path)


class LiveRun:
    """A started run. Iterating over it trains, and yields `step` and the metrics of each step.

    Leaving the loop ends the run after the current step, with a checkpoint.
    """

    def __init__(self, run: Run) -> None:
        from rlcore.trainer.loop import steps

        self.view: RunView = run
        """Config, directory, counters and groups of workers, as hooks see them."""
        self.result = Result(run.directory)
        self.signal = 0
        """Number of the signal that ended the run, or 0; known after its end."""
        self._steps = steps(run)

    def __iter__(self) -> Iterator[dict[str, float]]:
        while True:
            with outside_event_loop():
                metrics = next(self._steps, None)
            if metrics is None:
                return
            yield {"step": self.view.counters.step, **metrics}


def train(
    model: Any = None,
    data: Any = None,
    eval_data: Any = None,
    *,
    reward: Any = None,
    algorithm: str | None = None,
    rollout: str | None = None,
    runtime: str | None = None,
    tokenizer: Any = None,
    callbacks: Sequence[Any] = (),
    settings: Mapping[str, Any] | None = None,
) -> Result:
    """Train a language model by reinforcement learning, as `rlcore train` does.

    Args:
        model: directory in Hugging Face layout, or a loaded model of transformers, which is saved in the run's directory.
        data: path as for `data.train`, or rows: dicts with a `prompt` and columns for rewards, or a `datasets.Dataset`.
        eval_data: held-out prompts, likewise.
        reward: names or functions, or dicts with `name` and `weight`: one or a list.
        algorithm: name; as `algorithm=NAME` on the command line, and so are `rollout` and `runtime`.
        tokenizer: tokenizer of a loaded model.
        callbacks: objects with methods named after hooks, such as `rlcore_step_end(self, step, metrics)`, or names.
        settings: setting -> value, such as {"trainer.steps": 50}; text is read as on the command line.

    Raises:
        UserError: anything that the user can fix, before a process starts.
        KeyboardInterrupt: after ctrl-C, once the run has written its checkpoint and ended.
    """
    planned = plan(
        model,
        data,
        eval_data,
        reward=reward,
        algorithm=algorithm,
        rollout=rollout,
        runtime=runtime,
        tokenizer=tokenizer,
        callbacks=callbacks,
        settings=settings,
    )
    with launch(planned) as run:
        for _ in run:
            pass
    return run.result


def plan(
    model: Any = None,
    data: Any = None,
    eval_data: Any = None,
    *,
    reward: Any = None,
    algorithm: str | None = None,
    rollout: str | None = None,
    runtime: str | None = None,
    tokenizer: Any = None,
    callbacks: Sequence[Any] = (),
    settings: Mapping[str, Any] | None = None,
) -> PlannedRun:
    """Check everything that can be checked before a process starts; the arguments are those of `train`.

    Rows and a loaded model are written to the directory of the run, unless a check fails.
    """
    inputs = read_inputs(
        model=model,
        tokenizer=tokenizer,
        data=data,
        eval_data=eval_data,
        reward=reward,
        callbacks=callbacks,
        settings=settings,
        algorithm=algorithm,
        rollout=rollout,
        runtime=runtime,
    )
    with in_python():
        return plan_run(inputs, in_python=True)


@contextmanager
def launch(planned: PlannedRun) -> Iterator[LiveRun]:
    """Start a run; at the end of the `with` block it ends, with a checkpoint unless an error ended it within a step.

    Raises:
        ConfigError: another run is active in this process.
        KeyboardInterrupt, SystemExit: after a signal, once everything is shut down.
    """
    with started(planned) as run:
        yield run
    if run.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if run.signal:
        raise SystemExit(0)


@contextmanager
def started(planned: PlannedRun, show: Callable[[str], object] = lambda text: None) -> Iterator[LiveRun]:
    """Start a run as `launch` does, and end it without an exception after a signal.

    Args:
        show: called with the description of the run before it starts.
    """
    from rlcore.trainer.launch import launch as start

    with alone():
        if not planned.has_directory:
            directory = new_directory(planned.plan.directory)
            planned = replace(planned, plan=replace(planned.plan, directory=directory, resume=None))
        show(planned.describe())
        with outside_event_loop():
            run = start(planned.plan, planned.hooks)
        live = LiveRun(run)
        failure: BaseException | None = None
        try:
            try:
                yield live
            except BaseException as error:  # of a step, or of the caller's loop, which has to end the run too
                with outside_event_loop():
                    live._steps.throw(error)
            with outside_event_loop():
                live._steps.close()
        except BaseException as error:
            failure = error
            raise
        finally:
            with outside_event_loop():
                run.close(planned.summarize(run, failure))
            live.signal = run.signals.asked


def plan_run(inputs: Inputs, *, base: Mapping[str, Any] | None = None, in_python: bool = False) -> PlannedRun:
    """Compose the settings and make the plan.

    Args:
        base: settings of a run to continue, which the others override.
        in_python: not called by a command, for the summary.
    """
    from rlcore.config.compose import compose

    composed = compose(inputs.settings, base=base, origin="config.yaml")
    config = local_paths(composed.config, inputs)
    from rlcore.trainer.plan import make_plan  # imports torch, so a wrong setting is reported first
    from rlcore.trainer.summary import summarize

    directory = run_directory(composed)
    if not is_writable(directory):
        raise ConfigError(f"run.directory={config.run.directory} cannot be written\nType  run.directory=DIR")
    chosen = bool(config.run.name or inputs.written)
    if not config.run.name and inputs.written:
        directory = new_directory(directory)
    with inputs.files(config, directory) as config:
        hooks = inputs.hooks(config)
        hooks.configure(config=config)
        made = make_plan(config, directory, inputs.objects)
    return PlannedRun(
        plan=made,
        hooks=hooks,
        summarize=lambda run, error: summarize(run, error, in_python=in_python),
        has_directory=chosen,
    )


@contextmanager
def alone() -> Iterator[None]:
    """Refuse a second run at the same time in this process: the device, Ray and signals are the process's own."""
    if not _active.acquire(blocking=False):
        raise ConfigError(
            "another run is active in this process\n"
            "Leave its `with rlcore.launch(…)` block first, or start the other run in its own process."
        )
    try:
        yield
    finally:
        _active.release()


@contextmanager
def outside_event_loop() -> Iterator[None]:
    """Hide the event loop in which a notebook runs its cells: workers in this process have their own."""
    import asyncio

    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


@contextmanager
def in_python() -> Iterator[None]:
    """Add to errors how a setting of the command line is passed in Python."""
    try:
        yield
    except UserError as error:
        error.add_note('In Python, key=value is passed as  settings={"key": value}')
        raise


def check_devices(plan: Plan) -> None:
    """Refuse a plan that this machine cannot hold."""
    from rlcore.controller.runtime import check_machine

    check_machine(plan.config.runtime, {name: plan.config.pools[name] for name in set(plan.placement.values())})


def is_writable(folder: Path) -> bool:
    """Return whether a directory, which may not exist yet, can be created and written."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def new_directory(first: Path) -> Path:
    """Create a run's directory under an unused name. If that is impossible, `launch` raises the error."""
    directory, number = first, 1
    while True:
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
            directory = first.with_name(f"{first.name}-{number}")
            continue
        except OSError:
            pass
        return directory


def run_directory(composed: Composed) -> Path:
    """Return the directory of a run, with a new name if it has none."""
    run = composed.config.run
    return (Path(run.directory) / (run.name or _new_name(composed.config, composed.overrides))).absolute()


def _new_name(config: Config, overrides: Sequence[str]) -> str:
    """Return preset or algorithm and the time: quickstart-20260131-120000."""
    preset = next((item.partition("=")[2] for item in overrides if item.lstrip("+").startswith("preset=")), "")
    name = Path(preset.partition("@")[0]).stem or config.algorithm.name.rpartition(":")[2]
    return f"{name[:100]}-{datetime.now():%Y%m%d-%H%M%S}"
