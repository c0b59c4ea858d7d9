"""Contract suite for hooks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.compose import compose
from rlcore.config.schema import Config
from rlcore.hooks import Check, Hooks
from rlcore.quickstart import Assets, Recipe, prepare
from rlcore.testing.expect import allowed, equal
from rlcore.trainer.launch import launch
from rlcore.trainer.loop import train
from rlcore.trainer.plan import make_plan

_RECIPE = Recipe(digits=3, warm_steps=20, warm_batch=32, train_prompts=64, eval_prompts=8)
_SETTINGS = (
    "preset=quickstart",
    "runtime=local",
    "trackers=jsonl",
    "trainer.steps=2",
    "trainer.prompts_per_step=8",
    "sampling.samples_per_prompt=4",
    "checkpoint.every_steps=1",
)
_CLOCK = ("time", "perf/", "time_s/", "controller/")
"""Prefixes of metrics that differ between two runs with the same settings."""


class HooksContract:
    """Contract tests for a plugin with hooks. They train a tiny model for two steps, with and without the plugin.

    Example:
        class TestMine(HooksContract):
            plugin = MyHooks
    """

    plugin: Any
    """A registered name, module:attribute, or the class itself."""

    @pytest.fixture
    def assets(self, tmp_path_factory: pytest.TempPathFactory) -> Assets:
        return prepare(tmp_path_factory.getbasetemp() / "rlcore-hooks", _RECIPE)

    def test_its_hooks_are_valid(self) -> None:
        with allowed("every rlcore_ function is a hook, marked with @rlcore.hookimpl, with known arguments"):
            Hooks([self.plugin])

    def test_a_run_succeeds_and_its_metrics_are_numbers(self, assets: Assets, tmp_path: Path) -> None:
        with allowed("a run of two steps with this plugin must succeed"):
            lines = run(config(assets, tmp_path), Hooks([self.plugin]))
        odd = [name for line in lines for name, value in line.items() if not isinstance(value, int | float)]
        equal(odd, [], "rlcore_collect_metrics must return numbers; these metrics are not numbers")

    def test_training_is_the_same_as_without_it(self, assets: Assets, tmp_path: Path) -> None:
        plain, observed = (
            run(config(assets, tmp_path / name), Hooks(plugins))
            for name, plugins in (("plain", []), ("observed", [self.plugin]))
        )
        changed = [name for before, after in zip(plain, observed) for name in before if before[name] != after[name]]
        equal(changed, [], "hooks must not change training; with this plugin these metrics differ")

    def test_variables_for_workers_are_text(self, assets: Assets, tmp_path: Path) -> None:
        with allowed("rlcore_worker_env must accept every role and rank"):
            given = Hooks([self.plugin]).worker_env(config=config(assets, tmp_path), role="actor", rank=0)
        odd = {name: value for name, value in given.items() if not isinstance(name, str) or not isinstance(value, str)}
        equal(odd, {}, "environment variables must be text; these are not")

    def test_health_checks_have_names_and_return_text(self) -> None:
        checks = Hooks([self.plugin]).health_checks()
        odd = [check for check in checks if not isinstance(check, Check) or not check.name]
        equal(odd, [], "rlcore_health_checks must return a list of rlcore.hooks.Check, each with a name")
        for check in checks:
            try:
                found: object = check.run()
            except Exception:  # a health check may fail on this machine
                continue
            assert isinstance(found, str), f"check '{check.name}' must return its result as text, got {found!r}"


def config(assets: Assets, directory: Path) -> Config:
    """Return the config of a run that takes a second or two."""
    composed = compose([*_SETTINGS, f"run.directory={directory}", "run.name=run"]).config
    data = replace(composed.data, train=str(assets.train), eval=str(assets.eval))
    return replace(composed, model=replace(composed.model, path=str(assets.model)), data=data)


def run(config: Config, hooks: Hooks) -> list[Mapping[str, Any]]:
    """Train and return the metrics of each step, without timings."""
    directory = Path(config.run.directory) / config.run.name
    hooks.configure(config=config)
    running = launch(make_plan(config, directory), hooks)
    try:
        train(running)
    finally:
        running.close({})
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(_CLOCK)} for line in lines]
