"""The loop: prompts, collect, update, sync, evaluate, checkpoint, log.

Schedule `sync`: every phase waits for the one before, so every sample of a step is drawn under the weights that the
step updates. Step n makes weights version n.
"""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rlcore.errors import ConfigError, NumericalError
from rlcore.trainer.evaluate import evaluate
from rlcore.trainer.run import Clock, Run, values

logger = logging.getLogger(__name__)


def train(run: Run) -> None:
    """Train until the configured step, or until a signal asks to stop; a checkpoint is written at the end."""
    error: BaseException | None = None
    try:
        run.hooks.run_start(run=run)
        with _signals(run):
            if run.counters.step == 0:
                run.log(0, _evaluate(run))
            while run.counters.step < run.config.trainer.steps and not run.stop_requested:
                step(run)
            save(run)
    except BaseException as raised:
        error = raised
        raise
    finally:
        run.hooks.run_end(run=run, error=error)


def step(run: Run) -> dict[str, float]:
    """One step: the whole way of a prompt."""
    number = run.counters.step + 1
    clock = Clock()
    run.hooks.step_start(run=run, step=number)
    run.positions = []
    prompts = run.next_prompts(run.config.trainer.prompts_per_step)
    experience = run.algorithm.collect(run.roles, prompts)
    run.loader.finish(run.positions)
    metrics = values(run.algorithm.update(run.roles, experience) | run.roles.take_metrics())
    run.roles.sync(version=number)
    run.loader.consume(run.positions)
    run.counters.step = number
    metrics |= _count(run, metrics, clock)
    run.hooks.weights_synced(run=run, version=number, seconds=metrics.get("time_s/weight sync", 0.0))
    every = run.config.eval.every_steps
    if (every and number % every == 0) or number == run.config.trainer.steps:
        metrics |= _evaluate(run)
    metrics |= _of_plugins(run, metrics)
    run.log(number, metrics)
    run.log_samples(number)
    run.hooks.step_end(run=run, step=number, metrics=metrics)
    _warn_of_mismatch(run, metrics.get("actor/rollout_logprob_gap", 0.0))
    _stop_on_bad_numbers(run, metrics)
    _stop_on_gap(run, metrics)
    if run.config.checkpoint.every_steps and number % run.config.checkpoint.every_steps == 0:
        save(run)
    return metrics


def save(run: Run) -> None:
    """Write a checkpoint of the present step, unless it is there already."""
    latest = run.checkpoints.latest()
    if latest is not None and latest.step == run.counters.step:
        return
    run.phase("checkpoint")

    def save_roles(directory: Any) -> None:
        for group in run.roles.trained():
            group.save(str(directory))

    path = run.checkpoints.write(run.counters.step, run.state(), save_roles)
    run.runtime.traffic.take()  # no part of the next step
    run.hooks.checkpoint_saved(run=run, step=run.counters.step, path=path)


def _evaluate(run: Run) -> dict[str, float]:
    if run.eval_prompts is None:
        return {}
    run.phase("evaluate")
    clock = Clock()
    own = getattr(run.algorithm, "evaluate", None)
    metrics, _ = (own or evaluate)(run.roles, run.eval_prompts, run.config.eval)
    run.runtime.traffic.take()
    run.counters.last_eval = metrics["eval/pass_rate"]
    if run.counters.first_eval is None:
        run.counters.first_eval = metrics["eval/pass_rate"]
    return metrics | {"time_s/evaluate": clock.seconds}


def _of_plugins(run: Run, metrics: dict[str, float]) -> dict[str, float]:
    """What hooks measured; none may stand where a metric of the core stands."""
    given = run.hooks.collect_metrics(run=run, step=run.counters.step)
    for name in given.keys() & metrics.keys():
        plugin = run.hooks.givers[name]
        raise ConfigError(
            f"rlcore_collect_metrics of {plugin}: '{name}' ({given[name]:g}) is a metric of rlcore itself ({metrics[name]:g})\n"
            f"Give it a name of its own there, or leave {plugin} out of plugins.hooks."
        )
    return given


def _count(run: Run, metrics: dict[str, float], clock: Clock) -> dict[str, float]:
    """Counters, and where the time of the step went."""
    traffic = run.runtime.traffic.take()
    seconds = clock.seconds
    samples, tokens = run.roles.take_used()
    counters = run.counters
    counters.tokens += tokens
    counters.samples += samples
    counters.seconds += seconds
    counters.last_reward = metrics.get("reward/mean")
    if counters.first_reward is None:
        counters.first_reward = counters.last_reward
    busy = sum(traffic.busy_s.values())
    return {
        "perf/step_s": seconds,
        "perf/tokens_per_second": tokens / seconds,
        "perf/controller_share": max(0.0, 1.0 - busy / seconds),
        "controller/bytes": float(traffic.num_bytes),
        **{f"time_s/{name}": spent for name, spent in traffic.busy_s.items()},
    }


def _warn_of_mismatch(run: Run, gap: float) -> None:
    """Once in a run: the engine does not sample from the policy that is trained."""
    limit = run.config.trainer.warn_logprob_gap
    if gap > limit and not run.warned_of_gap:
        run.warned_of_gap = True
        logger.warning(
            "step %d: the engine's log-probs are %.3g nats off the trainer's on average, above trainer.warn_logprob_gap=%g;"
            " compare precision and sampling settings of both, or weigh tokens with an off-policy correction",
            run.counters.step,
            gap,
            limit,
        )


def _stop_on_bad_numbers(run: Run, metrics: dict[str, float]) -> None:
    """Skipped updates are counted; too many in a row end the run, with the sample ids saved."""
    skipped = metrics.get("actor/skipped", 0.0) > 0 or math.isnan(metrics.get("actor/loss", 0.0))
    run.counters.skipped_in_a_row = run.counters.skipped_in_a_row + 1 if skipped else 0
    if run.counters.skipped_in_a_row < run.config.trainer.max_skipped_steps:
        return
    path = run.directory / "bad_samples.json"
    samples = run.scored.fetch("sample_id").tolist() if run.scored is not None else []
    path.write_text(json.dumps({"step": run.counters.step, "sample_ids": samples}))
    raise NumericalError(
        f"{run.counters.skipped_in_a_row} steps in a row had a loss or gradient that is not finite.\n"
        f"The samples of the last one are listed in {path}; try a lower optimizer.lr."
    )


def _stop_on_gap(run: Run, metrics: dict[str, float]) -> None:
    """An engine that computes something else than the trainer samples from another policy."""
    limit, gap = run.config.trainer.max_logprob_gap, metrics.get("actor/rollout_logprob_gap", 0.0)
    if limit and not gap <= limit:
        raise NumericalError(
            f"the log-probs of rollout and trainer differ by {gap:.3g} on average, more than"
            f" trainer.max_logprob_gap={limit:g}\n"
            "Give both the same model.precision and the newest weights, or allow more:"
            f"  trainer.max_logprob_gap={2 * gap:.2g}"
        )


@contextmanager
def _signals(run: Run) -> Iterator[None]:
    """SIGTERM and the first ctrl-C finish the step and write a checkpoint; a second ctrl-C abandons at once."""

    def ask(number: int, frame: FrameType | None) -> None:
        if run.stop_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop_requested = True
        run.phase("stopping after this step; ctrl-C again abandons it")

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: a notebook or a test; there is nobody to press ctrl-C
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
