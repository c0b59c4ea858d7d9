"""`rlcore new-plugin`: write a package of a few files with a working plugin as a starting point.

The files come from `templates/`, with names and version bounds filled in. Nothing is imported or installed.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

import rlcore
from rlcore.cli import make_parser
from rlcore.errors import ConfigError, did_you_mean
from rlcore.registry import catalog
from rlcore_workbench.check import KINDS as CHECKED

_EXAMPLES = """\
examples:
  rlcore new-plugin my-reward --kind reward
  rlcore new-plugin my-engine --kind rollout --dir ~/code
"""


_TRAIN = "rlcore train preset=quickstart "
KINDS = {
    "reward": ("A reward", _TRAIN + "reward=$name"),
    "algorithm": ("An algorithm", _TRAIN + "algorithm=$name"),
    "rollout": ("An inference engine", _TRAIN + "rollout=$name"),
    "backend": ("A training backend", _TRAIN + "backend=$name"),
    "dispatch": ("A dispatch mode", "# in your worker: @rlcore.dispatch('$name')"),
    "tracker": ("A tracker", _TRAIN + "trackers='[console,jsonl,$name]'"),
    "environment": ("An environment", "rlcore train environment=$name model.path=DIR data.train=prompts.jsonl"),
    "hooks": ("Hooks", _TRAIN + "plugins.hooks='[$name]'"),
    "dataset": ("A dataset", "rlcore train model.path=DIR data.dataset=$name data.train=1000 reward=exact_match"),
    "worker": ("A kind of worker", '# in the roles() of your algorithm: RoleSpec(name="counts", worker="$name")'),
    "transfer": ("A weight transfer", _TRAIN + "transfer=$name"),
    "command": ("A command", "rlcore $name outputs/RUN"),
    "config": ("A preset", "rlcore train preset=$name model.path=DIR data.train=train.jsonl reward=exact_match"),
}
"""Kind -> what it is, and a command that uses it, with $name for its name."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    description = "Write a package with a working plugin, its contract test and version bounds."
    parser = make_parser("new-plugin", description, _EXAMPLES)
    parser.add_argument("name", help="name of the package, such as my-reward; the plugin is then my_reward")
    parser.add_argument("--kind", required=True, help=", ".join(KINDS))
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="parent directory of the package; default: the current one"
    )
    options = parser.parse_args(list(argv))

    folder = write(options.name, options.kind, options.dir)
    name = module_name(options.name)
    use = Template(KINDS[options.kind][1]).substitute(name=name)
    print(f"{folder}: a working {options.kind}. Next:\n")
    print(f"    pip install -e {folder}\n    rlcore list-plugins --kind {options.kind}")
    if check := _check(options.kind, name):
        print(f"    {check}")
    print(f"    {use}")
    return 0


def write(package: str, kind: str, directory: Path) -> Path:
    """Write the package below `directory` and return its folder.

    Raises:
        ConfigError: the kind is unknown, or the name cannot be used.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"--kind {kind}: no template for this kind.{did_you_mean(kind, list(KINDS))}\n"
            f"Type  rlcore new-plugin {package} --kind KIND   with one of: {', '.join(KINDS)}"
        )
    name = _checked_name(package, kind)
    folder = directory / package
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not overwritten\nType another name, or  --dir DIR")
    values = _values(package, name, kind)
    test = "test_contract" if kind in CHECKED else f"test_{kind}"
    templates = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        ".gitignore": "gitignore",
        f"src/{name}/__init__.py": f"{kind}.py",
        f"tests/{test}.py": f"test_{kind}.py",
    }
    if kind == "config":
        templates[f"src/{name}/conf/preset/{name}.yaml"] = "preset.yaml"
    for path, template in templates.items():
        _write_file(folder / path, render(template, values))
    return folder


def _check(kind: str, name: str) -> str:
    """Return the command that runs the contract tests; "" for a kind without."""
    data = " --data 100" if kind == "dataset" else ""
    return f"rlcore check {kind} {name}{data}" if kind in CHECKED else ""


def render(template: str, values: dict[str, str]) -> str:
    """Return a file of `templates/` with its names filled in."""
    text = (files(__package__) / "templates" / f"{template}.template").read_text(encoding="utf-8")
    return Template(text).substitute(values)


def module_name(package: str) -> str:
    """Return the module of a package: my-reward -> my_reward."""
    return re.sub(r"[-.]+", "_", package)


def bounds(version: str) -> str:
    """Return the versions of rlcore that are compatible with this one: "0.1.3" -> ">=0.1,<0.2"."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{f'0.{minor + 1}' if major == 0 else major + 1}"


def _values(package: str, name: str, kind: str) -> dict[str, str]:
    what, use = KINDS[kind]
    class_name = "".join(part.capitalize() for part in name.split("_"))
    # A reward and a command are functions, and presets belong to a module.
    attribute = {"reward": name, "command": "main", "config": ""}.get(kind, class_name)
    check = _check(kind, name)
    return {
        "package": package,
        "name": name,
        "module": name,
        "class_name": class_name,
        "attribute": attribute,
        "target": f"{name}:{attribute}" if attribute else name,
        "kind": kind,
        "summary": f"{what} for rlcore",
        "check": f"{check}        # contract tests; needs rlcore-workbench\n" if check else "",
        "package_data": f'\n[tool.setuptools.package-data]\n{name} = ["conf/**/*.yaml"]\n' if kind == "config" else "",
        "use": Template(use).substitute(name=name),
        "needs": ', "rlcore-environments"' if kind == "environment" else "",
        "test_needs": ', "rlcore-workbench"' if kind == "hooks" else "",
        "bounds": bounds(rlcore.__version__),
    }


def _checked_name(package: str, kind: str) -> str:
    """Return the name of module and plugin; refuse names that pip, Python or the registry would reject."""
    name = module_name(package)
    advice = f"Type  rlcore new-plugin my-{kind} --kind {kind}"
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*", package) or keyword.iskeyword(name):
        raise ConfigError(
            f"'{package}' cannot be the name of a package and its module: use lowercase letters, digits and single"
            f" dashes, beginning with a letter\n{advice}"
        )
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(f"'{package}': a Python module '{name}' already exists, and yours would hide it\n{advice}")
    if taken := catalog().find(kind, name):
        provider = f"{taken[0].package} {taken[0].version}"
        raise ConfigError(f"'{package}': {provider} already provides the {kind} '{name}'\n{advice}")
    return name


def _write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}\nType  --dir DIR") from error
