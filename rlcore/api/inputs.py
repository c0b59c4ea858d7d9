"""`Inputs`: what a caller passes as Python objects, and how it becomes settings and files of the run's directory.

Rows and a loaded model are written once, as JSONL and safetensors, so a run is resumed, evaluated and exported like
any other. Functions and callbacks cannot be written: the settings contain only their names, `python:NAME`.
"""

from __future__ import annotations

import filecmp
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from rlcore.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.hooks.manager import Hooks

PREFIX: Final = "inputs"
"""Directory of the files, below that of the run."""
_FILES: Final = {"model.path": "model", "data.train": "train.jsonl", "data.eval": "eval.jsonl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Settings of a run, and Python objects that settings cannot hold."""

    settings: Sequence[str | tuple[str, Any]] = ()
    """For `compose`. A setting whose value is an object has its name as value."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """`python:NAME` -> reward or callback."""
    callbacks: Sequence[str] = ()
    """Names of callbacks: keys of `objects`, or of plugins of kind `hooks`."""
    written: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    """Setting, such as data.train or data.train.NAME -> function that writes its value as a new file or directory."""

    def hooks(self, config: Config) -> Hooks:
        """Return the hooks of a config, with callbacks in place of their names."""
        from rlcore.hooks.manager import Hooks

        plugins = config.plugins
        return Hooks([self.objects.get(name, name) for name in plugins.hooks], plugins.on_hook_error)

    @contextmanager
    def files(self, config: Config, directory: Path) -> Iterator[Config]:
        """Write the files below `directory` and yield the config with their paths; an error removes new files.

        Raises:
            UserError: an object cannot be written, or this directory holds other rows or weights.
        """
        created: list[Path] = []
        try:
            for key in self.written:
                config = _placed(config, key, self._write(key, directory / PREFIX / _file(key), created))
            hooks = (*config.plugins.hooks, *self.callbacks)
            plugins = replace(config.plugins, hooks=hooks)
            yield replace(config, plugins=plugins)
        except BaseException:
            for path in created:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            for folder in (directory / PREFIX, directory) if self.written else ():
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
            raise

    def _write(self, key: str, target: Path, created: list[Path]) -> str:
        """Write a file or directory under a temporary name; one that exists must be equal."""
        beside = target.with_name(f".{target.name}.writing")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            new = beside / target.name
            self.written[key](new)
            if not target.exists():
                new.rename(target)
                created.append(target)
            elif not _is_equal(new, target):
                raise ConfigError(
                    f"{target} of this run differs from what was given now\n"
                    'Pass what the run began with, or start a new run:  settings={"run.name": NAME}'
                )
        finally:
            shutil.rmtree(beside)
        return str(target)


def read_inputs(
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    eval_data: Any = None,
    reward: Any = None,
    callbacks: Sequence[Any] = (),
    settings: Mapping[str, Any] | None = None,
    **chosen: str | None,
) -> Inputs:
    """Sort the arguments of `rlcore.train` into settings and objects; `chosen` are settings that are plugin names.

    Raises:
        UserError: an argument of another type.
    """
    pairs: list[tuple[str, Any]] = [(key, value) for key, value in chosen.items() if value is not None]
    objects: dict[str, Any] = {}
    written: dict[str, Callable[[Path], None]] = {}
    for key, name, value in (("data.train", "data", data), ("data.eval", "eval_data", eval_data)):
        has_names = type(value) is dict and "train" not in value  # splits are not for the same use
        sets = value if has_names else {"": value} if value is not None else {}
        paths = {own: os.fspath(it) if isinstance(it, str | os.PathLike) else name for own, it in sets.items()}
        if value is not None:
            pairs.append((key, paths if has_names else paths[""]))
        for own, rows in sets.items():
            if not isinstance(rows, str | os.PathLike):
                written[f"{key}.{own}" if own else key] = _rows_writer(f"{name}[{own!r}]" if own else name, rows)
    if hasattr(model, "save_pretrained"):
        pairs.append(("model.path", type(model).__name__))
        written["model.path"] = _model_writer(model, tokenizer)
    elif model is not None:
        if tokenizer is not None:
            raise ModelError(
                f"tokenizer= belongs to a loaded model, but model={model!r} is a path\n"
                "Leave it out: the directory of a model contains its tokenizer."
            )
        pairs.append(("model.path", os.fspath(model)))
    if reward is not None:
        given = [reward] if isinstance(reward, str | Mapping) or callable(reward) else reward
        pairs.append(("reward", [_reward(item, objects) for item in given]))
    names = [it if isinstance(it, str) else _named(it, objects) for it in callbacks]
    for name in names:
        if name in objects:
            _mark_hooks(objects[name])
    pairs += [(key, value) for key, value in (settings or {}).items()]
    return Inputs(settings=pairs, objects=objects, callbacks=names, written=written)


def local_paths(config: Config, inputs: Inputs) -> Config:
    """Return the config with directories in place of `quickstart:` paths, names on the hub and `model.overrides`.

    Raises:
        UserError: a model does not exist, or its overrides cannot be used.
    """
    from rlcore.data.hub import local_model
    from rlcore.quickstart import cache_directory, locate_assets

    config = locate_assets(config, print)
    path = local_model(config.model.path, "model.path", print)
    if overrides := config.model.overrides:
        if "model.path" in inputs.written:
            raise ConfigError(
                "model.overrides changes the config.json of a directory, but the model is a loaded one\n"
                f"Set it before, and leave it out here:  model.config.{next(iter(overrides))} = …"
            )
        from rlcore.models.overrides import override_config

        path = override_config(path, overrides, cache_directory())
    return replace(
        config,
        model=replace(config.model, path=path),
        critic=replace(config.critic, path=local_model(config.critic.path, "critic.path", print)),
        reward=replace(config.reward, model=local_model(config.reward.model, "reward.model", print)),
    )


def _file(key: str) -> str:
    """Return the name of the file for a setting."""
    section, field_, *own = key.split(".", 2)
    file = Path(_FILES[f"{section}.{field_}"])
    return file.stem + "".join(f"-{quote(name, safe='')}" for name in own) + file.suffix


def _placed(config: Config, key: str, path: str) -> Config:
    """Return the config with a path in place of what was written there."""
    section, field_, *own = key.split(".", 2)
    now = getattr(config, section)
    return replace(
        config, **{section: replace(now, **{field_: {**getattr(now, field_), own[0]: path} if own else path})}
    )


def _reward(item: Any, objects: dict[str, Any]) -> Any:
    """Return an item of the setting `reward`, with the name of an object in place of the object."""
    if isinstance(item, Mapping):
        return {**item, "name": _reward(item.get("name"), objects)}
    if isinstance(item, str):
        return item
    if not callable(item):
        raise ConfigError(
            f"reward: {item!r} is neither a name nor callable\n"
            'Pass a function of completion, a name such as "exact_match", or {"name": function, "weight": 0.5}'
        )
    return _named(item, objects)


def _named(found: Any, objects: dict[str, Any]) -> str:
    """Add an object under an unused name and return the name: `python:short`, `python:short#2`."""
    from rlcore.registry import PYTHON

    bare = getattr(found, "func", found)  # of functools.partial
    name = PYTHON + getattr(bare, "__name__", type(bare).__name__).strip("<>")
    unused = next(it for it in (name, *(f"{name}#{i}" for i in range(2, len(objects) + 3))) if it not in objects)
    objects[unused] = found
    return unused


def _mark_hooks(callback: Any) -> None:
    """Mark the methods `rlcore_...` of a plain object as hooks."""
    from rlcore.hooks import hookimpl

    for name in dir(callback):
        method = getattr(callback, name) if name.startswith("rlcore_") else None
        if inspect.isroutine(method) and not hasattr(method, "rlcore_impl"):
            hookimpl(getattr(method, "__func__", method))


def _rows_writer(name: str, rows: Any) -> Callable[[Path], None]:
    """Return a function that writes rows as JSONL: an iterable of dicts, such as a `datasets.Dataset`."""
    if isinstance(rows, Mapping):
        raise DataError(
            f"{name}: a {type(rows).__name__} with {', '.join(map(str, rows))}, not rows\n"
            f"Pass one split:  {name}={name}[{next(iter(rows), 'train')!r}]   or a list of dicts"
        )
    if not isinstance(rows, Iterable):
        raise DataError(f'{name}: a {type(rows).__name__}, not rows\nPass a path, or a list:  [{{"prompt": "2+2="}}]')

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for index, row in enumerate(rows):
                file.write(_json_line(row, f"{name}, row {index}") + "\n")

    return write


def _json_line(row: Any, where: str) -> str:
    if not isinstance(row, Mapping):
        raise DataError(
            f"{where}: a {type(row).__name__}, not a dict of columns\n"
            'Pass dicts, such as [{"prompt": "2+2="}]; of a data frame:  frame.to_dict("records")'
        )
    for column, value in row.items():
        try:
            json.dumps(value, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: column '{column}' cannot be written as JSON: {error}\nConvert it to text, numbers, lists or"
                f" dicts, or remove it:  [{{k: v for k, v in row.items() if k != {column!r}}} for row in rows]"
            ) from None
    return json.dumps(dict(row), default=_plain)


def _plain(value: Any) -> Any:
    """Return an array, a tensor or a number of numpy as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


def _model_writer(model: Any, tokenizer: Any) -> Callable[[Path], None]:
    """Return a function that saves a loaded model of transformers and its tokenizer."""
    config = model.config
    if hasattr(model, "merge_and_unload"):
        raise ModelError(
            f"model: a {type(model).__name__} with adapters, not a whole model\n"
            "Pass  model=model.merge_and_unload()   and train new adapters with backend=fsdp"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise ModelError(
            "model: a loaded model needs its tokenizer\n"
            "Pass  tokenizer=AutoTokenizer.from_pretrained(DIR)   or the directory:  model=DIR"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"tokenizer: {len(tokenizer)} tokens, but the model has embeddings for {rows}: it is that of another model\n"
            "Pass the model's own:  tokenizer=AutoTokenizer.from_pretrained(DIR)"
        )
    ends: set[int] = set()
    for source in (config, getattr(model, "generation_config", None)):
        found = getattr(source, "eos_token_id", None)
        ends.update([found] if isinstance(found, int) else found or [])
    if ends and tokenizer.eos_token_id not in ends:
        raise ModelError(
            f"tokenizer: its end token is {tokenizer.eos_token_id}, but the model ends with {sorted(ends)}: it is that of"
            " another model\nPass the model's own, or type  model.config.eos_token_id = tokenizer.eos_token_id"
        )

    def write(path: Path) -> None:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)

    return write


def _is_equal(one: Path, other: Path) -> bool:
    """Compare files, or the weights of two model directories, by their bytes."""
    if one.is_file():
        return filecmp.cmp(one, other, shallow=False)
    weights = sorted(path.name for path in one.glob("*.safetensors"))
    same = weights == sorted(path.name for path in other.glob("*.safetensors"))
    return same and not any(filecmp.cmpfiles(one, other, [*weights, "config.json"], shallow=False)[1:])
