"""Resolve a name to an object on the controller (`resolve`), or from plain data on a worker (`load`).

Only the requested plugin is imported. A worker never searches for plugins: it gets a `PluginSpec`, imports its target
and compares versions, so that every rank runs the controller's choice.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rlcore import version
from rlcore.errors import PluginError, did_you_mean, did_you_mean_path
from rlcore.registry import errors
from rlcore.registry.catalog import MODULE_KINDS, Catalog, Entry, PluginSpec, catalog, is_compatible, normalize
from rlcore.registry.guard import import_guard
from rlcore.registry.protocol_check import misses
from rlcore.registry.versions import installed_version

PYTHON = "python:"
"""Prefix of the names of Python objects in settings: only the program that has them can use them."""


@dataclass(frozen=True, slots=True)
class Resolved(PluginSpec):
    """An imported plugin."""

    object: Any
    """The class or function itself."""

    @property
    def spec(self) -> PluginSpec:
        """Data with which a worker imports the same object."""
        return PluginSpec(self.kind, self.name, self.package, self.version, self.target)


def resolve(kind: str, ref: str | object, *, catalog: Catalog | None = None) -> Resolved:
    """Import a plugin.

    Args:
        ref: `name`, `name@package`, `module:attribute`, `path/file.py:attribute`, or a class or function.

    Raises:
        PluginError: with what to type; see rlcore.registry.errors.
    """
    if not isinstance(ref, str):
        return _own(kind, ref)
    entry = _project_code(kind, ref) if ":" in ref else _entry(kind, ref, catalog or _default_catalog())
    return _checked(entry, _import(entry))


def load(spec: PluginSpec, *, rank: int = 0, host: str = "") -> Any:
    """Import the plugin chosen by the controller, without a search.

    Raises:
        IncompatiblePlugin: this process has another version of the package.
        PluginImportError: it cannot be imported here.
    """
    if spec.package:
        here = installed_version(spec.package)
        if here != spec.version:
            raise errors.other_version(spec.package, here or "nothing", spec.version, rank, host or "this host")
    return _import(spec)


def _default_catalog() -> Catalog:
    return catalog()


def _entry(kind: str, ref: str, plugins: Catalog) -> Entry:
    """Return the only entry with this name."""
    name, _, package = ref.partition("@")
    found = plugins.find(kind, name)
    if package:
        matching = [entry for entry in found if entry.package == normalize(package)]
        if found and not matching:
            providers = "  or  ".join(errors.option(kind, f"{name}@{entry.package}") for entry in found)
            raise errors.PluginNotFound(f"no package '{package}' provides {kind} '{name}'.\nType  {providers}")
        found = matching
    visible = [entry for entry in found if plugins.hidden(entry) is None]
    if found and not visible:
        raise errors.hidden(found[0], plugins.hidden(found[0]) or "")
    if not visible:
        raise errors.not_found(kind, name, [e.name for e in plugins.of(kind) if plugins.hidden(e) is None])
    if len(visible) > 1:
        raise errors.duplicate(kind, name, visible)
    if visible[0].package != "rlcore" and not is_compatible(visible[0], version.__version__):
        raise errors.incompatible(visible[0], version.__version__)
    return visible[0]


def _project_code(kind: str, ref: str) -> PluginSpec:
    """Return the specification of project code, given by module or file."""
    place, _, attribute = ref.rpartition(":")
    if ref.startswith(PYTHON):
        raise errors.PluginNotFound(
            f"{kind} '{attribute}' was an object of a Python program, and it is not given now\n"
            f"Pass it to rlcore.train, evaluate or rollout, or choose one by name:  {errors.option(kind, 'file.py:NAME')}"
        )
    if place.endswith(".py"):
        path = Path(place).expanduser().absolute()
        if not path.is_file():
            siblings = path.parent.glob("*.py")
            raise errors.PluginNotFound(
                f"{kind} '{ref}': there is no file {path}.{did_you_mean_path(path, siblings)}\n"
                f"Write  {errors.option(kind, 'path/file.py:attribute')}"
            )
        place = str(path)
    return PluginSpec(kind, attribute, "", "", f"{place}:{attribute}")


def _own(kind: str, plugin: Any) -> Resolved:
    """Resolve a class or function given in Python."""
    return _checked(PluginSpec(kind, plugin.__name__, "", "", f"{plugin.__module__}:{plugin.__qualname__}"), plugin)


def _checked(entry: PluginSpec, plugin: Any) -> Resolved:
    """Check the plugin against the protocol of its kind and return it."""
    protocol_name, lacking = misses(entry.kind, plugin)
    if lacking:
        raise errors.protocol(entry, protocol_name, lacking)
    return Resolved(entry.kind, entry.name, entry.package, entry.version, entry.target, plugin)


def _import(entry: PluginSpec) -> Any:
    """Import an entry's target, with a separate error for each cause of failure."""
    target = re.sub(r"\s*\[.*\]\s*$", "", entry.target)
    place, colon, attribute = target.rpartition(":") if ":" in target else (target, "", "")
    if not colon and entry.kind not in MODULE_KINDS:
        raise errors.no_such_target(entry, "':' with a name after the module")
    try:
        module = _import_place(entry, place)
        plugin = _attribute(module, attribute) if colon else module
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not missing:
            raise errors.import_failed(entry, error) from error
        if place.partition(".")[0] == missing.partition(".")[0]:
            raise _no_module(entry, missing) from error
        if place.endswith(".py") and _lies_beside(place, missing):
            raise errors.beside(entry, missing, str(Path(place).parent)) from error
        raise errors.missing_dependency(entry, missing.partition(".")[0], _extra_for(entry, missing)) from error
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise errors.import_failed(entry, error) from error
    if plugin is _ABSENT:
        raise _no_attribute(entry, module, attribute)
    return plugin


def _import_place(entry: PluginSpec, place: str) -> Any:
    """Import `package.module` or `/absolute/file.py`, once per process."""
    name = _Files.name_of(place) if place.endswith(".py") else place
    trusted = name in sys.modules or name.startswith("rlcore.")
    with nullcontext() if trusted else import_guard(errors.ended_at_import(entry)):
        return importlib.import_module(name)


_ABSENT = object()


def _attribute(module: Any, path: str) -> Any:
    """Return the object at a dotted path in a module, or _ABSENT."""
    found = module
    for part in path.split("."):
        found = getattr(found, part, _ABSENT)
    return found


_FILE = "rlcore_file:"


class _Files(MetaPathFinder):
    """Imports files as modules named by their path.

    Their classes pickle by reference and can be unpickled in a process that has not loaded the plugin yet."""

    @staticmethod
    def name_of(path: str) -> str:
        return _FILE + quote(path).replace(".", "%2E")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(_FILE):
            return None
        place = unquote(fullname.removeprefix(_FILE))
        spec = importlib.util.spec_from_file_location(fullname, place)
        if spec is None:
            raise ImportError(f"{place} is not a Python file")
        return spec


sys.meta_path.append(_Files())


def _lies_beside(place: str, module: str) -> bool:
    neighbor = Path(place).with_name(module.partition(".")[0])
    return neighbor.is_dir() or neighbor.with_suffix(".py").is_file()


def _no_module(entry: PluginSpec, missing: str) -> PluginError:
    if entry.package:
        return errors.no_such_target(entry, f"module '{missing}'")
    return errors.PluginNotFound(
        f"{entry.kind} '{entry.target}': there is no module '{missing}' on the path.\n"
        f"Write a file instead:  {errors.option(entry.kind, 'path/file.py:attribute')}"
    )


def _no_attribute(entry: PluginSpec, module: Any, attribute: str) -> PluginError:
    if entry.package:
        return errors.no_such_target(entry, f"'{attribute}' in it")
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    public = [name for name in names if inspect.getmodule(getattr(module, name)) is module]
    return errors.PluginNotFound(
        f"{entry.kind} '{entry.target}': no '{attribute}' in it.{did_you_mean(attribute, public)}\n"
        f"It defines: {', '.join(public) or 'nothing'}."
    )


def _extra_for(entry: PluginSpec, module: str) -> str | None:
    """Return the extra of the plugin's package that installs a module, by the name of the requirement."""
    if not entry.package:
        return None
    import importlib_metadata as metadata
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires(entry.package) or []]
    except (metadata.PackageNotFoundError, ValueError):
        return None
    wanted = normalize(module.partition(".")[0])
    for requirement in requirements:
        extra = re.search(r"""extra == ["'](.+?)["']""", str(requirement.marker or ""))
        if extra and normalize(requirement.name) == wanted:
            return extra[1]
    return None
