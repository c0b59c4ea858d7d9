"""The declared surface: what plugins may import, and that a stable name does not change by accident."""

import importlib
import inspect
import os
import re
import string
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from rlcore.surface import PROVISIONAL, STABLE, private_imports, tier_of

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "surface.txt"
TEMPLATES = sorted((ROOT / "plugins/rlcore-workbench/src/rlcore_workbench/templates").glob("*.py.template"))
SOURCES = [
    *sorted(ROOT.glob("plugins/*/src/**/*.py")),
    *sorted(ROOT.glob("examples/*/src/**/*.py")),
    *sorted(ROOT.glob("docs/snippets/*.py")),
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_plugin_imports_declared_names_only(path):
    assert private_imports(path.read_text()) == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_imports_declared_names_only(path):
    names = {match[1] or match[2] for match in re.finditer(r"\$(?:(\w+)|\{(\w+)\})", path.read_text())}
    source = string.Template(path.read_text()).safe_substitute(dict.fromkeys(names, "name"))

    assert private_imports(source) == []


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("from rlcore import Batch", []),
        ("from rlcore.trainer.run import Clock", ["rlcore.trainer.run.Clock"]),
        ("def f():\n    from rlcore.data.batch import _tensor", ["rlcore.data.batch._tensor"]),
        ("import rlcore.trainer.loop", ["import.rlcore.trainer.loop"]),
        ("import rlcore\nfrom rlcore_environments.tools import ToolEnvironment\nfrom .rlcore import x", []),
    ],
)
def test_private_imports_are_found(source, private):
    assert private_imports(source) == private


@pytest.mark.parametrize("tier", [STABLE, PROVISIONAL], ids=["stable", "provisional"])
def test_every_declared_name_exists(tier):
    for module, names in tier.items():
        for name in names.split():
            assert resolved(module, name) is not None


def test_no_name_has_two_tiers():
    both = {
        f"{module}.{name}"
        for module, names in PROVISIONAL.items()
        for name in names.split()
        if tier_of(module, name) == "stable"
    }

    assert both == set()


def resolved(module, name):
    """Return the object of a name, or the module when it is one."""
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")


def described(value):
    """Return lines that change when the signature of a function or a class changes."""
    place = f"{value.__module__}.{value.__qualname__}"
    if inspect.isfunction(value):
        return [f"{place}{signature(value)}"]
    lines = [f"{place}({', '.join(base.__name__ for base in value.__bases__)})"]
    own = {field.name: f"    {field.name}: {field.type}" for field in fields(value)} if is_dataclass(value) else {}
    for member, found in sorted(vars(value).items()):
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if inspect.isfunction(function) and not member.startswith("_") and member not in own:
            own[member] = f"    {member}{signature(function)}"
    return [*lines, *own.values()]


def signature(function):
    return re.sub(r"'([^']*)'", r"\1", str(inspect.signature(function)))


def test_stable_signatures_are_those_of_the_golden_file():
    values = {resolved(module, name) for module, names in STABLE.items() for name in names.split()}
    kept = [it for it in values if (inspect.isfunction(it) or inspect.isclass(it)) and "testing" not in it.__module__]
    text = "\n".join(line for value in sorted(kept, key=described) for line in described(value)) + "\n"

    if os.environ.get("RLCORE_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    update = "RLCORE_UPDATE_GOLDEN=1 pytest tests/test_surface.py"
    assert text == GOLDEN.read_text(), f"a stable name has changed: announce it, then  {update}"
