"""Syntax tree of a shell script, from the tree-sitter grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

EXPANSIONS = ("simple_expansion", "expansion", "arithmetic_expansion", "command_substitution", "process_substitution")
QUOTED = ("string", "raw_string", "ansi_c_string", "translated_string")


def parse(script: str) -> Node:
    """Return the root of the tree. Raises ConfigError if the script is not valid shell syntax."""
    text = re.sub(r"\\\s*\Z", "", script.replace("\r\n", "\n")) + "\n"
    text = text.replace("$(((", "$(( (")  # the grammar takes $((( for a subshell,
    text = re.sub(
        r':-\[([\w/.,"-]*)\]\}', lambda found: f":-[{found[1].replace(chr(34), '')}]}}", text
    )  # not ${A:-["b"]},
    text = re.sub(r"\$([A-Za-z_]\w*)", r"${\1}", text)  # and reads a/$b/$c wrongly, but not a/${b}/${c}
    root = _parser().parse(text.encode("utf-8", "replace")).root_node
    if error := _first_error(root):
        line = error.start_point[0] + 1
        raise ConfigError(
            f"the script cannot be read near line {line}: {''.join(text.split(chr(10))[line - 1 : line]).strip()}\n"
            "Type the launch as one command:  rlcore migrate 'python3 -m verl.trainer.main_ppo key=value …'"
        )
    return root


@lru_cache(maxsize=1)
def _parser() -> Parser:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _first_error(node: Node) -> Node | None:
    if node.type == "ERROR" or node.is_missing:
        return node
    return next((found for child in node.children if child.has_error and (found := _first_error(child))), None)


def source_of(node: Node) -> str:
    return (node.text or b"").decode()


def blanks_before(node: Node) -> int:
    """Return the number of blanks that the grammar counts to an expansion in a string, but that are text before it."""
    source = node.text or b""
    return len(source) - len(source.lstrip()) if node.type in EXPANSIONS else 0


def leaves(nodes: Sequence[Node]) -> list[Node]:
    """Return the expansions and quoted strings among the nodes and their descendants."""
    found: list[Node] = []
    for node in nodes:
        found += [node] if node.type in (*EXPANSIONS, *QUOTED) else leaves(node.named_children)
    return found


def array_use(node: Node) -> str:
    """Return the name in "${A[@]}" or "$@"; empty for anything else."""
    use = re.fullmatch(r'"?\$(?:\{(\w+)\[[@*]\]\}|([@*])|\{([@*])(?::\d+)?\})"?', source_of(node))
    return next((name for name in use.groups() if name), "") if use else ""


def unquoted(node: Node) -> str:
    """Return the source of a word without its quoted parts."""
    if node.type in QUOTED or node.type in EXPANSIONS:
        return ""
    return "".join(map(unquoted, node.children)) if node.children else source_of(node)


def clause_parts(clause: Node) -> tuple[list[Node], list[Node]]:
    """Split an if, elif or else clause into its conditions and its statements."""
    conditions: list[Node] = []
    body: list[Node] = []
    target = body if clause.type == "else_clause" else conditions
    for child in clause.children:
        if child.type == "then":
            target = body
        elif child.is_named and child.type not in ("elif_clause", "else_clause", "comment"):
            target.append(child)
    return conditions, body
