"""Held-out evaluation: the same rollout and rewards on other prompts, usually with greedy sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from rlcore.data.fields import no_column, values_of
from rlcore.data.loader import mix
from rlcore.errors import ConfigError
from rlcore.types import Sampling

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.data.batch import Batch
    from rlcore.protocols.algorithm import EvalConfig
    from rlcore.trainer.prompts import Prompts
    from rlcore.trainer.roles import Roles

Groups: TypeAlias = Mapping[str, Sequence[int]]
_MOST_VALUES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The prompts of an evaluation."""

    prompts: Batch
    groups: Groups
    """Name -> rows with metrics of their own: a data set, a value of the column `eval.by`, or SET/VALUE."""


def held_out(prompts: Prompts, config: Config) -> HeldOut:
    """Return held-out prompts, spread evenly over each data set, with fixed seeds: the same at every evaluation."""
    rows: list[int] = []
    seeds: list[int] = []
    first, seed = 0, mix(config.run.seed, 1)
    for size in prompts.sets.values() or [len(prompts.batch)]:
        count = min(config.eval.max_prompts, size)
        rows += [first + i * size // count for i in range(count)]
        seeds += [mix(seed, i) for i in range(count)]
        first += size
    chosen = prompts.batch.take(rows).with_rows(group_id=list(range(len(rows))), seed=seeds)
    return HeldOut(prompts=chosen, groups=groups_of(prompts, rows, config.eval.by))


def groups_of(prompts: Prompts, rows: Sequence[int], by: str) -> Groups:
    """Return the groups of these rows of the prompts; their members are places in `rows`.

    Raises:
        ConfigError: there is no column `by`, or it has values that cannot be names.
    """
    of_row = [name for name, size in prompts.sets.items() for _ in range(size)]
    sets = [of_row[row] for row in rows] if prompts.sets else [""] * len(rows)
    names = [[name] for name in sets if name]
    if by:
        batch = prompts.batch
        table = {name: batch[name].tolist() for name in batch.columns if batch.level(name) == "object"}
        column = values_of(by, table)
        if column is None:
            raise ConfigError(f"eval.by: {no_column(by, prompts.name, table)}")
        values = [column[row] for row in rows]
        bad = next((value for value in values if not isinstance(value, str | int | float | None)), None)
        if bad is not None or len(set(values)) > _MOST_VALUES:
            found = f"such as {bad!r:.60}" if bad is not None else f"{len(set(values)):,} different ones"
            raise ConfigError(
                f"eval.by={by}: a column with at most {_MOST_VALUES} texts or numbers is needed, and its values are"
                f" {found}\nName another column, such as data_source."
            )
        texts = [str(value) or "(empty)" for value in values]
        names = [[name, f"{name}/{text}"] if name else [text] for name, text in zip(sets, texts)]
    groups: dict[str, list[int]] = {}
    for place, its in enumerate(names):
        for name in its:
            groups.setdefault(name, []).append(place)
    return groups


Evaluate: TypeAlias = Callable[["Roles", "Batch", "EvalConfig"], tuple[dict[str, float], Any]]


def evaluate_groups(chosen: Evaluate, roles: Roles, held: HeldOut, config: EvalConfig) -> tuple[dict[str, float], Any]:
    """Evaluate with `chosen`, and add `eval/GROUP/...` for each group. Its own evaluation of a group is a new one."""
    if chosen is evaluate:
        return evaluate(roles, held.prompts, config, held.groups)
    metrics, samples = chosen(roles, held.prompts, config)
    for group, rows in held.groups.items():
        own, _ = chosen(roles, held.prompts.take(rows), config)
        metrics |= {name.replace("eval/", f"eval/{group}/", 1): value for name, value in own.items()}
    return metrics, samples


def evaluate(
    roles: Roles, prompts: Batch, config: EvalConfig, groups: Groups = MappingProxyType({})
) -> tuple[dict[str, float], Any]:
    """Score held-out prompts.

    Returns:
        Metrics `eval/reward` (mean), `eval/pass_rate`, `eval/pass_at_k`, `eval/samples`, `eval/response_length`, and the
        same as `eval/GROUP/...` for groups of prompts; and the scored samples. A sample without a score counts as not
        passed, is excluded from the mean, and is counted in `eval/unscored`. A failing reward ends the evaluation if
        `reward.on_error=raise`, and is logged otherwise.
    """
    n = config.samples_per_prompt
    sampling: Sampling = replace(roles.sampling, temperature=config.temperature)
    if config.top_k is not None:
        sampling = replace(sampling, top_k=config.top_k)
    if config.top_p is not None:
        sampling = replace(sampling, top_p=config.top_p)
    samples = roles.rollout.generate(prompts, sampling, n)
    scored = roles.compute_rewards(samples)
    roles.final_rewards(scored)
    columns = scored.fetch("reward", "reward_status", "num_loss_tokens")
    reward, status, length = (column.numpy().reshape(-1, n) for column in columns)
    metrics = _measure("eval", reward, status == 0, length, config.pass_threshold)
    for group, rows in groups.items():
        its = np.array(rows)
        metrics |= _measure(f"eval/{group}", reward[its], status[its] == 0, length[its], config.pass_threshold)
    return metrics, scored


def _measure(
    prefix: str, reward_PG: np.ndarray, has_score_PG: np.ndarray, length_PG: np.ndarray, threshold: float
) -> dict[str, float]:
    """Return the metrics of P prompts with G samples each."""
    passed_PG = has_score_PG & (reward_PG >= threshold)
    metrics = {
        "reward": float(reward_PG[has_score_PG].mean()) if has_score_PG.any() else float("nan"),
        "pass_rate": float(passed_PG.mean()),
        "samples": float(reward_PG.size),
        "response_length": float(length_PG.astype(np.float64).mean()),
    }
    if reward_PG.shape[1] > 1:
        metrics["pass_at_k"] = float(passed_PG.any(axis=1).mean())
    if not has_score_PG.all():
        metrics["unscored"] = float(np.sum(~has_score_PG))
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
