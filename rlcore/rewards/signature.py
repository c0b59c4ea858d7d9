"""Read a reward's inputs from its parameters. Used by the planner (before a run) and the runner (during it).

Parameter names distinguish three conventions:
  rlcore  (completion, <columns>, **columns)                                 -> float | None | RewardResult
  verl    (data_source, solution_str, ground_truth, extra_info=None, **kw)   -> float, or a dict with "score"
  trl     (prompts, completions, <columns>, **columns), lists                -> list[float | None]
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.errors import ConfigError, SampleError, did_you_mean
from rlcore.protocols.reward import SAMPLE_FIELDS

RewardFunction = Callable[..., Any]
Row = Mapping[str, object]
"""A sample: the columns of its dataset and SAMPLE_FIELDS."""

_IMMUTABLE = (str, int, float, bool, bytes, type(None))
_TRL_NAMES = {"prompts": "prompt", "completions": "completion"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Inputs of a reward.

    Example: for `def right(completion, answer, unit="")`: required={"completion", "answer"}, optional={"unit"}
    """

    convention: Literal["rlcore", "verl", "trl"]
    batched: bool
    """Takes lists and returns a list."""
    is_async: bool
    required: frozenset[str]
    optional: frozenset[str]
    takes_all: bool
    """Has `**columns`: receives every column except those with the name of a given option."""
    bound: frozenset[str] = frozenset()
    """Names of the given options."""


def read_signature(function: RewardFunction) -> Signature:
    """Read the parameters of a reward; those bound with functools.partial are options, not columns."""
    bare = function.func if isinstance(function, functools.partial) else function
    bound = function.keywords if isinstance(function, functools.partial) else {}
    parameters = inspect.signature(bare).parameters.values()
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise ConfigError(
            f"a reward's parameters are filled by name, and {positional[0]!r} of {bare!r} is positional-only\n"
            "Remove the '/' from its parameters."
        )
    asked = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in bound]
    names = {p.name for p in asked}
    callables = (bare, getattr(bare, "__call__", None))  # noqa: B004 - an instance's method may be marked
    convention: Literal["rlcore", "verl", "trl"] = "rlcore"
    if {"solution_str", "ground_truth"} <= names:
        convention = "verl"
    elif "completions" in names:
        convention = "trl"
    return Signature(
        convention=convention,
        batched=convention == "trl" or any(getattr(it, "batched", False) is True for it in callables),
        is_async=any(inspect.iscoroutinefunction(it) for it in callables),
        required=frozenset(p.name for p in asked if p.default is p.empty)
        | frozenset(getattr(bare, "required_columns", ())),
        optional=frozenset(p.name for p in asked if p.default is not p.empty),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        bound=frozenset(bound),
    )


def required_columns(function: RewardFunction) -> set[str]:
    """Return the columns of the dataset that the reward requires."""
    signature = read_signature(function)
    given = {"solution_str"} if signature.convention == "verl" else set(_TRL_NAMES)
    return set(signature.required - set(SAMPLE_FIELDS) - given)


def check_columns(name: str, function: RewardFunction, columns: Collection[str], source: str = "the dataset") -> None:
    """Raise ConfigError if `columns`, those of `source`, lack one that the reward requires."""
    have = sorted(columns)
    missing = required_columns(function) - set(have)
    if read_signature(function).convention == "verl" and "reward_model" in have:
        missing.discard("ground_truth")
    if missing:
        column = min(missing)
        raise ConfigError(
            f"reward {name!r} asks for column {column!r}, which {source} does not have.{did_you_mean(column, have)}\n"
            f"Its columns: {', '.join(have)}"
        )


def arguments(signature: Signature, row: Row) -> dict[str, object]:
    """Return the keyword arguments for one sample, with copies of mutable values, so that rewards cannot interfere."""
    view = _with_fields(_view(signature, row), signature.required)
    if missing := signature.required - view.keys():
        raise SampleError(f"asks for column {min(missing)!r}, which the sample does not have")
    wanted = (
        view.keys() - signature.bound
        if signature.takes_all and signature.convention != "verl"
        else signature.required | (signature.optional & view.keys())
    )
    return {name: value if isinstance(value := view[name], _IMMUTABLE) else copy.deepcopy(value) for name in wanted}


def list_arguments(signature: Signature, rows: Sequence[Row]) -> dict[str, list[object]]:
    """Return the keyword arguments for a batched reward: a list for each column that all samples have."""
    each = [arguments(signature, row) for row in rows]
    shared = [name for name in each[0] if all(name in one for one in each)]
    return {name: [one[name] for one in each] for name in shared}


def _with_fields(view: Row, names: Collection[str]) -> Row:
    """Return the sample with the fields of nested columns that are named with a dot: `reward_model.ground_truth`."""
    fields: dict[str, object] = {}
    for name in [it for it in names if "." in it and it not in view]:
        value = _field(name, view)
        fields |= {name: value} if value is not None else {}
    return {**view, **fields} if fields else view


def _field(name: str, values: object) -> object:
    """Return a value of nested objects, None if there is none; longer keys come first, as in `values_of`."""
    if not isinstance(values, Mapping) or name in values:
        return values.get(name) if isinstance(values, Mapping) else None
    parts = name.split(".")
    splits = ((".".join(parts[:n]), ".".join(parts[n:])) for n in range(len(parts) - 1, 0, -1))
    found = (_field(rest, values.get(key)) for key, rest in splits)
    return next((value for value in found if value is not None), None)


def _view(signature: Signature, row: Row) -> Row:
    """Return the sample under the names of the convention."""
    if signature.convention == "trl":
        return {**row, **{theirs: row[ours] for theirs, ours in _TRL_NAMES.items() if ours in row}}
    if signature.convention == "rlcore":
        return row
    view = {**row, "solution_str": row["completion"]}
    reward_model = row.get("reward_model")
    if "ground_truth" not in row and isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        view["ground_truth"] = reward_model["ground_truth"]
    return view
