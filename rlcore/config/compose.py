"""Compose the `Config` of a run from the command line: defaults < preset < chosen groups < single settings.

`rlcore train` and `rlcore config` call `compose`. Hydra parses values and reads YAML files with their defaults lists;
the dataclasses of schema.py define the settings. The value of a text setting is taken as typed, so paths, names such
as `my_rewards.py:score` and sentences need no quotes. A group without a YAML file of that name is a plugin name and is
resolved by the registry. Settings of a plugin are checked when it is built (build.py, `build_plugin`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_origin

from rlcore.config.aliases import MOST_VALUES, num_values
from rlcore.config.build import build, flatten, to_plain, type_of
from rlcore.config.other_names import advice
from rlcore.config.schema import Config, Source
from rlcore.config.texts import check_texts, resolved
from rlcore.errors import ConfigError, did_you_mean, nearest

Override: TypeAlias = str | tuple[str, Any]
"""A text `key=value`, or a key and a value; a value that is text is read as if it were typed."""
PLUGIN_SECTIONS: Final = ("backend", "rollout", "algorithm", "environment")
"""Sections with a plugin's name and its own settings."""
REQUIRED: Final = "<required>"
"""Placeholder for a required setting, if the config need not be complete."""

_GROUPS: Final = ("preset", *PLUGIN_SECTIONS, "reward", "placement", "schedule", "runtime")
_NAMED: Final = (*PLUGIN_SECTIONS, "runtime")
_WHOLE: Final = ("pools", "placement")
"""Sections that a YAML file replaces instead of merging: two maps of pools merged would be a map that nobody wrote."""
_REPLACED: Final = ("data.train", "data.eval", "data.weights")
"""Settings whose new value replaces the old one; only with a name of theirs, `data.eval.NAME=FILE`, is it added."""
_KEY_OF_GROUP: Final = {**{group: f"{group}.name" for group in _NAMED}, "reward": "reward.items"}
_SAME: Final = {**_KEY_OF_GROUP, "trainer.epochs": "trainer.steps"}
"""Setting -> another name of it, or the setting that it replaces."""
_FILES_ONLY: Final = {
    "preset": "path/to/file.yaml",
    "placement": "'{default: POOL}'",
    "schedule": "'{steps_ahead: 1, max_staleness: 1}'",
}
"""Group without plugins -> a value of one's own."""
_OWN_CONF: Final = Path(__file__).parent / "conf"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A config and the origin of its values."""

    config: Config
    plain: Mapping[str, Any]
    """The config as dicts and lists."""
    providers: Mapping[str, str]
    """Section -> origins of its values, the last one overrides the others. Example: {"algorithm": "preset=quickstart (rlcore)"}"""
    overrides: tuple[str, ...]
    """`key=value` texts as typed, without those that a later one overrides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Typed:
    """One `key=value` of the command line, or of Python, where the value need not be text."""

    text: str
    key: str
    value: Any


def compose(
    overrides: Sequence[Override], *, complete: bool = True, base: Mapping[str, Any] | None = None, origin: str = ""
) -> Composed:
    """Compose the config of a run.

    Args:
        complete: False puts `REQUIRED` in place of a missing required setting, for inspecting a config.
        base: plain values that override the defaults, such as those of a checkpoint's run.
        origin: origin of `base`.

    Raises:
        ConfigError: any problem, with the text as typed.
    """
    typed = _read(overrides)
    defaults = to_plain(_defaults())
    stack = _Stack({section: defaults[section] for section in ("pools", *PLUGIN_SECTIONS)})
    if not complete:
        stack.put({"model": {"path": REQUIRED}, "data": {"train": REQUIRED}}, "")
    stack.put(base or {}, origin)
    for item in sorted(typed, key=lambda item: item.key != "preset"):
        if item.key in _GROUPS:
            _put_group(stack, item)
        elif item.key in _KEY_OF_GROUP.values():
            stack.put(_nested(item.key, _value(item)), "command line")
    for item in typed:
        if item.key not in _GROUPS:
            stack.put(_nested(item.key, _value(item)), "command line", typed=item.key)
    check_texts(stack.plain)
    _drop_missing(stack.plain)
    config = build(Config, resolved(stack.plain))
    providers = {field.name: ", ".join(stack.providers.get(field.name, ())) or "defaults" for field in fields(Config)}
    return Composed(
        config=config, plain=to_plain(config), providers=providers, overrides=tuple(item.text for item in typed)
    )


def _drop_missing(plain: Mapping[str, Any]) -> None:
    """Leave out hooks that are chosen as `name?` and not installed, and remove the mark from others."""
    section = plain.get("plugins")
    if isinstance(section, dict) and isinstance(chosen := section.get("hooks"), list):
        present = [it for it in chosen if not _is_missing(it)]
        section["hooks"] = [it.removesuffix("?") if isinstance(it, str) else it for it in present]


def _is_missing(choice: Any) -> bool:
    from rlcore.registry import catalog

    if not isinstance(choice, str) or not choice.endswith("?"):
        return False
    return all(catalog().hidden(entry) for entry in catalog().find("hooks", choice.removesuffix("?")))


def presets(group: str) -> dict[str, list[str]]:
    """Return the name of each YAML file of a group -> packages that provide it."""
    found: dict[str, list[str]] = {}
    for package, directory in conf_directories().items():
        for file in sorted((directory / group).glob("*.yaml")):
            found.setdefault(file.stem, []).append(package)
    return dict(sorted(found.items()))


def conf_directories() -> dict[str, Path]:
    """Return package -> its directory of YAML files, rlcore first.

    Entry points of `rlcore.config` name the packages; none is imported.
    """
    from rlcore.registry import catalog

    found = {"rlcore": _OWN_CONF}
    installed = catalog()
    for entry in installed.of("config"):
        if entry.package == "rlcore" or installed.hidden(entry):
            continue
        top, *rest = entry.target.split(".")
        spec = find_spec(top)
        places = [Path(place, *rest, "conf") for place in (spec and spec.submodule_search_locations) or ()]
        directory = next((place for place in places if place.is_dir()), None)
        if directory is None:
            _log.warning("%s registers config %s, which has no directory conf", entry.package, entry.target)
        else:
            found[entry.package] = directory
    return found


class _Stack:
    """Layers of plain values; later layers override earlier ones."""

    def __init__(self, plain: dict[str, Any]) -> None:
        self.plain = plain
        self.providers: dict[str, list[str]] = {}

    def put(self, layer: Mapping[str, Any], provider: str, *, typed: str = "") -> None:
        """Put values on top: those of a whole layer, or of the one setting that was `typed`."""
        for section, given in layer.items():
            value, old = _section(section, given), self.plain.get(section)
            replaced = _replaced(section, old, value)
            before = self.providers.setdefault(section, [])
            if replaced and before:
                self.providers[section] = [f"{provider} in place of {replaced}"]
            elif provider and provider not in before:
                before.append(provider)
            alone = replaced or (not typed and section in _WHOLE)
            self.plain[section] = value if alone else _merged(old, value, section, typed)


def _section(section: str, value: Any) -> Any:
    """Expand short forms: `algorithm: grpo`, `reward: [math]`, `trackers: jsonl`. Steps replace epochs."""
    if section in _NAMED and isinstance(value, str):
        return {"name": value}
    if section == "reward" and (isinstance(value, str | list) or (isinstance(value, Mapping) and "name" in value)):
        return {"items": value if isinstance(value, list) else [value]}
    if section == "trainer" and isinstance(value, Mapping) and "steps" in value:
        return {"epochs": 0, **value}
    return [value] if section == "trackers" and isinstance(value, str) else value


def _replaced(section: str, old: Any, new: Any) -> str:
    """Return the name of the plugin that the new choice replaces, whose settings must go, or ""."""
    if section not in PLUGIN_SECTIONS or not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return ""
    before, after = str(old.get("name", "")), str(new.get("name", ""))
    return before if before and after and before.partition("@")[0] != after.partition("@")[0] else ""


def _merged(old: Any, new: Any, path: str, typed: str) -> Any:
    replaces = path in _REPLACED and not typed.startswith(f"{path}.")
    if replaces or not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{name: _merged(old.get(name), value, f"{path}.{name}", typed) for name, value in new.items()}}


def _nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def _read(overrides: Sequence[Override]) -> list[_Typed]:
    """Split into key and value; refuse unknown keys before any file is read. Of a key typed twice, the last one counts."""
    typed: dict[str, _Typed] = {}
    for given in overrides:
        text = given if isinstance(given, str) else f"{given[0]}={given[1]}"
        key, equals, value = text.lstrip("+").partition("=") if text is given else (given[0], "=", given[1])
        if not equals or not key or text.startswith("~"):
            raise ConfigError(f"'{text}' is not key=value\nType  {key.lstrip('~') or 'key'}=VALUE")
        _check_key(key)
        same = key if (key, str(value)) == ("trainer.epochs", "0") else _SAME.get(key, key)  # 0 replaces no steps
        if before := typed.pop(same, None):
            twice = f"{same} is given twice: '{before.text}' and '{text}'"
            if text is not given:  # from Python
                raise ConfigError(f"{twice}\nLeave out one of them.")
            _log.warning("%s; the last one applies", twice)
        typed[same] = _Typed(text=text, key=key, value=value)
    return list(typed.values())


def _check_key(key: str) -> None:
    top = key.partition(".")[0]
    known = ["preset", *(field.name for field in fields(Config))]
    if top not in known:
        longer = [name for name in flatten(_defaults()) if name.endswith(f".{key}")]
        if not longer and (line := advice(key)):
            raise ConfigError(f"{key}: no such setting.\n{line}")
        hint = f" Did you mean '{longer[0]}'?" if longer else did_you_mean(top, known)
        raise ConfigError(f"{key}: no such setting.{hint}\nSettings: {', '.join(known)}.")
    if key != "preset":
        type_of(Config, key)


def _defaults() -> Config:
    return build(Config, {"model": {"path": REQUIRED}, "data": {"train": REQUIRED}})


def _value(item: _Typed) -> Any:
    """Return the value: text settings as typed, everything else parsed."""
    if not isinstance(item.value, str):
        return to_plain(item.value)
    kind = type_of(Config, item.key)
    is_text = kind is str or get_origin(kind) is Literal or (kind == Source and item.value[:1] != "{")
    if is_text and item.value[:1] not in ("'", '"'):
        return item.value
    return _parse(item)


def _parse(item: _Typed) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"value={item.value}")
    except (HydraException, ValueError, RecursionError) as error:  # int() limits the number of digits
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{item.text}: cannot be read: {reason}\nQuote the value:  '{item.key}=\"{item.value}\"'"
        ) from None
    if override.is_sweep_override():
        raise ConfigError(
            f"{item.text}: several values for one setting, and one command is one run\n"
            f"For a list type  '{item.key}=[{item.value}]'   For several runs start the command once for each."
        )
    return override.value()


def _put_group(stack: _Stack, item: _Typed) -> None:
    """Apply the choice of a group: literal values, a YAML file or a plugin's name."""
    group, text = item.key, item.value
    if not isinstance(text, str):
        stack.put({group: to_plain(text)}, "command line")
    elif text[:1] in ("[", "{", "'", '"') or (group != "preset" and "," in text):
        stack.put({group: _parse(item)}, "command line")
    elif group == "preset" and text.endswith((".yaml", ".yml")):
        stack.put(_load(Path(text), Path(text).stem, Path(text).absolute().parent, item), f"preset={text}")
    elif package := _find(group, text):
        name = text.partition("@")[0]
        directory = conf_directories()[package]
        layer = _load(directory / group / f"{name}.yaml", f"{group}/{name}", directory, item)
        stack.put(layer, f"{group}={name} ({package})")
    else:
        _check_name(group, text)
        stack.put({group: text}, "command line")


def _find(group: str, text: str) -> str:
    """Return the package that has the YAML file for `name` or `name@package`; empty: none."""
    name, _, wanted = text.partition("@")
    packages = [package for package in presets(group).get(name, ()) if wanted in ("", package)]
    if len(packages) > 1:
        choices = "  or  ".join(f"{group}={name}@{package}" for package in packages)
        raise ConfigError(
            f"{group} '{name}' is provided by {len(packages)} installed packages: {', '.join(packages)}\n"
            f"Choose one:  {choices}"
        )
    return packages[0] if packages else ""


def _check_name(group: str, text: str) -> None:
    """Refuse a name that is neither a YAML file nor a plugin, and list what exists."""
    if group == "runtime" or ":" in text:
        return
    files = list(presets(group))
    if group in _FILES_ONLY:
        own = _FILES_ONLY[group]
        raise ConfigError(
            f"no {group} named '{text}'.{did_you_mean(text, files)}\n"
            f"There are: {', '.join(files)}.  For one of your own type  {group}={own}"
        )
    from rlcore.registry import catalog, resolve

    plugins = sorted({entry.name for entry in catalog().of(group)})
    if text.partition("@")[0] in plugins:
        return
    if nearest(text, files):
        raise ConfigError(
            f"no {group} named '{text}'.{did_you_mean(text, [*files, *plugins])}\n"
            f"Presets: {', '.join(files)}.  Installed {group} plugins: {', '.join(plugins)}."
        )
    resolve(group, text)  # raises with what is installed, or could be


def _load(file: Path, config_name: str, directory: Path, item: _Typed) -> dict[str, Any]:
    """Load a YAML file and the files in its defaults list, from its own directory or else the packages'."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    if not file.is_file():
        raise ConfigError(
            f"{item.text}: there is no file {file}\nType  {item.key}=NAME; one of: {', '.join(presets(item.key))}"
        )
    search = ",".join(f"'file://{path}'" for path in conf_directories().values() if path != directory)
    try:
        if num_values(file.read_text(encoding="utf-8")) > MOST_VALUES:
            raise ConfigError(
                f"{item.text}: it stands for more than {MOST_VALUES:,} values\nUse fewer aliases in {file}"
            )
        with initialize_config_dir(str(directory), version_base="1.3"):
            loaded = hydra_compose(config_name, overrides=[f"hydra.searchpath=[{search}]"])
        values = OmegaConf.to_container(loaded)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(
            f"{item.text}: its defaults list leads back to itself, or it nests too deeply\n"
            f"Correct  defaults  in {file}, or in a file that it names"
        ) from None
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        reason = " ".join(str(error).partition("Config search path")[0].split())
        raise ConfigError(f"{item.text}: {reason}\nThe file is {file}") from None
    assert isinstance(values, dict), f"{file}: got {type(values)}"
    _check_sections(values, item, file)
    return {str(name): value for name, value in values.items()}


def _check_sections(values: Mapping[Any, Any], item: _Typed, file: Path) -> None:
    known = [field.name for field in fields(Config)]
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{item.text}: no such setting: {name}.{did_you_mean(str(name), known)}\n"
                f"The file is {file}; is its first line  # @package _global_ ?"
            )
