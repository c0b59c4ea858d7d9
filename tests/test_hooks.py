"""Hooks: order and arguments of calls, hooks that fail, and hooks that are declared wrongly."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import pytest

from rlcore import hookimpl
from rlcore.errors import ConfigError
from rlcore.hooks import Check, Hooks, specs
from rlcore.registry import refresh
from rlcore.registry.errors import PluginNotFound
from tests.distributions import plant, write_module

HOOKS = sorted(name for name in vars(specs) if name.startswith("rlcore_"))
ARGUMENTS = {
    "config": "the config",
    "role": "actor",
    "rank": 1,
    "run": "the run",
    "step": 7,
    "samples": "the samples",
    "experience": "the experience",
    "calls": ["a call"],
    "metrics": {"loss": 0.5},
    "version": 3,
    "seconds": 0.25,
    "path": Path("checkpoint"),
    "error": None,
}


def observer(name: str, **hooks):
    """Return an object of a class `name` with the given hooks."""
    return type(name, (), {hook: staticmethod(hookimpl(function)) for hook, function in hooks.items()})()


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_one_typed_method_that_gives_its_plugin_every_argument(hook):
    seen = {}
    parameters = list(inspect.signature(getattr(specs, hook)).parameters)
    names = ", ".join(parameters)
    scope = {"seen": seen}
    exec(f"def {hook}({names}): seen.update({', '.join(f'{it}={it}' for it in parameters)})", scope)
    method = getattr(Hooks([observer("Eyes", **{hook: scope[hook]})]), hook.removeprefix("rlcore_"))

    of_core = {"core": {}} if hook == "rlcore_collect_metrics" else {}

    method(**{name: ARGUMENTS[name] for name in parameters}, **of_core)

    assert seen == {name: ARGUMENTS[name] for name in parameters}
    assert list(inspect.signature(method).parameters) == [*parameters, *of_core]
    assert all(it.kind is it.KEYWORD_ONLY for it in inspect.signature(method).parameters.values())


def test_plugins_are_called_in_the_order_of_their_names_whatever_the_order_of_the_config():
    calls = []
    plugins = [
        observer(name, rlcore_run_start=lambda run, name=name: calls.append(name)) for name in ("Mid", "Zeta", "Alpha")
    ]

    Hooks(plugins).run_start(run=None)

    assert calls == ["Alpha", "Mid", "Zeta"]


def test_two_objects_of_one_class_are_both_called():
    calls = []

    class Count:
        def __init__(self, number):
            self.number = number

        @hookimpl
        def rlcore_step_start(self, step):
            calls.append((self.number, step))

    Hooks([Count(1), Count(2), Count(3)]).step_start(run=None, step=9)

    assert calls == [(1, 9), (2, 9), (3, 9)]


def test_a_plugin_named_twice_is_called_once(site):
    write_module(site, "twice_hooks", "from rlcore import hookimpl\nCALLS = []\n")
    module = site / "twice_hooks.py"
    module.write_text(module.read_text() + "@hookimpl\ndef rlcore_run_start(run): CALLS.append(run)\nclass H: ...\n")
    module.write_text(module.read_text() + "H.rlcore_run_start = staticmethod(rlcore_run_start)\n")

    Hooks(["twice_hooks:H", "twice_hooks:H"]).run_start(run=1)

    import twice_hooks

    assert twice_hooks.CALLS == [1]


@pytest.mark.parametrize("target", ["seeing_hooks", "seeing_hooks:Eyes", "seeing_hooks:eyes"])
def test_a_module_a_class_and_an_object_are_all_plugins(site, target):
    code = """
from rlcore import hookimpl
import rlcore_seeing_helpers
class Eyes:
    @hookimpl
    def rlcore_collect_metrics(self, run): return {"seen": float(run)}
eyes = Eyes()
@hookimpl
def rlcore_collect_metrics(run): return {"seen": float(run)}
"""
    modules = {"seeing_hooks": code, "rlcore_seeing_helpers": ""}
    plant(site, f"seeing-{len(target)}", {"hooks": {"eyes": target}}, code=modules)
    refresh()

    assert Hooks(["eyes"]).collect_metrics(run=2, step=1, core={}) == {"seen": 2.0}


def test_an_installed_plugin_that_the_config_does_not_name_is_not_even_imported(site):
    plant(site, "asleep", {"hooks": {"asleep": "asleep"}}, code={"asleep": "raise AssertionError"})
    refresh()

    Hooks().run_start(run=None)


def test_no_plugins_means_no_results():
    hooks = Hooks()

    assert hooks.worker_env(config=None, role="actor", rank=0) == {}
    assert hooks.collect_metrics(run=None, step=1, core={}) == {}
    assert hooks.health_checks() == []


def test_a_hidden_plugin_is_refused_when_the_config_names_it(site, monkeypatch):
    plant(site, "shut-eyes", {"hooks": {"eyes": "shut_eyes"}}, code={"shut_eyes": "raise AssertionError"})
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "shut-eyes")
    refresh()

    with pytest.raises(PluginNotFound, match=r"hooks 'eyes' is installed .* but hidden by RLCORE_DISABLE_PLUGINS"):
        Hooks(["eyes"])


def _fail(run):
    raise ZeroDivisionError("in the plugin")


def test_a_failing_hook_stops_the_run_and_names_itself_and_its_plugin():
    calls = []
    plugins = [
        observer("Bad", rlcore_run_start=_fail),
        observer("Good", rlcore_run_start=lambda run: calls.append(run)),
    ]

    with pytest.raises(ZeroDivisionError, match="in the plugin") as caught:
        Hooks(plugins).run_start(run=1)

    assert caught.value.__notes__ == ["in hook rlcore_run_start of Bad"]
    assert calls == []


def test_with_on_error_warn_a_failing_hook_is_logged_and_the_others_are_called(caplog):
    calls = []
    plugins = [
        observer("Bad", rlcore_run_start=_fail),
        observer("Good", rlcore_run_start=lambda run: calls.append(run)),
    ]

    with caplog.at_level(logging.WARNING):
        Hooks(plugins, on_error="warn").run_start(run=1)

    assert calls == [1]
    assert "hook rlcore_run_start of Bad failed" in caplog.text
    assert "ZeroDivisionError: in the plugin" in caplog.text


def test_an_interrupt_in_a_hook_is_never_passed_over():
    def interrupt(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hooks([observer("Bad", rlcore_run_start=interrupt)], on_error="warn").run_start(run=1)


@pytest.mark.parametrize("failed", [None, ValueError("the run")])
def test_run_end_calls_every_plugin_and_a_failing_one_does_not_hide_the_error_of_the_run(failed, caplog):
    told = []
    bad = observer("Bad", rlcore_run_end=_fail)
    hooks = Hooks([bad, observer("Good", rlcore_run_end=lambda run, error: told.append(error))])

    if failed is None:
        with pytest.raises(ZeroDivisionError):
            hooks.run_end(run=1, error=None)
    else:
        hooks.run_end(run=1, error=failed)

    assert told == [failed]
    assert "hook rlcore_run_end of Bad failed" in caplog.text


def test_metrics_of_two_plugins_are_joined():
    left = observer("Left", rlcore_collect_metrics=lambda: {"a": 1.0})
    right = observer("Right", rlcore_collect_metrics=lambda step: {"b": float(step)})
    silent = observer("Silent", rlcore_collect_metrics=lambda: None)

    assert Hooks([right, silent, left]).collect_metrics(run=None, step=4, core={}) == {"a": 1.0, "b": 4.0}


def test_one_metric_from_two_plugins_is_refused_with_both_names():
    plugins = [observer(name, rlcore_collect_metrics=lambda: {"a": 1.0}) for name in ("Left", "Right")]

    with pytest.raises(ConfigError, match=r"'a' comes from two plugins, Left \(1\.0\) and Right \(1\.0\)"):
        Hooks(plugins).collect_metrics(run=None, step=1, core={})


def test_one_variable_from_two_plugins_is_fine_only_when_the_values_agree():
    def plugin(name, value):
        return observer(name, rlcore_worker_env=lambda role: {"CUDA_HOME": value, role: "1"})

    same = Hooks([plugin("Left", "/cuda"), plugin("Right", "/cuda")])
    assert same.worker_env(config=None, role="actor", rank=0) == {"CUDA_HOME": "/cuda", "actor": "1"}

    other = Hooks([plugin("Left", "/cuda"), plugin("Right", "/else")])
    with pytest.raises(ConfigError, match=r"Left \('/cuda'\) and Right \('/else'\)"):
        other.worker_env(config=None, role="actor", rank=0)


def test_metrics_that_are_no_mapping_are_refused_with_the_name_of_the_plugin():
    with pytest.raises(ConfigError, match=r"rlcore_collect_metrics of Bad returned 0\.5, which is not a mapping"):
        Hooks([observer("Bad", rlcore_collect_metrics=lambda: 0.5)]).collect_metrics(run=None, step=1, core={})


def test_health_checks_of_all_plugins_come_as_one_list():
    one = Check(name="one", run=lambda: "fine")
    two = Check(name="two", run=lambda: "fine", fix="fix it")
    plugins = [observer("B", rlcore_health_checks=lambda: [two]), observer("A", rlcore_health_checks=lambda: [one])]

    assert Hooks(plugins).health_checks() == [one, two]


class Misspelled:
    @hookimpl
    def rlcore_step_ned(self, step): ...


class MisspelledAndUnmarked:
    def rlcore_run_strat(self, run): ...


class Unmarked:
    def rlcore_step_end(self, step): ...


class UnknownArgument:
    @hookimpl
    def rlcore_step_end(self, steps): ...


class WithoutPrefix:
    @hookimpl
    def step_end(self, step): ...


class Empty:
    pass


class Wrapper:
    @hookimpl(wrapper=True)
    def rlcore_step_end(self, step):
        yield


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (
            Misspelled,
            "'Misspelled' has 'rlcore_step_ned', which is not a hook. Did you mean 'rlcore_step_end'?\nHooks: ",
        ),
        (MisspelledAndUnmarked, "has 'rlcore_run_strat', which is not a hook. Did you mean 'rlcore_run_start'?"),
        (Unmarked, "'Unmarked' defines 'rlcore_step_end' without @rlcore.hookimpl.\nWrite @rlcore.hookimpl above it."),
        (UnknownArgument, "{'steps'} are declared in the hookimpl but can not be found in the hookspec"),
        (WithoutPrefix, "unknown hook 'step_end'"),
        (Empty, "'Empty' has no hook, so it would have no effect.\nMark its functions with @rlcore.hookimpl"),
        (Wrapper, "defines 'rlcore_step_end' as a wrapper, but hooks only observe.\nRemove wrapper=True."),
    ],
)
def test_an_ineffective_hook_plugin_is_refused_before_the_run(plugin, words):
    with pytest.raises(ConfigError) as caught:
        Hooks([plugin])

    assert words in str(caught.value)
