"""Reader of shell scripts: words are equal to those of a shell, or unreadable with a reason."""

import shutil
import subprocess

import pytest
from rlcore_workbench.migration.shell import read_commands

from rlcore.errors import ConfigError


def words_of(script):
    """Return the words of the last command; unreadable ones as (text, reason)."""
    commands, _ = read_commands(script)
    return [(word.text, word.unreadable) if word.unreadable else word.text for word in commands[-1].words]


def reasons(script):
    commands, _ = read_commands(script)
    return [word.unreadable for word in commands[-1].words if word.unreadable]


SCRIPTS = {
    "arithmetic": "a=3\nb=$((a * 2))\nrun x=$((1024 * (b + 1))) y=$(( -7 / 2 ))",
    "parentheses": "run x=$(((1 + 2) * 3))",
    "default": "run x=${A:-b} y=${A-'c'} z=\"${A:-e f}\"",
    "nested default": 'run x=${A:-"${B:-c}/d"}/e',
    "default with arithmetic": "n=2\nrun x=${A:-$((n * 4))}",
    "default of another variable": "n=2\nA=${A:-$n}\nrun x=$A",
    "assigned default": "run ${A:=b} $A",
    "empty counts as unset": "A=\nrun x=${A:-b} y=${A-c} z=${A:+d}",
    "paths": "a=x b=y\nc=/r/$a/$b\nrun $c d=$a/s/$b",
    "two assignments in a line": "a=x b=y\nrun $a $b",
    "quoted blanks": "a=x\nrun $a/'b c'/d",
    "string": "a=x\nrun \"$a $a  ${a}$a $((1 + 1)) \\\"q\\\"\"",
    "raw string": "run 'a b' c='[\"d\",\"e\"]'",
    "array": "A=(x=1 'y=a b')\nA+=(z=3)\nrun \"${A[@]}\" end",
    "text of several words": "A=' a=1\n  b=2 '\nrun $A c=3",
    "appended text": "A=a\nA+=b\nrun $A",
    "empty variable": "A=\nrun $A end",
    "function": "f() { run \"$x\"; }\nx=1\nf",
    "if": "d=gpu\nif [ \"$d\" = npu ]; then x=1; elif [[ $d == gpu ]]; then x=2; else x=3; fi\nrun $x",
    "number test": "n=8\nif [ $n -gt 4 ]; then x=a; else x=b; fi\nrun $x",
    "case": "d=b\ncase \"$d\" in a) x=1 ;; b|c) x=2 ;; *) x=3 ;; esac\nrun $x",
    "and or": "d=a\n[ $d = a ] && x=1 || x=2\n[ -z \"$d\" ] && x=3\nrun $x",
    "loop over one value": "for i in a; do run $i; done",
    "here document": "run a\nread_nothing=1\nrun b <<EOF\nx=1 run c\nEOF",
    "words of a here document": "n=2\nread -r -d '' words <<EOF || true\na --b ${n} \\\n  'c'\nEOF\nrun $words",
    "comment in an array": "A=(x=1 # y=2\n# z=3\nw=4)\nrun \"${A[@]}\"",
    "array in a string": "A=(x=1 y=2)\nB=\"${A[@]}\"\nrun $B end",
    "default in brackets": "run x=${A:-[\"/a\",\"/c\"]}",
    "and with a comment": "[ a = a ] && # b\n  x=1\nrun $x",
    "continued lines": "run a=1 \\\n  b=2 \\\n",
    "comment": "run a=1 # b=2",
    "exit": "if [ a = b ]; then exit 1; fi\nx=1\nrun $x",
}  # fmt: skip


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_words_are_equal_to_those_of_bash(script):
    recorder = 'run() { printf "%s\\0" run "$@"; printf "\\1"; }\n'
    done = subprocess.run(["bash"], input=recorder + script, env={}, capture_output=True, text=True, check=True)
    last = done.stdout.split("\1")[-2]

    assert words_of(script) == last.split("\0")[:-1]


def test_a_variable_that_the_script_does_not_set_stays_in_the_word():
    assert words_of('run x=$HOME/data y="${N}" ${MORE}') == ["run", "x=${HOME}/data", "y=${N}", "${MORE}"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("run x=$(date)", "it is the output of a command"),
        ("x=`date`\nrun x=$x", "it is the output of a command"),
        ("run x=$1", "$1 is known only when the script runs"),
        ("run x=$((N * 2))", "the script does not set N"),
        ("x=a\nrun x=$((x))", "a refers to itself"),
        ("run x=$((2 ** 70))", "the arithmetic 2 ** 70 is not evaluated"),
        ("A=abc\nrun x=${A%c}", "${A%c} is not evaluated"),
        ("run x={a,b}", "braces without quotes are an expansion"),
        ("A='a b'\nrun x=$A", "a value with blanks is not quoted"),
        ("run x='$HOME'", "it holds a literal dollar sign"),
        ("for i in a b; do run x=$i; done", "it changes in each pass of the loop at line 1"),
        ("A[0]=x\nrun x=$A", "an array is changed element by element"),
    ],
)
def test_an_unknown_value_is_unreadable(script, reason):
    found = reasons(script.replace("x=a\n", "a=a\nx=a\n"))

    assert found == [reason]


@pytest.mark.parametrize(
    "script",
    [
        "if test -e /x; then x=8; else x=16; fi\nrun a=1 x=$x",
        "x=8\nif test -e /x; then x=16; fi\nrun a=1 x=$x",
        "x=8\ntest -e /x && x=16\nrun a=1 x=$x",
        "x=8\nwhile read line; do x=16; done\nrun a=1 x=$x",
        'd=$(uname)\ncase "$d" in a) x=8 ;; *) x=16 ;; esac\nrun a=1 x=$x',
    ],
)
def test_a_value_that_differs_between_branches_is_unreadable(script):
    (reason,) = reasons(script)

    assert "set it differently: " in reason
    assert "8" in reason
    assert "16" in reason


def test_only_the_words_that_branches_add_to_an_array_are_unreadable():
    script = 'A=(a=1)\nif test -e /x; then A+=(b=2); fi\nA+=(c=3)\nrun "${A[@]}"'

    reason = "not all branches at line 2 have it"
    assert words_of(script) == ["run", "a=1", ("b=2", reason), "c=3"]


def test_a_branch_that_ends_the_script_does_not_count():
    script = 'if test -e /x; then x=1; else echo "x needs /x"; exit 1; fi\nrun $x'

    assert words_of(script) == ["run", "1"]


def test_a_branch_decided_by_known_values_is_reported():
    _, remarks = read_commands('D=${D:-gpu}\nif [ "$D" = npu ]; then x=1; fi\nrun')

    assert remarks == ['line 2: `[ "${D}" = npu ]` is false here, so its branch is left out']


def test_a_script_that_is_not_shell_syntax_is_refused():
    with pytest.raises(ConfigError, match="cannot be read near line"):
        read_commands("x=1\nif then\n")
