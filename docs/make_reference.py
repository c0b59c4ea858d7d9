"""Generate docs/reference.md and docs/contracts.md from the code:  python docs/make_reference.py

The reference lists protocols, hooks, columns, settings with defaults, and errors, with their docstrings. The contracts page
lists the tests for each kind of plugin, with the faults that each test detects.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from rlcore import dispatch, errors, surface
from rlcore.config.build import to_plain
from rlcore.config.schema import Choice, Config
from rlcore.data.columns import STANDARD_COLUMNS
from rlcore.hooks import specs
from rlcore.protocols import PROTOCOLS, Roles, groups, optional
from rlcore.registry import KINDS
from rlcore.registry import errors as plugin_errors

TARGET = Path(__file__).with_name("reference.md")
CONTRACTS = Path(__file__).with_name("contracts.md")
CHOSEN = {
    "algorithm": ["rlcore.algorithms.grpo:GRPOConfig", "rlcore.algorithms.ppo:PPOConfig"],
    "backend": ["rlcore.backends.local:LocalConfig"],
    "rollout": ["rlcore.rollouts.hf:HFConfig"],
    "trackers": ["rlcore.trackers.wandb:WandbConfig"],
}
"""Section -> config classes of the built-in plugins with settings."""


def reference() -> str:
    """Return the reference page."""
    parts = [
        "# Reference",
        "Generated from the code by `python docs/make_reference.py`; do not edit.",
        f"Kinds of plugins, each with the entry-point group `rlcore.KIND`: {', '.join(KINDS)}.",
        "## Protocols",
        *protocols(),
        "## Data types",
        "What protocols take and return, and the base class of workers, without the bodies of their methods.",
        *data_types(),
        "## Optional members",
        clean(optional.__doc__).split("\n\n", 1)[-1],
        *optional_members(),
        "## Names that plugins may import",
        clean(surface.__doc__).split("\n\n", 1)[-1],
        table(("module", "stable", "provisional"), surface_rows()),
        "## Hooks",
        "All hooks run on the controller. A plugin implements any of them, marked with `@rlcore.hookimpl`.",
        table(("hook", "when"), hooks()),
        f"`run` is a `rlcore.hooks.RunView`:\n\n```python\n{sources(specs.CountersView, specs.RunView)}\n```",
        "## Columns",
        "`token`: one value per token; `row`: one per sample; `object`: Python objects, one per sample.",
        table(("column", "level", "type", "meaning", "written by"), columns()),
        "## Settings",
        "Set them with `rlcore train SETTING=VALUE`. `rlcore config` prints all settings with the origin of each value."
        " [Metrics](metrics.md) have a page of their own.",
        table(("setting", "default", "meaning"), settings()),
        "## Errors",
        "Indented classes are subclasses of the class above. A `UserError` ends a command with exit code 2, an `InfrastructureError` with 75, all others with 1.",
        "\n".join(error_tree()),
    ]
    return "\n\n".join(parts) + "\n"


def contracts() -> str:
    """Return the page of contract tests. The mutants are in tests/test_mutants.py, which runs them."""
    root = Path(__file__).parents[1]
    sys.path[:0] = [str(root), str(root / "tests/support")]
    from tests.test_mutants import MUTANTS, SUITES

    parts = [
        "# Contract tests",
        "Generated from the code by `python docs/make_reference.py`; do not edit.",
        "Run the tests of a plugin's kind with `rlcore check KIND NAME`, or inherit them from `rlcore.testing` in four"
        " lines. The tests are themselves tested: `tests/test_mutants.py` runs them against plugins with one deliberate"
        f" fault each, {len(MUTANTS)} in all, and the test must fail with a message that explains the requirement.",
    ]
    for suite in SUITES:
        own = [name for name in vars(suite) if name.startswith("test_")]
        faults = {
            name: [f for test, f, mutant in MUTANTS if test == name and issubclass(mutant, suite)] for name in own
        }
        rows = [(name, ", ".join(dict.fromkeys(faults[name]))) for name in own]
        parts += [
            f"## `{suite.__name__}`",
            clean(suite.__doc__).split("\n\n")[0],
            table(("test", "faults that it detects"), rows),
        ]
    return "\n\n".join(parts) + "\n"


def table(head: tuple[str, ...], rows: Any) -> str:
    """Return a Markdown table whose first column is code."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for first, *rest in rows:
        cells = [f"`{first}`", *(" ".join(str(cell).split()).replace("|", "\\|") for cell in rest)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def protocols() -> Iterator[str]:
    """Yield the source of each protocol."""
    for kind, protocol in (PROTOCOLS | {"passed to algorithms": Roles}).items():
        module = inspect.getmodule(protocol)
        assert module is not None, protocol
        yield f"### {kind}: `{protocol.__name__}`"
        yield clean(module.__doc__).split("\n\n", 1)[-1]
        yield f"```python\n{inspect.getsource(protocol).rstrip()}\n```"
    yield "### groups of `Roles`"
    yield clean(groups.__doc__)
    yield f"```python\n{sources(*vars(groups).values())}\n```"


def sources(*classes: Any) -> str:
    """Return the source of the Protocols among these objects."""
    own = [it for it in classes if inspect.isclass(it) and Protocol in it.__bases__ and it is not Protocol]
    return "\n\n\n".join(inspect.getsource(it).rstrip() for it in own)


def data_types() -> Iterator[str]:
    """Yield the outline of each stable class that is not a Protocol, contract or error, and of `dispatch`."""
    modules = [name for name in surface.STABLE if name not in ("rlcore.errors", "rlcore.testing")]
    named = [
        getattr(importlib.import_module(module), name) for module in modules for name in surface.STABLE[module].split()
    ]
    for found in dict.fromkeys(it for it in named if inspect.isclass(it) and Protocol not in it.__bases__):
        if found.__module__.startswith("rlcore."):
            yield f"### `{found.__name__}`"
            yield f"```python\n{outline(found)}\n```"
    yield f"### `dispatch`\n\n```python\n{outline(dispatch)}\n```"


def outline(found: Any) -> str:
    """Return the source of a class or function without bodies and private members."""
    source = textwrap.dedent(inspect.getsource(found))
    lines, left_out = source.splitlines(), set[int]()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        documented = ast.get_docstring(node) is not None
        start = node.decorator_list[0].lineno if node.decorator_list else node.lineno
        private = node.name.startswith("_") and not node.name.endswith("__")
        if private or (node.name.startswith("__") and node.name != "__init__" and not documented):
            left_out |= {*range(start, (node.end_lineno or 0) + 1)}
        elif documented:
            left_out |= {*range((node.body[0].end_lineno or 0) + 1, (node.end_lineno or 0) + 1)}
        else:
            left_out |= {*range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
            lines[node.body[0].lineno - 2] += " ..."
    kept = "\n".join(line for number, line in enumerate(lines, 1) if number not in left_out)
    return re.sub(r"\n{3,}", "\n\n", kept).rstrip()


def optional_members() -> Iterator[str]:
    """Yield the source of each Protocol of optional members, under the kinds that support it."""
    for protocol in dict.fromkeys(it for members in optional.OPTIONAL.values() for it in members):
        kinds = [kind for kind, members in optional.OPTIONAL.items() if protocol in members]
        yield f"### {', '.join(kinds)}: `{protocol.__name__}`"
        yield f"```python\n{inspect.getsource(protocol).removeprefix('@runtime_checkable').strip()}\n```"


def surface_rows() -> Iterator[tuple[str, str, str]]:
    """Yield each module with its stable and provisional names."""
    for module in sorted({*surface.STABLE, *surface.PROVISIONAL}):
        yield module, surface.STABLE.get(module, ""), surface.PROVISIONAL.get(module, "")


def columns() -> Iterator[tuple[str, ...]]:
    for column in STANDARD_COLUMNS:
        yield column.name, column.level, column.dtype, column.meaning, column.written_by


def hooks() -> Iterator[tuple[str, str]]:
    for name, function in vars(specs).items():
        if name.startswith("rlcore_"):
            yield f"{name}({', '.join(inspect.signature(function).parameters)})", clean(function.__doc__)


def settings() -> Iterator[tuple[str, str, str]]:
    """Yield every setting of the core, then those of the built-in plugins."""
    yield from leaves(Config, "")
    for section, places in CHOSEN.items():
        for place in places:
            module, _, name = place.partition(":")
            owner = name.removesuffix("Config").lower()
            key = f"trackers=[{{name: {owner}}}]" if section == "trackers" else section
            for setting, default, words in leaves(getattr(importlib.import_module(module), name), key):
                yield setting, default, f"({owner}) {words}"


def leaves(cls: Any, key: str, instance: Any = None) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, default, description) of a dataclass and its sections; `instance` overrides defaults."""
    words, types = field_docs(cls), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = f"{key}.{field.name}" if key else field.name
        default = default_of(field) if instance is None else getattr(instance, field.name)
        if dataclasses.is_dataclass(types[field.name]) and types[field.name] is not Choice:
            own = None if default is dataclasses.MISSING else default
            yield from leaves(types[field.name], name, own)
        elif isinstance(default, dict) and default and dataclasses.is_dataclass(next(iter(default.values()))):
            value = next(iter(default.values()))
            yield from leaves(type(value), f"{name}.NAME", value)
        else:
            yield name, shown(default), words.get(field.name, "")


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


def shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    plain = to_plain(default)
    if isinstance(plain, dict) and set(plain) == {"name"}:
        plain = plain["name"]
    return f"`{plain}`" if plain != "" else "empty"


def field_docs(cls: Any) -> dict[str, str]:
    """Return the docstring of each field, including fields of base classes."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef), base
        for field, after in zip(node.body, node.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                found[field.target.id] = clean(ast.literal_eval(after.value))
    return found


def error_tree() -> Iterator[str]:
    """Yield every class of rlcore.errors and rlcore.registry.errors below its first base class."""
    classes = [
        value
        for module in (errors, plugin_errors)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, errors.RlcoreError) and value.__module__ == module.__name__
    ]

    def below(cls: type, depth: int) -> Iterator[str]:
        others = [base.__name__ for base in cls.__bases__[1:]]
        also = f" (also {', '.join(others)})" if others else ""
        yield f"{'  ' * depth}- `{cls.__module__}.{cls.__name__}`{also}: {' '.join(clean(cls.__doc__).split())}"
        for child in classes:
            if child.__bases__[0] is cls:
                yield from below(child, depth + 1)

    yield from below(errors.RlcoreError, 0)


def clean(text: str | None) -> str:
    return inspect.cleandoc(text or "")


if __name__ == "__main__":
    for target, text in ((TARGET, reference()), (CONTRACTS, contracts())):
        target.write_text(text, encoding="utf-8")
        print(f"wrote {target}")
