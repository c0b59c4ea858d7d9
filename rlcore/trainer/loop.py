"""The training loop: prompts, collect, update, sync, evaluate, checkpoint, log.

Schedule `sync`: every phase waits for the previous one, so all samples of a step come from the weights that the step
updates. Step n produces weight version n.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path

from rlcore.errors import InfrastructureError, NumericalError, RunError, TrackerError
from rlcore.protocols.optional import Evaluates
from rlcore.trainer.best import is_exhausted, note_best
from rlcore.trainer.evaluate import evaluate, evaluate_groups
from rlcore.trainer.prefetch import StepAbandoned
from rlcore.trainer.run import Clock, Run, values
from rlcore.trainer.step import Step

logger = logging.getLogger(__name__)


def train(run: Run) -> None:
    """Train until the configured step or a signal to stop, and write a checkpoint at the end."""
    for _ in steps(run):
        pass


def steps(run: Run) -> Generator[dict[str, float], None, None]:
    """Train like `train`, and yield the metrics of each step; if the iterator is closed, the run ends as with a signal."""
    error: BaseException | None = None
    current: Step | None = None
    between = False
    try:
        run.signals.in_steps = True
        run.hooks.run_start(run=run)
        if run.counters.step == 0:
            run.log(0, _evaluate(run) if run.config.eval.before_training else {})
        with suppress(GeneratorExit):
            while run.counters.step < run.config.trainer.steps and not (run.signals.asked or is_exhausted(run)):
                current = run.next_step()
                with suppress(StepAbandoned):  # only after a signal
                    metrics = step(run, current)
                    between = True
                    yield metrics
                    between = False
        save(run)
        complete(run)
    except BaseException as raised:
        error = raised
        _complete_after(run, between or (current is not None and current.collecting), raised)
        raise
    finally:
        run.signals.in_steps = False
        run.hooks.run_end(run=run, error=error)


def step(run: Run, current: Step) -> dict[str, float]:
    """Run one step, from prompts to updated weights, and return its metrics."""
    number = current.number
    clock = Clock()
    run.hooks.step_start(run=run, step=number)
    roles = run.roles.during(current)
    prompts = roles.more_prompts(run.config.trainer.prompts_per_step)
    experience = run.algorithm.collect(roles, prompts)
    run.source.loader.finish(current.positions)
    run.record(current)
    current.collecting = False
    learned = run.algorithm.update(roles, experience)
    roles.sync(version=number)
    run.source.loader.consume(current.positions)
    run.counters.step = number
    run.log_samples(current)
    metrics = values(learned | current.metrics)
    metrics |= _performance(run, current, metrics, clock)
    run.hooks.weights_synced(run=run, version=number, seconds=metrics.get("time_s/weight sync", 0.0))
    every = run.config.eval.every_steps
    if (every and number % every == 0) or number == run.config.trainer.steps:
        metrics |= _evaluate(run)
    metrics |= run.hooks.collect_metrics(run=run, step=number, core=metrics)
    run.log(number, metrics)
    run.hooks.step_end(run=run, step=number, metrics=metrics, calls=current.calls, experience=experience)
    _compare_log_probs(run, metrics)
    _stop_when_nothing_is_learned(run, current, metrics)
    complete(run)
    every = run.config.checkpoint.every_steps
    if note_best(run, metrics) or (every and number % every == 0):
        save(run)
    return metrics


def save(run: Run) -> None:
    """Write a checkpoint of the current step, unless it exists; with a background save, only begin to."""
    complete(run)
    latest = run.checkpoints.latest()
    if latest is not None and latest.step == run.counters.step:
        return
    run.phase("checkpoint")
    run.saving = Step(number=run.counters.step, on_wait=run.phase)
    still_writing: list[bool] = []

    def save_roles(directory: Path) -> None:
        for group in run.roles.during(run.saving).with_state():
            still_writing.extend(group.save(str(directory), not run.config.checkpoint.background))
        if run.roles.prefetcher is not None:
            run.roles.prefetcher.save(directory, run.counters.step)

    run.checkpoints.begin(run.counters.step, run.state(), save_roles)
    if not any(still_writing):
        complete(run)


def complete(run: Run) -> None:
    """Wait for the checkpoint that is being written, if any."""
    if run.checkpoints.writing is None:
        return

    def finish_roles(directory: Path) -> None:
        for group in run.roles.during(run.saving).with_state():
            group.finish_save()
            for seen in group.saved(str(directory)):
                _check_arrived(directory / group.role, seen)

    checkpoint = run.checkpoints.complete(finish_roles, run.counters.best_step)
    run.hooks.checkpoint_saved(run=run, step=checkpoint.step, path=checkpoint.path, calls=run.saving.calls)


def _complete_after(run: Run, nothing_changed: bool, error: BaseException) -> None:
    """Save what earlier steps learned before re-raising, unless the hosts that would write it may be dead."""
    if not isinstance(error, Exception) or isinstance(error, InfrastructureError):
        return
    try:
        lost_tracker = isinstance(error, TrackerError)  # raised before or after a step, never during an update
        if (nothing_changed or lost_tracker) and run.counters.step:
            save(run)
        complete(run)
        if lost_tracker and run.counters.step:
            error.add_note(f"the checkpoint of step {run.counters.step} is in {run.checkpoints.directory}")
    except Exception as second:  # a note, because the caller raises the first error
        error.add_note(f"while handling this error: {type(second).__name__}: {second}")
        for note in getattr(second, "__notes__", ()):
            error.add_note(note)


def _check_arrived(directory: Path, seen: Mapping[str, int]) -> None:
    """Reject the checkpoint unless every file that a node wrote is visible here."""
    for name, size in seen.items():
        if not (directory / name).is_file() or (directory / name).stat().st_size != size:
            raise InfrastructureError(
                f"{directory / name} exists on the node of role '{directory.name}', but not on this one\n"
                "The run's directory must be on a disk that all nodes share:  run.directory=DIR"
            )


def _evaluate(run: Run) -> dict[str, float]:
    if run.held_out is None:
        return {}
    run.phase("evaluate")
    clock = Clock()
    chosen = run.algorithm.evaluate if isinstance(run.algorithm, Evaluates) else evaluate
    record = Step(number=run.counters.step, on_wait=run.phase)
    metrics, samples = evaluate_groups(chosen, run.roles.during(record), run.held_out, run.config.eval)
    metrics |= {f"eval/{name}": mean.value for name, mean in record.metrics.items() if name.startswith("memory_gb/")}
    run.counters.last_eval = metrics["eval/pass_rate"]
    if run.counters.first_eval is None:
        run.counters.first_eval = metrics["eval/pass_rate"]
    seconds = clock.seconds
    run.hooks.evaluated(run=run, step=run.counters.step, samples=samples, calls=record.calls)
    return metrics | {"time_s/evaluate": seconds}


def _performance(run: Run, current: Step, metrics: dict[str, float], clock: Clock) -> dict[str, float]:
    """Update the counters and return the throughput and timing metrics of the step."""
    seconds = clock.seconds
    counters = run.counters
    counters.tokens += current.num_tokens
    counters.samples += current.num_samples
    counters.seconds += seconds
    counters.last_reward = metrics.get("reward/mean")
    if counters.first_reward is None:
        counters.first_reward = counters.last_reward
    return {
        **(run.roles.prefetcher.balance(current, seconds) if run.roles.prefetcher else {}),
        "perf/step_s": seconds,
        "perf/tokens_per_second": current.num_tokens / seconds,
        "perf/controller_share": 1.0 - current.blocked_s / seconds,
        "controller/bytes": float(current.num_bytes),
        "progress/samples": float(counters.samples),
        **{f"time_s/{name}": spent for name, spent in current.busy_s.items()},
    }


def _compare_log_probs(run: Run, metrics: Mapping[str, float]) -> None:
    """Warn once when a role and its engine compute different log-probs, and stop above the allowed maximum."""
    if run.config.schedule.replay:  # the weights may learn something else than those that sampled
        return
    warn, limit = run.config.trainer.warn_logprob_gap, run.config.trainer.max_logprob_gap
    for role in run.roles.trained:
        stale = 0.0 if run.config.schedule.steps_ahead else metrics.get(f"{role}/policy_gap", 0.0)
        gap = metrics.get(f"{role}/rollout_logprob_gap", stale)  # absent if the engine reports old versions
        if limit and not gap <= limit:
            more = f", or allow more:  trainer.max_logprob_gap={2 * gap:.2g}" if math.isfinite(gap) else ""
            raise NumericalError(
                f"the log-probs of '{role}' and its engine differ by {gap:.3g} on average, more than"
                f" trainer.max_logprob_gap={limit:g}\n"
                f"Use the same model.precision and weights for both{more}"
            )
        if gap > warn and not run.warned_of_gap:
            run.warned_of_gap = True
            logger.warning(
                "step %d: log-probs of '%s' and its engine differ by %.3g nats on average, above"
                " trainer.warn_logprob_gap=%g; compare precision and sampling settings of both, or enable an off-policy"
                " correction",
                *(run.counters.step, role, gap, warn),
            )


def _stop_when_nothing_is_learned(run: Run, current: Step, metrics: dict[str, float]) -> None:
    """Count steps that were skipped or had no samples; too many in a row end the run and save the sample ids."""
    names = run.roles.trained
    for name in names:
        if times := metrics.get(f"{name}/skipped", 0.0):
            logger.warning(
                "step %d: %g updates of %s skipped: a gradient was not finite", run.counters.step, times, name
            )
    skipped = any(metrics.get(f"{it}/skipped", 0.0) > 0 or math.isnan(metrics.get(f"{it}/loss", 0.0)) for it in names)
    trained = any(f"{it}.update" in current.busy_s for it in names)
    has_reward = "reward/mean" in metrics  # equal rewards alone are fine
    idle = not trained and not has_reward and (current.scored is not None or metrics.get("actor/updates") == 0)
    count = run.counters.skipped_in_a_row = run.counters.skipped_in_a_row + 1 if skipped or idle else 0
    if count < run.config.trainer.max_skipped_steps:
        return
    if idle:
        raise RunError(
            f"{count} steps in a row changed nothing: no sample of the last one has a reward\n"
            f"See reward/num_* and samples.jsonl in {run.directory}, fix the reward or the data, or allow more: "
            f" trainer.max_skipped_steps={10 * count}"
        )
    path = run.directory / "bad_samples.json"
    samples = current.scored.fetch("sample_id").tolist() if current.scored is not None else []
    path.write_text(json.dumps({"step": run.counters.step, "sample_ids": samples}))
    raise NumericalError(
        f"{count} steps in a row had a loss or gradient that is not finite\n"
        f"The samples of the last one are listed in {path}; try a lower optimizer.lr."
    )
