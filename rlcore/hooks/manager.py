"""`Hooks`: the one place that calls pluggy; one typed method for each hook."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from rlcore.errors import ConfigError, did_you_mean
from rlcore.hooks import specs
from rlcore.registry import resolve

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.data.batch import Batch
    from rlcore.trainer.run import Run

logger = logging.getLogger(__name__)


class Hooks:
    """The hooks of the plugins that the config names, and no others; called in the order of their names."""

    def __init__(self, plugins: Sequence[str | object] = (), on_error: Literal["raise", "warn"] = "raise") -> None:
        """Resolve and register.

        Raises:
            PluginError: a plugin cannot be resolved.
            ConfigError: a plugin has a function `rlcore_...` that is no hook.
        """
        self._on_error = on_error
        self._manager = pluggy.PluginManager("rlcore")
        self._manager.add_hookspecs(specs)
        named = {_label(plugin): plugin for plugin in plugins}
        for label in sorted(named, reverse=True):  # pluggy calls the last registered first
            plugin = named[label]
            self._manager.register(resolve("hooks", plugin).object if isinstance(plugin, str) else plugin, name=label)
        self._refuse_misspelt()

    def configure(self, *, config: Config) -> None:
        self._call("rlcore_configure", config=config)

    def worker_env(self, *, config: Config, role: str, rank: int) -> dict[str, str]:
        return self._merge("rlcore_worker_env", same_is_fine=True, config=config, role=role, rank=rank)

    def run_start(self, *, run: Run) -> None:
        self._call("rlcore_run_start", run=run)

    def step_start(self, *, run: Run, step: int) -> None:
        self._call("rlcore_step_start", run=run, step=step)

    def samples_scored(self, *, run: Run, step: int, samples: Batch) -> None:
        self._call("rlcore_samples_scored", run=run, step=step, samples=samples)

    def step_end(self, *, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        self._call("rlcore_step_end", run=run, step=step, metrics=metrics)

    def collect_metrics(self, *, run: Run, step: int) -> dict[str, float]:
        return self._merge("rlcore_collect_metrics", same_is_fine=False, run=run, step=step)

    def weights_synced(self, *, run: Run, version: int, seconds: float) -> None:
        self._call("rlcore_weights_synced", run=run, version=version, seconds=seconds)

    def checkpoint_saved(self, *, run: Run, step: int, path: Path) -> None:
        self._call("rlcore_checkpoint_saved", run=run, step=step, path=path)

    def run_end(self, *, run: Run, error: BaseException | None) -> None:
        self._call("rlcore_run_end", run=run, error=error)

    def health_checks(self) -> list[specs.Check]:
        return [check for _, checks in self._call("rlcore_health_checks") for check in checks]

    def _call(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """(plugin, result) for each plugin that has the hook and returns something."""
        results = []
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            name = implementation.plugin_name
            try:
                result = implementation.function(*(arguments[argument] for argument in implementation.argnames))
            except Exception as error:
                error.add_note(f"in hook {hook} of {name}")
                if self._on_error == "raise":
                    raise
                logger.warning("hook %s of %s failed and is passed over:\n%s", hook, name, traceback.format_exc())
                continue
            if result is not None:
                results.append((name, result))
        return results

    def _merge(self, hook: str, *, same_is_fine: bool, **arguments: Any) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        giver: dict[str, str] = {}
        for plugin, result in self._call(hook, **arguments):
            for name, value in result.items():
                if name in merged and not (same_is_fine and merged[name] == value):
                    raise ConfigError(
                        f"{hook}: '{name}' comes from two plugins, {giver[name]} ({merged[name]!r}) and {plugin} ({value!r})\n"
                        f"Switch one off in plugins.hooks."
                    )
                merged[name], giver[name] = value, plugin
        return merged

    def _refuse_misspelt(self) -> None:
        known = [name for name in vars(specs) if name.startswith("rlcore_")]
        for label, plugin in self._manager.list_name_plugin():
            for name in dir(plugin):
                if name.startswith("rlcore_") and name not in known:
                    raise ConfigError(
                        f"hook plugin '{label}' has '{name}', which is no hook.{did_you_mean(name, known)}\n"
                        f"Hooks: {', '.join(known)}."
                    )
        self._manager.check_pending()


def _label(plugin: str | object) -> str:
    return plugin if isinstance(plugin, str) else getattr(plugin, "__name__", type(plugin).__name__)
