"""The loop: prompts, collect, update, sync, evaluate, checkpoint, log.

Schedule `sync`: every phase waits for the one before, so every sample of a step is drawn under the weights that the
step updates. Step n makes weights version n.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from rlcore.errors import ConfigError, InfrastructureError, NumericalError, RunError, TrackerError
from rlcore.protocols.optional import Evaluates
from rlcore.trainer.evaluate import evaluate
from rlcore.trainer.run import Clock, Run, values

logger = logging.getLogger(__name__)


def train(run: Run) -> None:
    """Train until the configured step, or until a signal asks to stop; a checkpoint is written at the end."""
    error: BaseException | None = None
    try:
        run.signals.in_steps = True
        run.hooks.run_start(run=run)
        if run.counters.step == 0:
            run.log(0, _evaluate(run))
        while run.counters.step < run.config.trainer.steps and not run.signals.asked:
            step(run)
        save(run)
        complete(run)
    except BaseException as raised:
        error = raised
        _complete_after(run, raised)
        raise
    finally:
        run.signals.in_steps = False
        run.hooks.run_end(run=run, error=error)


def step(run: Run) -> dict[str, float]:
    """One step: the whole way of a prompt."""
    number = run.counters.step + 1
    clock = Clock()
    run.hooks.step_start(run=run, step=number)
    run.positions = []
    run.collecting = True
    prompts = run.next_prompts(run.config.trainer.prompts_per_step)
    experience = run.algorithm.collect(run.roles, prompts)
    run.loader.finish(run.positions)
    run.collecting = False
    learned = run.algorithm.update(run.roles, experience)
    run.roles.sync(version=number)
    metrics = values(learned | run.roles.take_metrics())
    run.loader.consume(run.positions)
    run.counters.step = number
    run.log_samples(number)
    metrics |= _count(run, metrics, clock)
    run.hooks.weights_synced(run=run, version=number, seconds=metrics.get("time_s/weight sync", 0.0))
    every = run.config.eval.every_steps
    if (every and number % every == 0) or number == run.config.trainer.steps:
        metrics |= _evaluate(run)
    metrics |= _of_plugins(run, metrics)
    run.log(number, metrics)
    run.hooks.step_end(run=run, step=number, metrics=metrics)
    _compare_log_probs(run, metrics.get("actor/rollout_logprob_gap", 0.0))
    _stop_when_nothing_is_learned(run, metrics)
    complete(run)
    if run.config.checkpoint.every_steps and number % run.config.checkpoint.every_steps == 0:
        save(run)
    return metrics


def save(run: Run) -> None:
    """Write a checkpoint of the present step, unless it is there already, or begin to."""
    complete(run)
    latest = run.checkpoints.latest()
    if latest is not None and latest.step == run.counters.step:
        return
    run.phase("checkpoint")
    still_writing: list[bool] = []

    def save_roles(directory: Path) -> None:
        for group in run.roles.trained():
            still_writing.extend(group.save(str(directory), not run.config.checkpoint.background))

    run.checkpoints.begin(run.counters.step, run.state(), save_roles)
    run.runtime.traffic.take()  # no part of the next step
    if not any(still_writing):
        complete(run)


def complete(run: Run) -> None:
    """Wait for the checkpoint that is being written, if there is one."""
    if run.checkpoints.writing is None:
        return

    def finish_roles(directory: Path) -> None:
        for group in run.roles.trained():
            group.finish_save()
            for seen in group.saved(str(directory)):
                _check_arrived(directory / group.role, seen)

    checkpoint = run.checkpoints.complete(finish_roles)
    run.runtime.traffic.take()
    run.hooks.checkpoint_saved(run=run, step=checkpoint.step, path=checkpoint.path)


def _complete_after(run: Run, error: BaseException) -> None:
    """An error of a later step is no reason to lose what was learned before, unless the hosts that write it may be gone."""
    if not isinstance(error, Exception) or isinstance(error, InfrastructureError):
        return
    try:
        lost_tracker = isinstance(error, TrackerError)  # raised before a step or after it, never inside an update
        if (run.collecting or lost_tracker) and run.counters.step:
            save(run)
        complete(run)
        if lost_tracker and run.counters.step:
            error.add_note(f"the checkpoint of step {run.counters.step} is in {run.checkpoints.directory}")
    except RunError as second:
        error.add_note(f"besides: {second}")


def _check_arrived(directory: Path, seen: Mapping[str, int]) -> None:
    """What a node has of a checkpoint is here too, or it cannot be kept."""
    for name, size in seen.items():
        if not (directory / name).is_file() or (directory / name).stat().st_size != size:
            raise InfrastructureError(
                f"{directory / name} is there on the node of role '{directory.name}', and not on this one\n"
                "The run's directory must be on a disk that all nodes share:  run.directory=DIR"
            )


def _evaluate(run: Run) -> dict[str, float]:
    if run.eval_prompts is None:
        return {}
    run.phase("evaluate")
    clock = Clock()
    algorithm = run.algorithm
    chosen = algorithm.evaluate if isinstance(algorithm, Evaluates) else evaluate
    metrics, _ = chosen(run.roles, run.eval_prompts, run.config.eval)
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
        "progress/samples": float(counters.samples),
        **{f"time_s/{name}": spent for name, spent in traffic.busy_s.items()},
    }


def _compare_log_probs(run: Run, gap: float) -> None:
    """An engine that computes something else than the trainer samples from another policy: warn once, then stop."""
    warn, most = run.config.trainer.warn_logprob_gap, run.config.trainer.max_logprob_gap
    if most and not gap <= most:
        raise NumericalError(
            f"the log-probs of rollout and trainer differ by {gap:.3g} on average, more than"
            f" trainer.max_logprob_gap={most:g}\n"
            "Give both the same model.precision and the newest weights, or allow more:"
            f"  trainer.max_logprob_gap={2 * gap:.2g}"
        )
    if gap > warn and not run.warned_of_gap:
        run.warned_of_gap = True
        logger.warning(
            "step %d: the engine's log-probs are %.3g nats off the trainer's on average, above trainer.warn_logprob_gap=%g;"
            " compare precision and sampling settings of both, or weigh tokens with an off-policy correction",
            run.counters.step,
            gap,
            warn,
        )


def _stop_when_nothing_is_learned(run: Run, metrics: dict[str, float]) -> None:
    """Steps whose update was skipped, or had no samples; too many in a row end the run, with the sample ids saved."""
    names = [group.role for group in run.roles.trained()]
    for name in names:
        if times := metrics.get(f"{name}/skipped", 0.0):
            logger.warning(
                "step %d: %g updates of %s skipped, a gradient was not finite", run.counters.step, times, name
            )
    skipped = any(metrics.get(f"{it}/skipped", 0.0) > 0 or math.isnan(metrics.get(f"{it}/loss", 0.0)) for it in names)
    idle = metrics.get("actor/updates") == 0 and "reward/mean" not in metrics  # answers that are all alike are no fault
    count = run.counters.skipped_in_a_row = run.counters.skipped_in_a_row + 1 if skipped or idle else 0
    if count < run.config.trainer.max_skipped_steps:
        return
    if idle:
        raise RunError(
            f"{count} steps in a row changed nothing: no sample of the last one had a reward\n"
            f"Look at reward/num_* and samples.jsonl in {run.directory}, mend the reward or the data, or allow more: "
            f" trainer.max_skipped_steps={10 * count}"
        )
    path = run.directory / "bad_samples.json"
    samples = run.scored.fetch("sample_id").tolist() if run.scored is not None else []
    path.write_text(json.dumps({"step": run.counters.step, "sample_ids": samples}))
    raise NumericalError(
        f"{count} steps in a row had a loss or gradient that is not finite.\n"
        f"The samples of the last one are listed in {path}; try a lower optimizer.lr."
    )
