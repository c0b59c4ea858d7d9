"""Generate the tables of docs/migrate.md with the tables of `rlcore migrate`:  python docs/make_migrate.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlcore_workbench.migrate import translated
from rlcore_workbench.migration.answer import Answer
from rlcore_workbench.migration.checked import written

PAGE = Path(__file__).with_name("migrate.md")
EXAMPLES = PAGE.with_name("migrate")
_HOWS = {"set": "set", "always": "needs none", "partly": "partly", "none": "none"}


def page() -> str:
    """Return docs/migrate.md with the tables of all examples."""
    text = PAGE.read_text(encoding="utf-8")
    for name in ("verl.sh", "trl.py"):
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        text = before + begin + "\n".join(_rows(EXAMPLES / name)) + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
    return text


def _rows(example: Path) -> Iterator[str]:
    yield "| key | value | | rlcore |"
    yield "|---|---|---|---|"
    for line in translated([str(example)]).lines:
        if line.given:
            value = f"`{line.value}`" if line.value else ""
            yield f"| `{line.key}` | {value} | {_HOWS[line.answer.how]} | {_counterpart(line.answer)} |"


def _counterpart(answer: Answer) -> str:
    """Return settings and reason of an answer."""
    settings = " ".join(f"`{name}={written(value)}`" for name, value in answer.settings)
    return "; ".join(part for part in (settings, answer.note.replace("|", "\\|")) if part)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
