"""Choose the runtime of a run by its name in the config."""

from __future__ import annotations

from rlcore.controller.pool import RuntimeConfig
from rlcore.controller.runtime import LocalRuntime, Runtime
from rlcore.errors import ConfigError, did_you_mean


def make_runtime(config: RuntimeConfig) -> Runtime:
    """Create the runtime that the config names.

    Raises:
        ConfigError: there is no runtime of this name, or Ray is not installed.
    """
    if config.name == "local":
        return LocalRuntime(config)
    if config.name == "ray":
        try:
            from rlcore.controller.ray_runtime import RayRuntime
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ConfigError(
                "runtime=ray needs Ray, which is not installed\npip install ray   or  runtime=local"
            ) from error
        return RayRuntime(config)
    raise ConfigError(
        f"no runtime named '{config.name}'.{did_you_mean(config.name, ['ray', 'local'])}\n"
        "Type  runtime=ray  or  runtime=local"
    )
