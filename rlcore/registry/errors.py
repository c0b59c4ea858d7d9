"""Errors of plugins that cannot be used: one class per kind of problem, one text per cause.

    PluginError (rlcore.errors, a LookupError)
      PluginNotFound            unknown name; known but not installed; hidden
      DuplicatePlugin           two packages provide the name
      IncompatiblePlugin        written for another rlcore, or another version on a worker  (RuntimeError)
      PluginImportError         the plugin or a dependency cannot be imported               (ImportError)
      PluginProtocolError       the plugin lacks methods or parameters                      (TypeError)

The first line states the problem with the requested name; the following lines state what to type.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlcore.errors import PluginError, did_you_mean, nearest
from rlcore.registry.catalog import DISABLE, IGNORE_VERSIONS, Entry, PluginSpec, names, words_of
from rlcore.registry.guard import TIMEOUT
from rlcore.registry.known import known_names


class PluginNotFound(PluginError):
    """No installed and visible plugin has this name."""


class DuplicatePlugin(PluginError):
    """Several installed packages provide this name."""


class IncompatiblePlugin(PluginError, RuntimeError):
    """Plugin and core, or controller and worker, have incompatible versions."""


class PluginImportError(PluginError, ImportError):
    """The plugin cannot be imported."""


class PluginProtocolError(PluginError, TypeError):
    """The plugin does not meet the protocol of its kind."""


_OPTIONS = {
    "command": "rlcore {}",
    "dataset": "data.dataset={}",
    "dispatch": "@dispatch('{}')",
    "hooks": "plugins.hooks=[{}]",
    "reward": "reward={}",
    "tracker": "trackers=[{}]",
    "transfer": "transfer={}",
    "worker": "RoleSpec(worker='{}')",
}
"""Kind -> how to choose a plugin, if not with kind.name=..."""


def option(kind: str, value: str) -> str:
    """Return what to type to choose a plugin."""
    return _OPTIONS.get(kind, f"{kind}.name={{}}").format(value)


def not_found(kind: str, name: str, installed: Sequence[str]) -> PluginNotFound:
    """Return the error for an unknown name: a typo (A), a package that is not installed (B), both (C), or neither (D)."""
    known = known_names(kind)
    if name in known:
        return PluginNotFound(
            f"{kind} '{name}' is not installed. It comes from the package {known[name]}:\n    pip install {known[name]}"
        )
    listing = f"Installed {kind} plugins: {', '.join(sorted(set(installed))) or 'none'}."
    match = nearest(name, [*installed, *known])
    if match in known and match not in installed:
        return PluginNotFound(
            f"no {kind} named '{name}'. Did you mean '{match}'? It comes from the package {known[match]}:\n"
            f"    pip install {known[match]}"
        )
    if match:
        return PluginNotFound(f"no {kind} named '{name}'.{did_you_mean(name, list(installed))}\n{listing}")
    own = option(kind, f"my_package.my_module:My{kind.capitalize()}")
    return PluginNotFound(f"no {kind} named '{name}'.\n{listing}  For your own class use  {own}")


def missing_dependency(entry: PluginSpec, module: str, extra: str | None) -> PluginImportError:
    """Return the error for a plugin whose dependency is not installed (E)."""
    if extra:
        advice = f"{entry.package} {entry.version} lists it as an extra:\n    pip install '{entry.package}[{extra}]'"
    else:
        advice = f"Install it; the package often has the same name:\n    pip install {module}"
    return PluginImportError(
        f"{entry.kind} '{entry.name}' needs the Python package '{module}', which is not installed. {advice}"
    )


def beside(entry: PluginSpec, module: str, folder: str) -> PluginImportError:
    """Return the error for a file that imports another one from its folder, which is not on the path.

    Advice to install the module with pip would install an unrelated package.
    """
    return PluginImportError(
        f"{entry.kind} '{entry.target}' imports '{module}' from its own folder, but {folder} is not on the path.\n"
        f"    export PYTHONPATH={folder}"
    )


def incompatible(entry: Entry, core_version: str) -> IncompatiblePlugin:
    """Return the error for a plugin that was written for another version of rlcore (F)."""
    return IncompatiblePlugin(
        f"{entry.package} {entry.version} was written for rlcore{entry.requires}, and rlcore {core_version} is installed.\n"
        + _aligned(
            (f"pip install -U {entry.package}", "another version of the plugin"),
            (f"pip install 'rlcore{entry.requires}'", "another version of the core"),
        )
        + f"\nTo try it anyway:  export {IGNORE_VERSIONS}={entry.package}"
    )


def duplicate(kind: str, name: str, entries: Sequence[Entry]) -> DuplicatePlugin:
    """Return the error for a name that several packages provide (G); their order must not decide."""
    width = max(len(f"{entry.package} {entry.version}") for entry in entries)
    lines = "\n".join(f"    {f'{entry.package} {entry.version}':<{width}}  ({entry.target})" for entry in entries)
    choices = "  or  ".join(option(kind, f"{name}@{entry.package}") for entry in entries)
    last = [entry.package for entry in entries if entry.package != "rlcore"][-1]  # hiding the core would hide too much
    return DuplicatePlugin(
        f"{kind} '{name}' is provided by {len(entries)} installed packages:\n{lines}\n"
        f"Choose one:  {choices}      or hide one:  export {DISABLE}={last}"
    )


def import_failed(entry: PluginSpec, error: BaseException) -> PluginImportError:
    """Return the error for a plugin whose import raised (H)."""
    what = f"failed to import: {type(error).__name__}: {error}"
    if entry.package:
        return PluginImportError(
            f"{entry.kind} '{entry.name}' ({entry.package} {entry.version}) {what}\n"
            f"Other plugins are unaffected. To see the whole traceback:  rlcore doctor {entry.package}"
        )
    command = _python(entry.target.rpartition(":")[0])
    return PluginImportError(f"{entry.kind} '{entry.target}' {what}\nTo see the whole traceback:  {command}")


def ended_at_import(entry: PluginSpec) -> str:
    """Return the text to print if the process ends during an import, when nothing can be raised."""
    place = entry.target.rpartition(":")[0] or entry.target
    plugin, why = f"'{entry.target}'", _python(place, "-X faulthandler ")
    if entry.package:
        plugin = f"'{entry.name}' ({entry.package} {entry.version})"
        why = f"rlcore doctor {entry.package}      or remove it:  pip uninstall {entry.package}"
    return (
        f"error: this process ended while {entry.kind} {plugin} was being imported\n"
        f"To see why:  {why}\n"
        f"If it only needs more time:  export {TIMEOUT}=3600"
    )


def _python(place: str, options: str = "") -> str:
    return f"python {options}{place}" if place.endswith(".py") else f"python {options}-c 'import {place}'"


def no_such_target(entry: PluginSpec, missing: str) -> PluginImportError:
    """Return the error for an entry point that names something missing from its package (I)."""
    return PluginImportError(
        f"{entry.package} {entry.version} registers {entry.kind} '{entry.name}' as {entry.target}, but there is no {missing}.\n"
        f"That is a packaging mistake in {entry.package}, not in your config. A newer version may fix this:\n"
        f"    pip install -U {entry.package}"
    )


def protocol(entry: PluginSpec, protocol_name: str, misses: Sequence[str]) -> PluginProtocolError:
    """Return the error for a plugin that does not meet its protocol (J), with all that it lacks."""
    origin = f" ({entry.package} {entry.version})" if entry.package else ""
    return PluginProtocolError(
        f"{entry.kind} '{entry.name}'{origin} does not meet the {protocol_name} protocol: {'; '.join(misses)}.\n"
        f"The protocol, method by method:  python -m pydoc rlcore.protocols.{entry.kind}"
    )


def other_version(package: str, here: str, driver: str, rank: int, host: str) -> IncompatiblePlugin:
    """Return the error for different versions on controller and worker (K)."""
    return IncompatiblePlugin(
        f"rank {rank} on {host} has {package} {here}; the driver has {driver}. Install one set everywhere:\n"
        + _aligned(
            ("rlcore list-plugins --freeze > plugins.txt", "on the driver"),
            ("pip install -r plugins.txt", f"on {host}"),
        )
    )


def hidden(entry: Entry, word: str) -> PluginNotFound:
    """Return the error for a plugin that an environment variable hides (L)."""
    rest = ",".join(other for other in words_of(DISABLE) if not names(other, entry))
    return PluginNotFound(
        f"{entry.kind} '{entry.name}' is installed ({entry.package} {entry.version}) but hidden by {DISABLE}={word}.\n"
        f"To use it:  {f'export {DISABLE}={rest}' if rest else f'unset {DISABLE}'}"
    )


def _aligned(*lines: tuple[str, str]) -> str:
    """Align commands with a shell comment each."""
    width = max(len(command) for command, _ in lines)
    return "\n".join(f"    {command:<{width}}  # {remark}" for command, remark in lines)
