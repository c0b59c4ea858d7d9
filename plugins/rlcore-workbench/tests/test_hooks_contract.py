"""Suite for hooks: a good plugin passes, and each test detects its fault."""

from dataclasses import replace

import pytest
from rlcore_workbench import testing
from rlcore_workbench.testing import HooksContract

from rlcore import hookimpl
from rlcore.hooks import Check
from rlcore.quickstart import prepare


class Good:
    @hookimpl
    def rlcore_step_end(self, run, step, metrics):
        self.last = metrics

    @hookimpl
    def rlcore_collect_metrics(self, run, step):
        return {"good/step": float(step)}

    @hookimpl
    def rlcore_worker_env(self, config, role, rank):
        return {"GOOD_ROLE": role}

    @hookimpl
    def rlcore_health_checks(self):
        def broken():
            raise RuntimeError("nothing there")

        return [Check(name="good", run=lambda: "found"), Check(name="broken", run=broken)]


class TestGood(HooksContract):
    plugin = Good


class NotMarked:
    def rlcore_step_end(self, run, step, metrics):
        pass


class Raises:
    @hookimpl
    def rlcore_weights_synced(self, run, version):
        raise RuntimeError("no")


class Texts:
    @hookimpl
    def rlcore_collect_metrics(self, run, step):
        return {"mine/state": "fine"}


class Numbers:
    @hookimpl
    def rlcore_worker_env(self, config, role, rank):
        return {"RANK": rank}


class Nameless:
    @hookimpl
    def rlcore_health_checks(self):
        return [Check(name="", run=lambda: "x")]


class Wordless:
    @hookimpl
    def rlcore_health_checks(self):
        return [Check(name="quiet", run=lambda: None)]


class Cools:
    @hookimpl
    def rlcore_step_start(self, run):
        run.roles.sampling = replace(run.roles.sampling, temperature=0.5)


FAULTS = [
    ("test_its_hooks_are_valid", NotMarked),
    ("test_a_run_succeeds_and_its_metrics_are_numbers", Raises),
    ("test_a_run_succeeds_and_its_metrics_are_numbers", Texts),
    ("test_training_is_the_same_as_without_it", Cools),
    ("test_variables_for_workers_are_text", Numbers),
    ("test_health_checks_have_names_and_return_text", Nameless),
    ("test_health_checks_have_names_and_return_text", Wordless),
]


@pytest.mark.parametrize(("test", "plugin"), FAULTS)
def test_the_suite_detects_the_fault(test, plugin, tmp_path, tmp_path_factory):
    suite = type("Suite", (HooksContract,), {"plugin": plugin})()
    assets = prepare(tmp_path_factory.getbasetemp() / "rlcore-hooks", testing._RECIPE)
    method = getattr(suite, test)
    given = {"assets": assets, "tmp_path": tmp_path}
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]

    with pytest.raises(AssertionError) as failure:
        method(**{name: given[name] for name in names})

    assert len(str(failure.value)) > 30, "the message must say what the contract asks for"


def test_every_test_of_the_suite_detects_a_fault():
    tests = {name for name in dir(HooksContract) if name.startswith("test_")}

    assert tests == {test for test, _ in FAULTS}
