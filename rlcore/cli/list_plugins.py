"""`rlcore list-plugins`: list installed plugins from package metadata, without importing any, so none can break it."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from rlcore.cli import COMMANDS, make_parser
from rlcore.errors import ConfigError, did_you_mean
from rlcore.registry.catalog import KINDS, MODULE_KINDS, Catalog, Entry, catalog, is_compatible
from rlcore.registry.known import known_plugins
from rlcore.registry.versions import installed_version, requirements
from rlcore.version import __version__

_EXAMPLES = """\
examples:
  rlcore list-plugins --kind rollout
  rlcore list-plugins --all                        also known plugins that are not installed
  rlcore list-plugins --freeze > plugins.txt       the same set for every node: pip install -r plugins.txt
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Entry):
    """One line of the list and one object of --json; keys may be added but not removed."""

    status: str
    """ok, unbounded, duplicate, shadowed, incompatible, incomplete, disabled, broken or not installed."""
    detail: str


def main(argv: Sequence[str]) -> int:
    """Run the command and return exit code 0, even if plugins are broken."""
    description = "List plugins from package metadata, without importing them."
    parser = make_parser("list-plugins", description, _EXAMPLES)
    parser.add_argument("--kind", help=f"only one kind: {', '.join(KINDS)}")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.add_argument("--freeze", action="store_true", help="packages with versions, for pip install -r")
    parser.add_argument("--all", action="store_true", help="also known plugins that are not installed")
    options = parser.parse_args(list(argv))
    if options.kind and options.kind not in KINDS:
        raise ConfigError(
            f"no kind '{options.kind}'.{did_you_mean(options.kind, list(KINDS))}\nKinds: {', '.join(KINDS)}."
        )
    rows = [row for row in list_plugins(catalog(), absent=options.all) if options.kind in (None, row.kind)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif options.freeze:
        print("\n".join(sorted({f"{row.package}=={row.version}" for row in rows if row.version})))
    else:
        print(_table(rows))
    return 0


def list_plugins(plugins: Catalog, *, absent: bool) -> list[Row]:
    """Return every installed plugin with its status; with `absent`, also known ones that are not installed."""
    counts = Counter((entry.kind, entry.name) for entry in plugins.entries if plugins.hidden(entry) is None)
    rows = [_row(plugins, entry, counts[entry.kind, entry.name]) for entry in plugins.entries]
    if absent:
        installed = {(entry.kind, entry.name) for entry in plugins.entries}
        rows += [
            Row(kind, name, package, "", "", "", status="not installed", detail=f"pip install {package}")
            for kind, names in known_plugins().items()
            for name, package in names.items()
            if (kind, name) not in installed
        ]
    return sorted(rows, key=lambda row: (row.kind, row.name, row.package))


def _row(plugins: Catalog, entry: Entry, providers: int) -> Row:
    status, detail = _status(plugins, entry, providers)
    return Row(**asdict(entry), status=status, detail=detail)


def _status(plugins: Catalog, entry: Entry, providers: int) -> tuple[str, str]:
    word = plugins.hidden(entry)
    if word is not None:
        return "disabled", f"RLCORE_DISABLE_PLUGINS={word}"
    if entry.kind not in KINDS:
        return "broken", f"no kind '{entry.kind}'.{did_you_mean(entry.kind, list(KINDS))}"
    place, colon, attribute = entry.target.partition(":")
    if entry.kind not in MODULE_KINDS and not (place and colon and attribute):
        return "broken", f"'{entry.target}' is not module:attribute"
    if entry.kind == "command" and entry.name in COMMANDS:
        return "shadowed", f"rlcore {entry.name} is rlcore's own command; type  rlcore {entry.name}@{entry.package}"
    if providers > 1:
        same = [other for other in plugins.find(entry.kind, entry.name) if plugins.hidden(other) is None]
        others = ", ".join(f"{other.package} {other.version}" for other in same if other != entry)
        return "duplicate", f"also {others}; use {entry.name}@{entry.package}"
    if entry.package == "rlcore":
        return "ok", ""
    if not is_compatible(entry, __version__):
        return "incompatible", f"needs rlcore{entry.requires}"
    lacking = _lacking(entry.package)
    if lacking:
        return "incomplete", f"pip install {' '.join(shlex.quote(it) for it in lacking)}"
    return ("ok", "") if entry.requires else ("unbounded", "does not declare the rlcore versions that it needs")


@functools.cache
def _lacking(package: str) -> tuple[str, ...]:
    """Return the requirements of a package that are missing, regardless of versions, which the plugin checks itself.

    A requirement is present if a distribution or a module has its name: some libraries have several distributions.
    """
    try:
        wanted = requirements(package)
    except (ImportError, ValueError):  # not installed in this environment, or invalid, which `rlcore doctor` reports
        return ()
    return tuple(f"{it.name}{it.specifier}" for it in wanted if not _is_present(it.name))


def _is_present(library: str) -> bool:
    return bool(installed_version(library) or find_spec(re.sub(r"[-.]", "_", library)))


def _table(rows: Sequence[Row]) -> str:
    cells = [("KIND", "NAME", "PACKAGE", "VERSION", "STATUS")]
    for row in rows:
        status = f"{row.status}: {row.detail}" if row.detail else row.status
        cells.append((row.kind, row.name, row.package, row.version or "-", status))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = ["  ".join([*(f"{text:<{width}}" for text, width in zip(line, widths)), line[4]]) for line in cells]
    return "\n".join([*lines, "Plugins were not imported. To check that they load:  rlcore doctor --plugins"])
