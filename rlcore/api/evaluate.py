"""`evaluate`: score a model on held-out prompts, on the path of `rlcore eval`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.api.inputs import Inputs, local_paths, read_inputs
from rlcore.api.run import Result, alone, in_python, outside_event_loop
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.data.batch import Batch
    from rlcore.trainer.roles import Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of an evaluation."""

    metrics: dict[str, float]
    """`eval/reward`, `eval/pass_rate` and others; see docs/metrics.md."""
    seconds: float
    samples: list[dict[str, Any]] = field(repr=False)
    """Every sample with its reward; long texts are shortened."""


def evaluate(
    model: Any,
    data: Any = None,
    *,
    reward: Any = None,
    rollout: str | None = None,
    runtime: str | None = None,
    tokenizer: Any = None,
    settings: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Score a model on held-out prompts, as `rlcore eval` does.

    Args:
        model: a run (its directory, or the result of `train`), a checkpoint, a model directory, or a loaded model.
        data: rows, or a path as for `data.eval`; by default that of the run.

    The other arguments are those of `train`; by default, the settings are those of the run.
    """
    path, loaded = path_or_model(model)
    inputs = read_inputs(
        model=loaded,
        tokenizer=tokenizer,
        eval_data=data,
        reward=reward,
        settings=settings,
        rollout=rollout,
        runtime=runtime,
    )
    with in_python():
        return evaluate_inputs(path, inputs, samples=True)


def evaluate_inputs(path: Path | None, inputs: Inputs, *, samples: bool) -> Evaluation:
    """Start only the rollout and the rewards, and evaluate once.

    Args:
        path: as for `located`; None: the model is among the inputs.
        samples: return the samples, too.
    """
    from rlcore.controller.make import make_runtime
    from rlcore.trainer.evaluate import evaluate as score
    from rlcore.trainer.evaluate import held_out
    from rlcore.trainer.launch import start_roles
    from rlcore.trainer.plan import make_plan

    with ExitStack() as stack:
        stack.enter_context(alone())
        stack.enter_context(outside_event_loop())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlcore-eval-")))
        model, base = stack.enter_context(located(path)) if path else (None, None)
        config = stack.enter_context(inputs.files(compose_located(inputs, model, base), directory))
        config = _held_out_only(config)
        hooks = inputs.hooks(config)
        hooks.configure(config=config)
        plan = make_plan(config, Path(config.run.directory), inputs.objects)
        held = held_out(plan.prompts, config)
        runtime = make_runtime(config.runtime)
        start = time.perf_counter()
        try:
            names = [name for name in plan.workers if name in ("rollout", "reward", "reward_model")]
            roles = start_roles(plan, runtime, hooks, names)
            metrics, scored = score(roles, held.prompts, config.eval, held.groups)
            found = _records(roles, scored) if samples else []
        finally:
            runtime.shutdown()
        return Evaluation(metrics=metrics, samples=found, seconds=time.perf_counter() - start)


def path_or_model(given: Any) -> tuple[Path | None, Any]:
    """Return the path of a run, a checkpoint or a model directory, and None; or None, and a loaded model."""
    given = given.directory if isinstance(given, Result) else given
    return (Path(given), None) if isinstance(given, str | os.PathLike) else (None, given)


@contextmanager
def located(path: Path) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Yield the model directory, and the settings of the run if it is a checkpoint, which is exported if needed."""
    from rlcore.trainer.export import export, find_checkpoint, is_model

    if (path / "config.json").is_file():
        yield path, None
        return
    checkpoint = find_checkpoint(path)
    if is_model(checkpoint.path / "actor"):
        yield checkpoint.path / "actor", checkpoint.state["config"]
        return
    with tempfile.TemporaryDirectory(prefix="rlcore-eval-") as directory:
        model = Path(directory) / "model"
        export(checkpoint, model)
        yield model, checkpoint.state["config"]


def compose_located(inputs: Inputs, model: Path | None, base: dict[str, Any] | None) -> Config:
    """Compose the config of a command that does not train, over the settings of the run that made the model.

    Placements of roles that are not started are left out, and so are callbacks of that run, which are not given now.
    """
    from rlcore.config.compose import compose
    from rlcore.registry import PYTHON

    given = [] if model is None else [("model.path", str(model))]
    composed = compose([*inputs.settings, *given], complete=False, base=base, origin="checkpoint")
    config = local_paths(composed.config, inputs)
    absent = set((base or {}).get("placement", {})) - {"rollout", "reward", "reward_model", "default"}
    hooks = tuple(name for name in config.plugins.hooks if not name.startswith(PYTHON))
    return replace(
        config,
        placement={role: pool for role, pool in config.placement.items() if role not in absent},
        plugins=replace(config.plugins, hooks=hooks),
    )


def _held_out_only(config: Config) -> Config:
    """Return the config with the prompts of data.eval in place of data.train."""
    from rlcore.config.schema import CheckpointConfig, Choice, ScheduleConfig
    from rlcore.trainer.starts import GENERATE

    if not config.data.eval:
        raise ConfigError("no held-out prompts are given.\nType  data.eval=FILE")
    data = replace(config.data, train=config.data.eval, eval="", weights={})
    return replace(
        config,
        data=data,
        run=replace(config.run, resume="never"),
        algorithm=Choice(name=GENERATE),  # nothing is trained
        trainer=replace(config.trainer, patience=0),
        checkpoint=CheckpointConfig(),
        schedule=ScheduleConfig(),
    )


def _records(roles: Roles, scored: Batch) -> list[dict[str, Any]]:
    from rlcore.trainer.run import record

    shares: list[Any] = roles.reward.examples(scored)
    return [asdict(record(0, row)) for share in shares for row in share]
