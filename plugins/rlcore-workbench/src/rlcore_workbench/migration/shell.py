"""Read the commands of a shell script without running any of it.

Values are known as far as the script sets them: assignments, arrays, defaults such as ${A:-b}, whole-number
arithmetic, tests of known values. Everything else makes a word unreadable, with the reason, and the caller refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError
from rlcore_workbench.migration.arithmetic import arithmetic
from rlcore_workbench.migration.syntax import (
    EXPANSIONS,
    QUOTED,
    array_use,
    blanks_before,
    clause_parts,
    leaves,
    parse,
    source_of,
    unquoted,
)
from rlcore_workbench.migration.words import Value, Word, agreed, appended, literal, matches

if TYPE_CHECKING:
    from tree_sitter import Node


@dataclass(frozen=True, slots=True)
class Command:
    """Simple command, whether or not the script would reach it."""

    words: tuple[Word, ...]
    line: int


_NUMBER_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__, "-ne": int.__ne__, "-lt": int.__lt__, "-le": int.__le__, "-gt": int.__gt__, "-ge": int.__ge__,
}  # fmt: skip
_BRACES = re.compile(r"(?<!\$)\{[^}\s]*(,|\.\.)")


def read_commands(script: str) -> tuple[list[Command], list[str]]:
    """Return the commands in order, and a remark for each branch that known values rule out.

    Raises:
        ConfigError: the script is not valid shell syntax.
    """
    reader = _Reader()
    try:
        reader.run(parse(script))
    except RecursionError:
        raise ConfigError(
            "the script cannot be read: it is nested too deeply\n"
            "Type the launch as one command:  rlcore migrate 'python3 -m verl.trainer.main_ppo key=value …'"
        ) from None
    return reader.commands, reader.remarks


@dataclass(slots=True)
class _Reader:
    """Reader that walks the syntax tree with the variables known so far."""

    commands: list[Command] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    variables: dict[str, Value] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """Functions being read, to stop at recursion."""
    ended: bool = False
    """True after `exit` in this branch."""

    def run(self, node: Node) -> bool | None:
        """Read a statement; return whether it succeeds, or None if unknown."""
        if self.ended:
            return None
        handler = getattr(self, f"_run_{node.type}", None)
        if handler:
            return handler(node)  # type: ignore[no-any-return]
        for child in node.named_children:
            self.run(child)
        return None

    def _run_variable_assignment(self, node: Node) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert name is not None, source_of(node)
        if name.type == "subscript":
            self.variables[source_of(name).partition("[")[0]] = Word("", "an array is changed element by element")
            return True
        new: Value = Word("")
        if value is not None and value.type == "array":
            new = tuple(word for item in value.named_children if item.type != "comment" for word in self.expand(item))
        elif value is not None:
            new = self.text_of(value)
            if new.text.startswith("~/") and value.type not in QUOTED:
                new = replace(new, text="${HOME}" + new.text[1:])
        if any(child.type == "+=" for child in node.children):
            new = appended(self.variables.get(source_of(name), Word("")), new)
        self.variables[source_of(name)] = new
        return True

    def _run_unset_command(self, node: Node) -> None:
        for child in node.named_children:
            self.variables[source_of(child)] = Word("")

    def _run_command(self, node: Node) -> None:
        words = [word for child in self._after_assignments(node) for word in self._words_of(child)]
        name = words[0].text if words else ""
        if name == "exit":
            self.ended = True
        elif name in self.functions and name not in self.calls:
            self.calls.append(name)
            self.run(self.functions[name])
            self.calls.pop()
        else:
            self.commands.append(Command(tuple(words), node.start_point[0] + 1))

    def _after_assignments(self, node: Node) -> list[Node]:
        """Apply assignments on separate lines, which the grammar counts to the next command."""
        children, first = node.named_children, 0
        for i, (child, following) in enumerate(pairwise(children)):
            gap = (node.text or b"")[child.end_byte - node.start_byte : following.start_byte - node.start_byte]
            if child.type == "variable_assignment" and b"\n" in gap.replace(b"\\\n", b""):
                first = i + 1
        for child in children[:first]:
            self.run(child)
        return children[first:]

    def _words_of(self, node: Node) -> Sequence[Word]:
        """Expand one part of a command; an assignment before the command counts as a word."""
        if node.type == "command_name":
            return self.expand(node.named_children[0])
        if node.type == "variable_assignment":
            value = node.child_by_field_name("value")
            return [self._joined(node, [value] if value else [])]
        return () if "redirect" in node.type or node.type == "comment" else self.expand(node)

    def _run_redirected_statement(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        if body is None:
            return
        self.run(body)
        texts = [it for child in node.named_children for it in child.named_children if it.type == "heredoc_body"]
        if texts and self.commands and [it.text for it in self.commands[-1].words[:1]] == ["read"]:
            self.variables[self.commands.pop().words[-1].text] = self._joined(texts[0], leaves(texts))

    def _run_function_definition(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[source_of(name)] = body

    def _run_list(self, node: Node) -> bool | None:
        left, operator, right = (child for child in node.children if child.type != "comment")
        first = self.run(left)
        if first is None:
            self._fork(node, [[right], []])
            return None
        return self.run(right) if first == (operator.type == "&&") else first

    def _run_negated_command(self, node: Node) -> bool | None:
        result = self.run(node.named_children[0])
        return None if result is None else not result

    def _run_test_command(self, node: Node) -> bool | None:
        return self._test(node.named_children[0]) if len(node.named_children) == 1 else None

    def _run_for_statement(self, node: Node) -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        assert variable is not None and body is not None, source_of(node)
        values = [word for child in node.children_by_field_name("value") for word in self.expand(child)]
        reason = f"it changes in each pass of the loop at line {node.start_point[0] + 1}"
        self.variables[source_of(variable)] = values[0] if len(values) == 1 else Word("", reason)
        self._fork(node, [[body], []])

    def _run_while_statement(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        self._fork(node, [[body] if body else [], []])

    _run_c_style_for_statement = _run_while_statement

    def _run_if_statement(self, node: Node) -> None:
        possible: list[list[Node]] = []
        for clause in [node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))]:
            conditions, body = clause_parts(clause)
            holds: bool | None = True
            for condition in conditions:
                holds = self.run(condition)
            if conditions and holds is not None:
                self._remark(clause, conditions, holds)
            if holds is not False:
                possible.append(body)
            if holds:
                break
        else:
            possible.append([])
        self._fork(node, possible)

    def _remark(self, clause: Node, conditions: list[Node], holds: bool) -> None:
        text = " ".join(" ".join(map(source_of, conditions)).split())
        taken = "is read" if holds else "is left out"
        self.remarks.append(
            f"line {clause.start_point[0] + 1}: `{text}` is {str(holds).lower()} here, so its branch {taken}"
        )

    def _run_case_statement(self, node: Node) -> None:
        subject = node.child_by_field_name("value")
        assert subject is not None, source_of(node)
        known = self.text_of(subject)
        possible: list[list[Node]] = []
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            body = [child for child in item.named_children if child not in patterns]
            fits = matches(known, [self.text_of(pattern).text for pattern in patterns])
            if fits is not False:
                possible.append(body)
            if fits:
                break
        else:
            possible.append([])
        if len(possible) == 1:
            line = node.start_point[0] + 1
            self.remarks.append(
                f"line {line}: `case {source_of(subject)}` is {known.text} here, and its branch is read"
            )
        self._fork(node, possible)

    def _fork(self, node: Node, branches: list[list[Node]]) -> None:
        """Read each branch from the same state, then keep the values they agree on."""
        start, ends = self.variables, []
        for branch in branches:
            self.variables = dict(start)
            for statement in branch:
                self.run(statement)
            if not self.ended:
                ends.append(self.variables)
            self.ended = False
        self.ended = not ends
        names = dict.fromkeys(name for end in ends for name in end)
        line = node.start_point[0] + 1
        self.variables = {name: agreed([end.get(name) for end in ends], line) for name in names}

    def expand(self, node: Node) -> Sequence[Word]:
        """Expand an argument to words: arrays have several, and unquoted variables are split at blanks."""
        if array := array_use(node):
            return self._array(array)
        word = self.text_of(node)
        if node.type not in QUOTED and not word.unreadable and _BRACES.search(unquoted(node)):
            return [Word(source_of(node), "braces without quotes are an expansion")]
        if word.unreadable or node.type in QUOTED:
            return [word]
        if node.type in EXPANSIONS:
            return [Word(text) for text in word.text.split()]
        values = [self.text_of(child).text for child in node.named_children if child.type in EXPANSIONS]
        if any(re.search(r"\s", value) for value in values):
            return [Word(source_of(node), "a value with blanks is not quoted")]
        return [word]

    def _array(self, name: str) -> Sequence[Word]:
        if name in ("@", "*"):
            return ()  # arguments of the script are unknown and count as empty
        value = self.variables.get(name, ())
        return value if isinstance(value, tuple) else [value]

    def text_of(self, node: Node) -> Word:
        """Return the value of a node as one word, without splitting it."""
        match node.type:
            case "raw_string":
                return _literal(source_of(node)[1:-1], node)
            case "string" | "concatenation":
                return self._joined(node, [child for child in node.named_children if child.type != "string_content"])
            case "simple_expansion":
                return self._variable(source_of(node).strip()[1:], node)
            case "expansion":
                return self._expansion(node)
            case "arithmetic_expansion":
                return self._arithmetic(node)
            case "command_substitution" if re.fullmatch(r"\s*\$\(\(.*\)\)", source_of(node), re.DOTALL):
                return self._arithmetic(node)  # as the grammar takes it inside ${A:-$((…))}
            case "command_substitution" | "process_substitution":
                return Word(source_of(node), "it is the output of a command")
            case "ansi_c_string" | "translated_string" | "brace_expression":
                return Word(source_of(node), f"{source_of(node)} is not evaluated")
        return self._joined(node, [child for child in node.named_children if child.type in (*EXPANSIONS, *QUOTED)])

    def _joined(self, node: Node, parts: list[Node], start: int = -1, end: int = -1) -> Word:
        """Join the values of the parts and the literal text between them."""
        source = node.text or b""
        quote = 1 if node.type == "string" else 0
        position = start if start >= 0 else quote
        stop = end if end >= 0 else len(source) - quote
        unescape = r"\\([\"`\\$])" if quote else r"\\(.)"
        text, unreadable = "", ""
        for part in [*parts, None]:
            upto = part.start_byte + blanks_before(part) - node.start_byte if part else stop
            between = source[position:upto].decode().replace("\\\n", "")
            unreadable = unreadable or literal(between)
            text += re.sub(unescape, r"\1", between)
            if part:
                word = self.text_of(part)
                text, unreadable = text + word.text, unreadable or word.unreadable
                position = part.end_byte - node.start_byte
        return Word(text, unreadable)

    def _variable(self, name: str, node: Node) -> Word:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            return Word(source_of(node), f"{source_of(node)} is known only when the script runs")
        value = self.variables.get(name, Word(f"${{{name}}}"))
        return value if isinstance(value, Word) else value[0] if value else Word("")

    def _expansion(self, node: Node) -> Word:
        """Read ${A}, ${A:-default}, ${A:=default}, ${A:?message} and ${A:+other}."""
        source = source_of(node).lstrip()
        if array := array_use(node):
            words = self._array(array)
            return Word(" ".join(it.text for it in words), next((it.unreadable for it in words if it.unreadable), ""))
        use = re.match(r"\$\{(\w+)(:?[-=?+]|\}$)", source)
        if not use:
            return Word(source, f"{source} is not evaluated")
        name, operator = use.groups()
        value = Word(f"${{{name}}}") if name.isdigit() else self._variable(name, node)
        if value.unreadable:
            return replace(value, text=source)
        unset = value.text == f"${{{name}}}" or (not value.text and operator[0] == ":")
        if operator == "}":
            return Word(source, f"{source} is known only when the script runs") if name.isdigit() else value
        if operator[-1] == "?" or unset == (operator[-1] == "+"):
            return Word("") if operator[-1] == "+" else value
        begin = blanks_before(node) + len(use[0].encode())
        parts = [child for child in node.named_children if child.start_byte - node.start_byte >= begin]
        default = self._joined(node, leaves(parts), begin, len(node.text or b"") - 1)
        if operator[-1] == "=":
            self.variables[name] = default
        return default

    def _arithmetic(self, node: Node) -> Word:
        inner = self._joined(node, leaves(node.named_children), blanks_before(node) + 3, len(node.text or b"") - 2)
        if inner.unreadable:
            return inner
        try:
            return Word(str(arithmetic(inner.text, self._number)))
        except ValueError as error:
            return Word(source_of(node), str(error))

    def _number(self, name: str) -> str:
        value = self.variables.get(name)
        if isinstance(value, Word) and value.unreadable:
            raise ValueError(value.unreadable)
        if not isinstance(value, Word):
            raise ValueError(f"the script does not set {name}")
        return value.text

    def _test(self, node: Node) -> bool | None:
        """Evaluate the condition of [ … ] or [[ … ]]; return None if a value in it is unknown."""
        parts = [source_of(child) for child in node.children]
        words = [self.text_of(child) for child in node.named_children if child.type != "test_operator"]
        if any(word.unreadable or "$" in word.text for word in words):
            return None
        if node.type == "unary_expression" and parts[0] in ("-z", "-n"):
            return (words[0].text == "") == (parts[0] == "-z")
        if node.type != "binary_expression" or len(words) != 2:
            return None
        left, right = (word.text for word in words)
        if parts[1] in ("=", "==", "!="):
            same = matches(words[0], [right])
            return None if same is None else same == (parts[1] != "!=")
        try:
            return _NUMBER_TESTS[parts[1]](int(left), int(right))
        except (KeyError, ValueError):
            return None


def _literal(text: str, node: Node) -> Word:
    return Word(source_of(node), reason) if (reason := literal(text)) else Word(text)
