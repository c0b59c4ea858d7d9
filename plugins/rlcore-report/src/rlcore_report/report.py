"""`rlcore report RUN…`: one self-contained HTML page about one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import make_parser
from rlcore.errors import ConfigError
from rlcore_report.page import page
from rlcore_report.run import read_run

_EXAMPLES = """\
examples:
  rlcore report outputs/NAME                      writes outputs/NAME/report.html
  rlcore report outputs/ONE outputs/OTHER -o both.html    curves on top of each other, settings that differ

The page is one file without network access: open it in a browser, attach it to a mail, keep it next to the run.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = make_parser("report", "Write a page about one or several runs: one HTML file.", _EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help="directory of a run")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write; default: RUN/report.html")
    options = parser.parse_args(list(argv))
    if options.output is None and len(options.runs) > 1:
        raise ConfigError("several runs need a file for their page\nType  -o FILE.html")
    runs = [read_run(directory) for directory in options.runs]
    target = options.output or options.runs[0] / "report.html"
    try:
        target.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}\nType  -o FILE.html") from error
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB, open it in a browser")
    return 0
