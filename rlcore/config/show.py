"""Format a composed config as JSON, or as YAML with a comment on the origin of each section.

`rlcore config` prints it. Only the chosen plugins are imported, because they define their own settings. The YAML can
be used as a preset: `rlcore config … > run.yaml`, then `rlcore train preset=run.yaml`.
"""

from __future__ import annotations

import json
from typing import Any

from rlcore.config.build import build_plugin, to_plain
from rlcore.config.compose import PLUGIN_SECTIONS, REQUIRED, Composed
from rlcore.config.schema import Choice

_COMMENT_COLUMN = 40


def as_yaml(composed: Composed) -> str:
    """Format as YAML: sections in the order of the schema, each with its origin as a trailing comment."""
    from omegaconf import OmegaConf

    plain, providers = _with_plugins(composed)
    lines = []
    for section, value in plain.items():
        first, *rest = OmegaConf.to_yaml(OmegaConf.create({section: value})).splitlines()
        lines += [f"{first:<{_COMMENT_COLUMN}}  # {providers[section]}", *rest]
    return "\n".join(lines).replace(REQUIRED, "???") + "\n"


def as_json(composed: Composed) -> str:
    """Format as JSON: {"config": the sections, "providers": section -> origin, "overrides": as typed}."""
    plain, providers = _with_plugins(composed)
    content = {"config": plain, "providers": providers, "overrides": list(composed.overrides)}
    return json.dumps(content, indent=2, ensure_ascii=False).replace(REQUIRED, "???") + "\n"


def _with_plugins(composed: Composed) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config with all settings of the chosen plugins, checked, and the origin of each section."""
    plain, providers = dict(composed.plain), dict(composed.providers)
    for section in [it for it in PLUGIN_SECTIONS if getattr(composed.config, it).name]:
        plain[section], package = _filled(section, section, getattr(composed.config, section))
        providers[section] += f"; plugin of {package}"
    plain["trackers"] = [_filled("tracker", "trackers", choice)[0] for choice in composed.config.trackers]
    return plain, providers


def _filled(kind: str, section: str, choice: Choice) -> tuple[dict[str, Any], str]:
    from rlcore.registry import resolve

    resolved = resolve(kind, choice.name)
    settings = to_plain(build_plugin(section, choice, resolved.object)) or {}
    return {
        "name": choice.name,
        **settings,
    }, f"{resolved.package} {resolved.version}" if resolved.package else resolved.target
