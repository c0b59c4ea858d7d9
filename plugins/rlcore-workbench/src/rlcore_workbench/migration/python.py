"""Values in a Python file, as far as its syntax tree shows them; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore_workbench.migration.answer import data_set

_CHANGING = frozenset({"append", "extend", "insert", "update", "pop", "popitem", "remove", "clear", "setdefault"})
"""Methods that change a list or a dict."""
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""First arguments of load_dataset that are not the name of a data set."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Position of a node."""

    scope: tuple[int, ...]
    """Lines of the functions and classes around it."""
    certain: bool
    """False in a branch or a loop, which may not run."""


@dataclass(frozen=True, slots=True)
class _Binding:
    """Assignment to a variable, or another statement that changes it."""

    place: _Place
    position: tuple[int, int]
    value: ast.expr | None
    """None: not known."""


class _Function(ast.Constant):
    """Function, as FILE.py:NAME or module:NAME."""


class PythonFile:
    """Syntax tree of a file with the values of its variables."""

    def __init__(self, path: Path, text: str, example: str) -> None:
        """Parse a file. Raises ConfigError if it is not valid Python."""
        self._path = path
        self.defaults: list[str] = []
        """Arguments of the file whose defaults were read."""
        self._bindings: dict[str, list[_Binding]] = {}
        self._places: dict[ast.AST, _Place] = {}
        try:
            self._tree = ast.parse(text)
            self._read(self._tree, _Place((), certain=True))
        except SyntaxError as error:
            raise ConfigError(f"{path}:{error.lineno or 1} is not valid Python: {error.msg}\n{example}") from error
        except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested expressions
            raise ConfigError(f"{path}:1 cannot be parsed: {str(error) or 'nested too deeply'}\n{example}") from error

    def _read(self, node: ast.AST, place: _Place) -> None:
        """Note the place of each node, and each binding."""
        self._places[node] = place
        for name, value in self._bound(node):
            first = node.context_expr if isinstance(node, ast.withitem) else node
            position = (getattr(first, "lineno", 0), getattr(first, "col_offset", 0))
            self._bindings.setdefault(name, []).append(_Binding(place, position, value))
        if isinstance(node, _SCOPES):
            place = _Place((*place.scope, node.lineno), certain=True)
        elif isinstance(node, _BRANCHES) and not _is_main(node):
            place = _Place(place.scope, certain=False)
        for child in ast.iter_child_nodes(node):
            self._read(child, place)

    def _bound(self, node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
        """Yield the variables that a node binds, with their values."""
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                yield name, value
            case ast.Assign(targets=targets):
                yield from ((name, None) for target in targets for name in _names(target))
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _CHANGING:
                yield name, None
            case ast.Delete(targets=targets):
                yield from ((name, None) for target in targets for name in _names(target))
            case ast.AugAssign(target=target) | ast.For(target=target) | ast.NamedExpr(target=target):
                yield from ((name, None) for name in _names(target))
            case ast.withitem(optional_vars=ast.expr() as target):
                yield from ((name, None) for name in _names(target))
            case ast.arg(arg=name):
                yield name, None
            case ast.ImportFrom(names=names, module=str(module)):
                yield from ((it.asname or it.name, _Function(f"{module}:{it.name}")) for it in names)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, _Function(f"{self._path}:{name}")

    def calls(self, function: str) -> Iterator[ast.Call]:
        """Yield the calls of a function, with or without the name of its module."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and _name(node.func) == function:
                yield node

    def assigned_to(self, call: ast.Call) -> Iterator[tuple[str, ast.expr | None]]:
        """Yield the attributes that the file sets on the result of a call; None for a value that is not known."""
        names = [name for name, found in self._bindings.items() if any(it.value is call for it in found)]
        for node in ast.walk(self._tree):
            match node:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=attribute)], value=value) if (
                    name in names
                ):
                    yield attribute, value if self._places[node].certain else None
                case ast.AugAssign(target=ast.Attribute(value=ast.Name(id=name), attr=attribute)) if name in names:
                    yield attribute, None

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Evaluate literals, variables, names of functions, and the data set of load_dataset(…).

        Raises:
            ValueError: the file computes the value.
        """
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=option) if self._parses(name):
                return self._default(option)
            case ast.Name(id=name) if name in self._bindings and depth < 20:
                return self.value(self._last(name, node), depth + 1)
            case ast.List(elts=parts):
                return [self.value(part, depth + 1) for part in parts]
            case ast.Call(args=[ast.Constant(value=str(text)), *rest]) if _name(node.func) == "load_dataset":
                return _data_set(text, rest, {it.arg: it.value for it in node.keywords})
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"the file computes it: {source(node)}") from None

    def _parses(self, name: str) -> bool:
        """Return whether a variable has the arguments of the file, from argparse."""
        values = [it.value for it in self._bindings.get(name, ())]
        return any(isinstance(it, ast.Call) and _name(it.func) in ("parse_args", "parse_arguments") for it in values)

    def _default(self, option: str) -> Any:
        """Return the default of an argument of the file."""
        for call in self.calls("add_argument"):
            flags = [str(it.value).lstrip("-").replace("-", "_") for it in call.args if isinstance(it, ast.Constant)]
            given = {it.arg: it.value for it in call.keywords}
            if option in flags and "default" in given:
                self.defaults.append(option)
                return self.value(given["default"])
            if option in flags and "required" not in given:
                action = given.get("action")
                if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
                    return action.value == "store_false"
                return None
        raise ValueError(f"it is the argument --{option} of the file")

    def _last(self, name: str, use: ast.Name) -> ast.expr:
        """Return the value of the last assignment before the use of a variable."""
        own = scope = self._places[use].scope
        while scope and all(it.place.scope != scope for it in self._bindings[name]):
            scope = scope[:-1]
        found = [it for it in self._bindings[name] if it.place.scope == scope]
        if scope == own:
            found = [it for it in found if it.position < (use.lineno, use.col_offset)]
        certain = len(found) == 1 or (scope == own and found and found[-1].place.certain)
        value = found[-1].value if found and certain else None
        if value is None:
            lines = ", ".join(str(it.position[0]) for it in found) or "none before it"
            raise ValueError(f"the file computes {name}, or sets it in branches: lines {lines}")
        return value


def source(node: ast.expr) -> str:
    """Return the source of an expression."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return "an expression that is nested too deeply"


def _is_main(node: ast.AST) -> bool:
    """Return whether a node is `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and any(
        isinstance(it, ast.Name) and it.id == "__name__" for it in ast.walk(node.test)
    )


def _names(target: ast.expr) -> Sequence[str]:
    """Return the variables that an assignment to a target sets or changes: both in `a, b[0] = …`."""
    names = [it for it in ast.walk(target) if isinstance(it, ast.Name) and isinstance(it.ctx, ast.Store)]
    changed = [it.value for it in ast.walk(target) if isinstance(it, ast.Subscript)]
    return [it.id for it in (*names, *changed) if isinstance(it, ast.Name)]


def _name(function: ast.expr) -> str:
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _data_set(name: str, rest: Sequence[ast.expr], keywords: Mapping[str | None, ast.expr]) -> str:
    """Return the data set of load_dataset(…) as a value of data.train."""
    given = {key: it.value for key, it in keywords.items() if isinstance(it, ast.Constant)}
    if name in _FORMATS:
        if "data_files" not in given:
            raise ValueError("the file computes the names of the data files")
        return str(given["data_files"])
    config = rest[0].value if rest and isinstance(rest[0], ast.Constant) else given.get("name")
    return data_set(name, given.get("split"), config)
