"""The structure of rlcore: permitted imports, modules that commands load, and lines of code."""

import ast
import graphlib
import importlib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import rlcore
from rlcore.testing.waiting import HANG_S

ROOT = Path(rlcore.__file__).parent
REPOSITORY = Path(__file__).parents[1]
PLUGINS = REPOSITORY / "plugins"

MAY_IMPORT = {
    "errors": "",
    "types": "",
    "version": "",
    "protocols": "types errors",
    "data": "types protocols errors",
    "registry": "protocols version errors",
    "hooks": "registry errors",
    "controller": "types protocols data registry errors",
    "config": "protocols data registry controller errors types",
    "models": "errors",
    "rewards": "types protocols registry errors",
    "workers": "types protocols data registry controller models rewards errors",
    "kits": "types protocols data registry models errors",
    # the built-in plugins: no part of the core names them but through the registry
    "algorithms": "types protocols data workers errors",
    "backends": "types protocols data models kits errors",
    "rollouts": "types protocols models kits errors",
    "trackers": "protocols errors",
    "trainer": "types protocols data registry hooks controller config models rewards workers errors",
    "quickstart": "errors",
    "surface": "",
    "api": "types protocols data registry hooks controller config models trainer quickstart errors",
    "cli": "api types protocols data registry hooks controller config models rewards workers trainer quickstart version errors",
    "testing": "types protocols data registry hooks controller models rewards workers kits quickstart errors",
}
"""Package -> packages of rlcore that it may import when it runs; imports for type checkers are free.

`rlcore` itself and `__main__` are not listed."""


def budgets():
    """Return package -> most lines of code, from the table in docs/design.md."""
    table = (REPOSITORY / "docs" / "design.md").read_text().partition("## Budgets")[2]
    return {
        name: int(lines.replace(",", "")) for name, lines in re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \|", table, re.M)
    }


BUDGETS = budgets()

LONG_FILES = {"data/batch.py": 480}
"""Files that may be long, because each has a single topic."""


def sources():
    return sorted(ROOT.rglob("*.py"))


def imports(tree):
    """Return the modules that a file imports when it runs, at any depth, without those under `if TYPE_CHECKING`."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found += imports(ast.Module(node.orelse, []))
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [f"rlcore.{alias.name}" for alias in node.names] if node.module == "rlcore" else [node.module]
        found += imports(node)
    return found


def package(module):
    """rlcore.data.batch -> data; a name of rlcore/__init__.py -> ''."""
    name = module.split(".")[1] if "." in module else ""
    return name if (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists() else ""


def _imported_names(tree):
    """Return the dotted names that a file imports, including those for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_graph(root):
    """Return module -> modules of the same package that it imports, including those for type checkers only."""
    trees = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    graph = {}
    for module, tree in trees.items():
        names = {name if name in trees else name.rpartition(".")[0] for name in _imported_names(tree)}
        graph[module] = (names & trees.keys()) - {module}
    return graph


def import_cycle(root):
    """Return the modules of an import cycle, with the first one repeated at the end, or an empty list."""
    try:
        graphlib.TopologicalSorter(module_graph(root)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_the_reader_of_imports_sees_them_all():
    source = (
        "import a\nfrom b.c import d\nif TYPE_CHECKING:\n    import no\nelse:\n    import e\n"
        "def f():\n    try:\n        from rlcore import hooks\n    except ImportError:\n        import g\n"
    )

    assert imports(ast.parse(source)) == ["a", "b.c", "e", "rlcore.hooks", "g"]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    module = path.relative_to(ROOT).with_suffix("").parts[0]
    used = {package(name) for name in imports(ast.parse(path.read_text())) if name.split(".")[0] == "rlcore"}
    if module in ("__init__", "__main__"):
        assert used <= {"cli", "version"}
        return

    assert module in MAY_IMPORT, f"{module} is new: give it a line in MAY_IMPORT"
    assert used - {module, ""} <= set(MAY_IMPORT[module].split())


@pytest.mark.parametrize("root", [ROOT, *sorted(ROOT.parent.glob("plugins/*/src/*/"))], ids=lambda path: path.name)
def test_modules_do_not_import_each_other(root):
    assert " -> ".join(import_cycle(root)) == "", "move what both need to a third module; type-only imports count"


@pytest.mark.parametrize(
    ("back", "found"),
    [
        ("", set()),
        ("from pkg import a", {"pkg.a", "pkg.b"}),
        ("if TYPE_CHECKING:\n    from pkg.a import Name", {"pkg.a", "pkg.b"}),
    ],
    ids=["one way", "module", "type checkers only"],
)
def test_an_import_cycle_is_found(tmp_path, back, found):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from pkg.b import thing\n")
    (package / "b.py").write_text(back)

    assert set(import_cycle(package)) == found


def test_the_table_of_imports_has_no_circle():
    order = list(graphlib.TopologicalSorter({name: names.split() for name, names in MAY_IMPORT.items()}).static_order())

    line = ["types", "protocols", "data", "registry", "controller", "workers", "trainer", "cli"]
    assert sorted(line, key=order.index) == line


def test_the_table_names_only_what_exists():
    assert [name for name in MAY_IMPORT if not package(f"rlcore.{name}")] == []


def test_core_imports_no_plugin():
    names = {name.split(".")[0] for path in sources() for name in imports(ast.parse(path.read_text()))}

    assert sorted(name for name in names if name.startswith("rlcore_")) == []
    assert not names & {"vllm", "sglang", "megatron", "verl", "trl"}


# Third-party modules that a light command may load: readers of package metadata, in pure Python.
LIGHT = {"importlib_metadata", "lazy_importer", "packaging", "zipp", "pluggy"}

LOADED = """
import sys
before = set(sys.modules)
try:
    {statement}
except SystemExit:
    pass
print("\\nloaded", *sorted(set(sys.modules) - before))
"""


def loaded(statement):
    """Return the modules outside the standard library that a statement loads in a new interpreter."""
    program = LOADED.format(statement=statement)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, cwd=ROOT.parent, check=True
    )
    names = done.stdout.rpartition("\nloaded")[2].split()
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["list-plugins"], ["list-plugins", "--json", "--all"], ["train", "--help"], ["trian"]],
    ids=" ".join,
)
def test_light_commands_load_neither_torch_nor_a_plugin(arguments):
    modules = loaded(f"from rlcore.cli import main; main({arguments})")

    assert {name.split(".")[0] for name in modules} <= LIGHT | {"rlcore"}
    own = {package(name) for name in modules if name.startswith("rlcore.")}
    assert own <= {"cli", "errors", "registry", "version"}


@pytest.mark.parametrize("command", ["config", "train"])
def test_a_wrong_setting_is_reported_before_torch_is_loaded(command):
    modules = loaded(f"from rlcore.cli import main; main(['{command}', 'preset=quickstart', 'optimizer.lr=fast'])")

    assert {"rlcore.config.compose", "hydra"} <= modules
    assert "torch" not in modules


@pytest.mark.parametrize("module", ["rlcore", "rlcore.errors", "rlcore.types", "rlcore.registry", "rlcore.hooks"])
def test_what_a_plugin_author_imports_first_is_light(module):
    assert {name.split(".")[0] for name in loaded(f"import {module}")} <= LIGHT | {"rlcore"}


def test_the_local_runtime_and_a_plan_load_no_ray():
    modules = loaded("import rlcore.trainer.plan, rlcore.trainer.launch, rlcore.trainer.loop, rlcore.rollouts.hf")

    assert "torch" in modules
    assert "ray" not in modules


def test_every_public_name_arrives():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {(node.module, alias.name) for node in block.body for alias in node.names}

    assert typed == {(home, name) for name, home in rlcore._HOMES.items()}
    for home, name in sorted(typed):
        assert getattr(rlcore, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Batsh'"):
        rlcore.Batsh  # noqa: B018


_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(source):
    """Return the number of lines with code, without blank lines, comments and docstrings."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_lines_of_code_are_counted_without_words():
    assert lines_of_code('"""Words.\n\nMore."""\n\nx = [\n    1,\n]  # one\n# two\n\ndef f():\n    """Words."""\n') == 4


def size_of(folder):
    return sum(lines_of_code(path.read_text()) for path in sorted(folder.rglob("*.py")))


@pytest.mark.parametrize("package", BUDGETS)
def test_package_is_within_its_budget(package):
    folder = PLUGINS / package / "src" if package.startswith("rlcore-") else ROOT / package
    size = size_of(folder) if folder.is_dir() else lines_of_code((ROOT / f"{package}.py").read_text())

    assert BUDGETS[package] * 0.5 < size <= BUDGETS[package], "a larger package is a decision: argue for it"


def test_every_package_has_a_budget():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    folders |= {path.name for path in PLUGINS.glob("rlcore-*")}

    assert folders <= BUDGETS.keys()


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_long(path):
    name = str(path.relative_to(ROOT))

    assert len(path.read_text().splitlines()) <= LONG_FILES.get(name, 400)


def test_the_way_of_a_prompt_is_as_short_as_the_readme_says():
    section = (ROOT.parent / "README.md").read_text().partition("## Read it")[2].partition("Further reading")[0]
    files = [ROOT.parent / path for path in re.findall(r"\]\((rlcore/[^)]+)\)", section)]

    assert len(files) == 5
    assert sum(len(file.read_text().splitlines()) for file in files) <= 1200
