"""Convert plain values to frozen dataclasses and back, strictly: unknown keys and values of other types are errors.

`compose` builds the `Config` of a run with it, the planner the `Config` of each chosen plugin; checkpoints and
trackers read the plain form. It knows nothing about files, Hydra or the origin of a value.

A dataclass may check its values in `__post_init__`: it raises ConfigError("steps: expected at least 1, got 0\\nType
steps=1"), starting with the name of the field; `build` prepends the section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rlcore.config.other_names import advice
from rlcore.config.schema import Choice, RewardItem
from rlcore.errors import ConfigError, did_you_mean

T = TypeVar("T")

_REQUIRED: Final = {
    "model.path": "model.path=DIR   a directory in Hugging Face layout; for a first run without one: preset=quickstart",
    "data.train": "data.train=train.jsonl   JSONL, CSV, Parquet or Arrow; for a first run without one: preset=quickstart",
}
"""Required setting -> what to type."""
_NAMES: Final[Mapping[Any, str]] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_EXAMPLES: Final[Mapping[Any, str]] = {int: "8", float: "0.5", bool: "true", str: "text"}
_UNSET: Final = "???"
"""Placeholder in a YAML file for a value that the user must give."""


def build(cls: type[T], data: Any, key: str = "") -> T:
    """Build an instance of a dataclass from plain values.

    Args:
        data: field names to values; missing fields take their default.
        key: dotted name of the section, for errors.

    Raises:
        ConfigError: an unknown or missing key, or a value of another type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{key}: expected a section with settings, got {data!r}\nType  {key}.{fields(cast(Any, cls))[0].name}=…"
        )
    known = {field.name: field for field in fields(cast(Any, cls)) if field.init}
    _check_keys(data, list(known), key)
    hints = get_type_hints(cls)
    values = {}
    for name, field in known.items():
        if name in data and data[name] != _UNSET:
            values[name] = _convert(hints[name], data[name], _join(key, name), _default(field))
        elif _default(field) is MISSING:
            values[name] = _missing(hints[name], _join(key, name))
    return _construct(cls, values, key)


def build_plugin(section: str, choice: Choice, plugin: Any) -> Any:
    """Build the settings of the chosen plugin: an instance of its class attribute `Config`, None if it has none."""
    config_class = getattr(plugin, "Config", None)
    if config_class is not None:
        return build(config_class, choice.options, section)
    if choice.options:
        first = next(iter(choice.options))
        raise ConfigError(f"{section}.{first}: '{choice.name}' has no settings\nLeave out  {section}.{first}")
    return None


def to_plain(value: Any) -> Any:
    """Convert dataclasses to dicts and tuples to lists: `build(type(value), to_plain(value)) == value`."""
    if isinstance(value, Choice):
        return {"name": value.name, **{name: to_plain(option) for name, option in value.options.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Return plain values by dotted name; a list is one value. Example: {"sampling.temperature": 1.0, …}"""
    plain = to_plain(value)
    if not isinstance(plain, dict) or (key and not plain):
        return {key: plain}
    return {name: leaf for field, item in plain.items() for name, leaf in flatten(item, _join(key, field)).items()}


def type_of(cls: Any, path: str, key: str = "") -> Any:
    """Return the type of a dotted setting; Any for a plugin's own settings.

    Raises:
        ConfigError: no such setting.
    """
    name, _, rest = path.partition(".")
    if cls is Choice and name != "name":
        return Any
    if is_dataclass(cls):
        _check_keys([name], [field.name for field in fields(cls) if field.init], key)
        inner = get_type_hints(cls)[name]
    elif get_origin(cls) is Mapping:
        inner = get_args(cls)[1]
    elif mappings := [kind for kind in get_args(cls) if get_origin(kind) is Mapping]:  # a text or {name: text}
        return type_of(mappings[0], path, key)
    elif cls is Any:
        return Any
    else:
        raise ConfigError(f"{_join(key, path)}: '{key}' is one value\nType  {key}={_example(cls, MISSING)}")
    return type_of(inner, rest, _join(key, name)) if rest else inner


def _convert(kind: Any, value: Any, key: str, default: Any = MISSING) -> Any:
    """Return the value as `kind`; `default` is only for the example in an error."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if kind is Choice or kind is RewardItem:
        return _choice(kind, value, key)
    if is_dataclass(kind):
        return build(cast(Any, kind), value, key)
    if origin is Literal:
        return _literal(get_args(kind), value, key)
    if origin in (Union, UnionType):
        return _union(get_args(kind), value, key, default)
    if origin in (tuple, list, Sequence):
        return _items(kind, value, key, default)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _mismatch("a mapping {name: value}", kind, value, key, default)
        return {str(name): _convert(get_args(kind)[1], item, _join(key, str(name))) for name, item in value.items()}
    return _scalar(kind, value, key, default)


def _scalar(kind: Any, value: Any, key: str, default: Any) -> Any:
    if kind not in _NAMES:
        raise TypeError(f"setting '{key}' is declared as {kind}, which settings cannot be; use plain types")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _mismatch(_NAMES[kind], kind, value, key, default)
    if kind is int and value.bit_length() > 63:
        raise ConfigError(
            f"{key}: expected a whole number below 2**63, got one of {value.bit_length()} bits\n{_line(key, 8)}"
        )
    return value


def _literal(allowed: tuple[Any, ...], value: Any, key: str) -> Any:
    if any(value == item and type(value) is type(item) for item in allowed):
        return value
    hint = did_you_mean(str(value), [str(item) for item in allowed])
    raise ConfigError(
        f"{key}: expected one of {', '.join(map(str, allowed))}; got {value!r}.{hint}\n{_line(key, allowed[0])}"
    )


def _union(kinds: tuple[Any, ...], value: Any, key: str, default: Any) -> Any:
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        return _convert(others[0], value, key, default)
    for kind in others:
        try:
            return _convert(kind, value, key, default)
        except ConfigError:
            continue
    names = [_NAMES.get(kind, "a mapping {name: text}") for kind in others]
    raise _mismatch(" or ".join(names), others[0], value, key, default)


def _items(kind: Any, value: Any, key: str, default: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _mismatch("a list", kind, value, key, default)
    kinds = get_args(kind)
    if get_origin(kind) is not tuple:
        return [_convert(kinds[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise _mismatch(f"{len(kinds)} values", kind, value, key, default)
    return tuple(_convert(item_kind, item, f"{key}[{i}]") for i, (item_kind, item) in enumerate(zip(kinds, value)))


def _choice(kind: type[Choice] | type[RewardItem], value: Any, key: str) -> Choice | RewardItem:
    """Convert a bare name, or a section with the name and the plugin's own settings."""
    if isinstance(value, str):
        return kind(name=value)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ConfigError(f"{key}: expected a name, or a section with a name; got {value!r}\nType  {key}=NAME")
    if kind is Choice:
        return Choice(name=value["name"], options={str(name): it for name, it in value.items() if name != "name"})
    own = {name: value[name] for name in [field.name for field in fields(kind)] if name in value}
    options = {str(name): option for name, option in value.items() if name not in own}
    item = build(kind, own, key)
    if twice := sorted({*item.options} & {*options}):
        raise ConfigError(f"{key}.{twice[0]}: given twice, also under options\nLeave out one of them.")
    return replace(item, options={**item.options, **options})


def _check_keys(given: Mapping[Any, Any] | Sequence[Any], known: list[str], key: str) -> None:
    for name in given:
        if name not in known:
            whole, where = _join(key, str(name)), f"Settings of {key}" if key else "Settings"
            if line := advice(whole):
                raise ConfigError(f"{whole}: no such setting.\n{line}")
            raise ConfigError(
                f"{whole}: no such setting.{did_you_mean(str(name), known)}\n{where}: {', '.join(known) or 'none'}."
            )


def _missing(kind: Any, key: str) -> Any:
    """Build a missing section from its defaults; raise if a value is required."""
    if is_dataclass(kind) and kind not in (Choice, RewardItem):
        return build(cast(Any, kind), {}, key)
    own = f"Type  {_REQUIRED[key]}" if key in _REQUIRED else _line(key, _example(kind, MISSING))
    raise ConfigError(f"{key} is required\n{own}")


def _construct(cls: type[T], values: dict[str, Any], key: str) -> T:
    try:
        return cls(**values)
    except ValueError as error:
        field = str(error).partition(":")[0]
        if not isinstance(error, ConfigError) and field not in {it.name for it in fields(cast(Any, cls))}:
            raise ConfigError(f"{key or cls.__name__}: {error}") from error
        raise ConfigError(_join(key, str(error)).replace(f"Type  {field}=", f"Type  {_join(key, field)}=")) from None


def _mismatch(expected: str, kind: Any, value: Any, key: str, default: Any) -> ConfigError:
    shown = "nothing (null)" if value is None else repr(value)
    return ConfigError(f"{key}: expected {expected}, got {shown}\n{_line(key, _example(kind, default))}")


def _line(key: str, example: object) -> str:
    """Return what to type for a setting; for an item of a list, type the whole list."""
    setting, item, rest = key.partition("[")
    _, _, field = rest.partition("].")
    if item:
        example = f"'[{{name: NAME, {field}: {example}}}]'" if field else f"[{example},…]"
    return f"Type  {setting}={example}"


def _example(kind: Any, default: Any) -> str:
    """Return an example value as typed on the command line."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float) or (isinstance(default, str) and default):
        return str(default)
    if get_origin(kind) in (tuple, list, Sequence):
        return f"[{','.join(map(str, default))}]" if isinstance(default, tuple | list) and default else "[a,b]"
    return "'{name: value}'" if get_origin(kind) in (dict, Mapping) else _EXAMPLES.get(kind, "VALUE")


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
