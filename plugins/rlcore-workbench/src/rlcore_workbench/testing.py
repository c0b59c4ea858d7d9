"""The contract suite for hooks: what the core relies on in a plugin that observes."""

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
"""Metrics that differ between two runs of the same settings."""


class HooksContract:
    """Say what the plugin is. The suite trains a tiny model for two steps, with it and without it.

    Example:
        class TestMine(HooksContract):
            plugin = MyHooks
    """

    plugin: Any
    """A registered name, module:attribute, or the class itself."""

    @pytest.fixture
    def assets(self, tmp_path_factory: pytest.TempPathFactory) -> Assets:
        return prepare(tmp_path_factory.getbasetemp() / "rlcore-hooks", _RECIPE)

    def test_its_hooks_are_hooks(self) -> None:
        with allowed("every rlcore_ function is a hook, marked with @rlcore.hookimpl, with known arguments"):
            Hooks([self.plugin])

    def test_a_run_goes_through_and_its_metrics_are_numbers(self, assets: Assets, tmp_path: Path) -> None:
        with allowed("a run of two steps with this plugin must end well"):
            lines = run(config(assets, tmp_path), Hooks([self.plugin]))
        odd = [name for line in lines for name, value in line.items() if not isinstance(value, int | float)]
        equal(odd, [], "rlcore_collect_metrics returns names and numbers; these are none")

    def test_training_is_the_same_as_without_it(self, assets: Assets, tmp_path: Path) -> None:
        plain, observed = (
            run(config(assets, tmp_path / name), Hooks(plugins))
            for name, plugins in (("plain", []), ("observed", [self.plugin]))
        )
        changed = [name for before, after in zip(plain, observed) for name in before if before[name] != after[name]]
        equal(changed, [], "hooks observe; with this plugin other numbers were trained")

    def test_variables_for_workers_are_text(self, assets: Assets, tmp_path: Path) -> None:
        with allowed("rlcore_worker_env is asked for every role and rank"):
            given = Hooks([self.plugin]).worker_env(config=config(assets, tmp_path), role="actor", rank=0)
        odd = {name: value for name, value in given.items() if not isinstance(name, str) or not isinstance(value, str)}
        equal(odd, {}, "environment variables are text; these are not")

    def test_health_checks_have_names_and_say_what_they_found(self) -> None:
        checks = Hooks([self.plugin]).health_checks()
        odd = [check for check in checks if not isinstance(check, Check) or not check.name]
        equal(odd, [], "rlcore_health_checks returns a list of rlcore.hooks.Check, each with a name")
        for check in checks:
            try:
                found: object = check.run()
            except Exception:  # something may be wrong with this machine, and the check is there to say so
                continue
            assert isinstance(found, str), f"check '{check.name}' returns what it found as text, got {found!r}"


def config(assets: Assets, directory: Path) -> Config:
    """Settings of a run of a second or two."""
    composed = compose([*_SETTINGS, f"run.directory={directory}", "run.name=run"]).config
    data = replace(composed.data, train=str(assets.train), eval=str(assets.eval))
    return replace(composed, model=replace(composed.model, path=str(assets.model)), data=data)


def run(config: Config, hooks: Hooks) -> list[Mapping[str, Any]]:
    """Train; the metrics of each step, without those of the clock."""
    directory = Path(config.run.directory) / config.run.name
    hooks.configure(config=config)
    running = launch(make_plan(config, directory), hooks)
    try:
        train(running)
    finally:
        running.close({})
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(_CLOCK)} for line in lines]
