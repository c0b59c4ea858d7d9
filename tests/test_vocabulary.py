"""One name for each thing: the terms of docs/design.md."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted({*ROOT.glob("rlcore/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py"), *ROOT.glob("examples/**/*.py")})


def avoided_words() -> dict[str, str]:
    """Return word -> the term to use instead, from the table in docs/design.md."""
    terms = (ROOT / "docs/design.md").read_text().partition("## Terms")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in terms.splitlines() if line.startswith("| ")][1:]
    return {word: term.strip(" `") for term, _, avoided in rows for word in re.findall(r"`(\w+)`", avoided)}


def names(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every identifier."""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def misnamed(code: str, avoided: dict[str, str]) -> list[str]:
    """Return a message for each identifier that is, or begins or ends with, an avoided word."""
    pattern = re.compile(rf"_?(?:\w+_)?({'|'.join(avoided)})(?:_\w+)?")
    found = ((line, name, pattern.fullmatch(name.lower())) for line, name in names(code))
    return [f"line {line}: {name}: the term is {avoided[match[1]]!r}" for line, name, match in found if match]


def test_the_table_lists_words_to_avoid():
    assert avoided_words()["takes_turns"] == "device sharing"


@pytest.mark.parametrize("code", ["def _settled(): ...", "class Scorer: ...", "x.verdicts(y)", "take_turns = 1"])
def test_an_avoided_word_is_found(code):
    assert len(misnamed(code, avoided_words())) == 1


@pytest.mark.parametrize("code", ["score = 1", "def settles(): ...", "'a verdict in a text'", "max_turns = 4"])
def test_other_names_are_left_alone(code):
    assert misnamed(code, avoided_words()) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_uses_the_terms(path):
    assert misnamed(path.read_text(), avoided_words()) == []
