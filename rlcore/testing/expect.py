"""Assertions that state the protocol's rule; pytest does not rewrite assertions of installed packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlcore.registry import misspellings


def equal(found: object, wanted: object, rule: str) -> None:
    """Fail with `rule` and both values unless they are equal."""
    assert found == wanted, f"{rule}\nwanted {wanted}\ngot    {found}"


@contextmanager
def raises(rule: str, kind: type[Exception] = Exception) -> Iterator[list[Exception]]:
    """Fail with `rule` unless the block raises a `kind`, which is added to the list."""
    caught: list[Exception] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    except Exception as error:
        raise AssertionError(f"{rule}; it raised {error!r}") from error
    else:
        raise AssertionError(f"{rule}; nothing was raised")


@contextmanager
def allowed(rule: str) -> Iterator[None]:
    """Fail with `rule` if the block raises."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{rule}; it raised {error!r}") from error


def no_misspelled_member(kind: str, plugin: object) -> None:
    """Fail if a member of a plugin is close to an optional member of its kind."""
    found = misspellings(kind, plugin)
    assert not found, f"the core ignores members that it does not know: {' '.join(found)}"
