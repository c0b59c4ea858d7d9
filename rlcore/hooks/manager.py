"""`Hooks`: the only user of pluggy, with a typed method for each hook."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from rlcore.errors import ConfigError, UserError, did_you_mean
from rlcore.hooks import specs
from rlcore.registry import resolve

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.data.batch import Batch
    from rlcore.hooks.specs import RunView
    from rlcore.types import CallTime

logger = logging.getLogger(__name__)


class Hooks:
    """The hooks of the plugins named in the config, called in the order of the plugins' names."""

    def __init__(self, plugins: Sequence[str | object] = (), on_error: Literal["raise", "warn"] = "raise") -> None:
        """Resolve and register the plugins.

        Raises:
            PluginError: a plugin cannot be resolved.
            ConfigError: a plugin has no hook, an unknown or unmarked function `rlcore_...`, or an unknown argument.
        """
        self._on_error = on_error
        self._manager = pluggy.PluginManager("rlcore")
        self._manager.add_hookspecs(specs)
        for label, plugin in sorted(_labeled(plugins), key=lambda pair: pair[0], reverse=True):
            self._register(label, plugin)  # pluggy calls the last one first

    def configure(self, *, config: Config) -> None:
        self._call("rlcore_configure", config=config)

    def worker_env(self, *, config: Config, role: str, rank: int) -> dict[str, str]:
        results = self._call("rlcore_worker_env", config=config, role=role, rank=rank)
        return _merged("rlcore_worker_env", results, same_is_fine=True)

    def run_start(self, *, run: RunView) -> None:
        self._call("rlcore_run_start", run=run)

    def step_start(self, *, run: RunView, step: int) -> None:
        self._call("rlcore_step_start", run=run, step=step)

    def samples_scored(self, *, run: RunView, step: int, samples: Batch) -> None:
        self._call("rlcore_samples_scored", run=run, step=step, samples=samples)

    def evaluated(self, *, run: RunView, step: int, samples: Batch, calls: Sequence[CallTime]) -> None:
        self._call("rlcore_evaluated", run=run, step=step, samples=samples, calls=calls)

    def step_end(
        self,
        *,
        run: RunView,
        step: int,
        metrics: Mapping[str, float],
        calls: Sequence[CallTime],
        experience: Batch,
    ) -> None:
        self._call("rlcore_step_end", run=run, step=step, metrics=metrics, calls=calls, experience=experience)

    def collect_metrics(self, *, run: RunView, step: int, core: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of all plugins; none may overwrite a metric of the core or of another plugin."""
        hook = "rlcore_collect_metrics"
        results = self._call(hook, run=run, step=step)
        merged: dict[str, float] = _merged(hook, results, same_is_fine=False)
        for plugin, given in results:
            for name in given.keys() & core.keys():
                raise ConfigError(
                    f"{hook} of {plugin}: '{name}' ({given[name]:g}) is a metric of rlcore itself ({core[name]:g})\n"
                    f"Rename it in {plugin}, or remove {plugin} from plugins.hooks."
                )
        return merged

    def weights_synced(self, *, run: RunView, version: int, seconds: float) -> None:
        self._call("rlcore_weights_synced", run=run, version=version, seconds=seconds)

    def checkpoint_saved(self, *, run: RunView, step: int, path: Path, calls: Sequence[CallTime]) -> None:
        self._call("rlcore_checkpoint_saved", run=run, step=step, path=path, calls=calls)

    def run_end(self, *, run: RunView, error: BaseException | None) -> None:
        """Call every plugin, even after a failure; a failure never hides the error that ended the run."""
        failures: list[Exception] = []
        self._call("rlcore_run_end", failures, run=run, error=error)
        if failures and error is None:
            raise failures[0]

    def health_checks(self) -> list[specs.Check]:
        return [check for _, checks in self._call("rlcore_health_checks") for check in checks]

    def _call(self, hook: str, failures: list[Exception] | None = None, **arguments: Any) -> list[tuple[str, Any]]:
        """Return (plugin, result) for each plugin with the hook whose result is not None.

        An exception is raised with a note naming the plugin; with `failures`, it is appended there and the other
        plugins are still called.
        """
        results = []
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            name = implementation.plugin_name
            try:
                result = implementation.function(*(arguments[argument] for argument in implementation.argnames))
            except Exception as error:
                error.add_note(f"in hook {hook} of {name}")
                if isinstance(error, UserError):  # only its message is shown
                    error.args = (f"{hook} of {name}: {error}",)
                if self._on_error == "raise":
                    if failures is None:
                        raise
                    failures.append(error)
                logger.warning(
                    "hook %s of %s failed; the others are still called:\n%s", hook, name, traceback.format_exc()
                )
                continue
            if result is not None:
                results.append((name, result))
        return results

    def _register(self, label: str, plugin: object) -> None:
        found = resolve("hooks", plugin).object if isinstance(plugin, str) else plugin
        found = found() if inspect.isclass(found) else found
        _refuse_misspelled(label, found)
        try:
            self._manager.register(found, name=label)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise ConfigError(f"hook plugin '{label}': {error}\nHooks: {', '.join(_KNOWN)}.") from error
        implemented = self._manager.get_hookcallers(found) or []
        if not implemented:
            raise ConfigError(
                f"hook plugin '{label}' has no hook, so it would have no effect.\n"
                f"Mark its functions with @rlcore.hookimpl; hooks: {', '.join(_KNOWN)}."
            )
        for caller in implemented:
            if any(it.plugin is found and (it.wrapper or it.hookwrapper) for it in caller.get_hookimpls()):
                raise ConfigError(
                    f"hook plugin '{label}' defines '{caller.name}' as a wrapper, but hooks only observe.\n"
                    f"Remove wrapper=True."
                )


_KNOWN = [name for name in vars(specs) if name.startswith("rlcore_")]


def _refuse_misspelled(label: str, plugin: object) -> None:
    """Refuse functions with the prefix of a hook that are unknown or unmarked, which pluggy would ignore."""
    for name in dir(plugin):
        function = getattr(plugin, name) if name.startswith("rlcore_") else None
        if not inspect.isroutine(function):
            continue
        marked = hasattr(function, "rlcore_impl")
        if name not in _KNOWN and not getattr(function, "rlcore_impl", {}).get("specname"):
            raise ConfigError(
                f"hook plugin '{label}' has '{name}', which is not a hook.{did_you_mean(name, _KNOWN)}\n"
                f"Hooks: {', '.join(_KNOWN)}."
            )
        if not marked:
            raise ConfigError(
                f"hook plugin '{label}' defines '{name}' without @rlcore.hookimpl.\nWrite @rlcore.hookimpl above it."
            )


def _labeled(plugins: Sequence[str | object]) -> list[tuple[str, str | object]]:
    """Return each plugin with its name in messages; a second object of a class is called Observer-2."""
    labeled: dict[str, str | object] = {}
    for plugin in plugins:
        if isinstance(plugin, str):
            labeled[plugin] = plugin
            continue
        name = getattr(plugin, "__name__", type(plugin).__name__)
        taken = sum(other == name or other.startswith(f"{name}-") for other in labeled)
        labeled[f"{name}-{taken + 1}" if taken else name] = plugin
    return list(labeled.items())


def _merged(hook: str, results: Sequence[tuple[str, Any]], *, same_is_fine: bool) -> dict[str, Any]:
    """Merge the mappings that plugins returned; two plugins may agree on a value only if `same_is_fine`."""
    merged: dict[str, Any] = {}
    giver: dict[str, str] = {}
    for plugin, result in results:
        if not isinstance(result, Mapping):
            raise ConfigError(f"{hook} of {plugin} returned {result!r}, which is not a mapping\nReturn a dict or None.")
        for name, value in result.items():
            if name in merged and not (same_is_fine and merged[name] == value):
                raise ConfigError(
                    f"{hook}: '{name}' comes from two plugins, {giver[name]} ({merged[name]!r}) and {plugin} ({value!r})\n"
                    f"Remove one from plugins.hooks."
                )
            merged[name], giver[name] = value, plugin
    return merged
