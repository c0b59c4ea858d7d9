"""The best step of a run by one metric, `checkpoint.keep_best`, and its end without improvement, `trainer.patience`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from rlcore.config.schema import Config
from rlcore.errors import ConfigError, did_you_mean
from rlcore.trainer.run import Counters, Run

logger = logging.getLogger(__name__)
_EVAL = "eval/"


def check_best(config: Config, has_prompts: bool) -> None:
    """Check that steps have the metric of checkpoint.keep_best, as far as its name tells.

    Raises:
        ConfigError: they have none.
    """
    best, patience = config.checkpoint.keep_best, config.trainer.patience
    if patience and not best:
        raise ConfigError(f"trainer.patience={patience} needs a metric\nType  checkpoint.keep_best=eval/reward")
    if not best.removeprefix("-").startswith("eval/"):
        return
    if config.schedule.replay:
        raise ConfigError(
            f"checkpoint.keep_best={best}: with schedule.replay, a run evaluates nothing\n"
            "Type  checkpoint.keep_best= trainer.patience=0"
        )
    if not has_prompts:
        raise ConfigError(f"checkpoint.keep_best={best}: this run evaluates nothing\nType  data.eval=FILE")
    if not config.eval.every_steps:
        logger.warning(
            "checkpoint.keep_best=%s: with eval.every_steps=0 only the last step has a value; type  %s",
            *(best, "eval.every_steps=10"),
        )


def note_best(run: Run, metrics: Mapping[str, float]) -> bool:
    """Compare a step with the best one so far and return whether it is better. Steps without the metric do not count.

    Raises:
        ConfigError: no step has this metric.
    """
    setting, counters = run.config.checkpoint.keep_best, _counters(run)
    name = setting.removeprefix("-")
    if name not in metrics:
        others = [it for it in metrics if it.startswith(_EVAL) or not name.startswith(_EVAL)]
        if setting and counters.best is None and others:
            raise ConfigError(
                f"checkpoint.keep_best={setting}: no such metric.{did_you_mean(name, others)}\n"
                f"Metrics: {', '.join(sorted(others))}."
            )
        return False
    value = -metrics[name] if setting.startswith("-") else metrics[name]
    if not math.isnan(value) and (counters.best is None or value > counters.best):
        counters.best, counters.best_step, counters.without_better = value, counters.step, 0
        return True
    counters.without_better += 1
    return False


def is_exhausted(run: Run) -> bool:
    """Return whether the metric has not improved for `trainer.patience` values, and log it."""
    patience, counters = run.config.trainer.patience, _counters(run)
    if not patience or counters.without_better < patience:
        return False
    logger.warning(
        "step %d: the run ends, as %s has not improved in the last %d evaluations (trainer.patience); best at step %d",
        *(counters.step, run.config.checkpoint.keep_best, counters.without_better, counters.best_step),
    )
    return True


def _counters(run: Run) -> Counters:
    """Return the counters, without the best value of another metric than that of now."""
    setting, counters = run.config.checkpoint.keep_best, run.counters
    if setting and counters.best_of not in ("", setting):
        counters.best, counters.best_step, counters.without_better = None, 0, 0
    counters.best_of = setting or counters.best_of
    return counters
