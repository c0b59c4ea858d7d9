"""`rlcore report RUN…`: one self-contained HTML page about one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import make_parser
from rlcore.errors import ConfigError
from rlcore_report.page import page
from rlcore_report.run import read_run
from rlcore_report.timeline import write_trace

_EXAMPLES = """\
examples:
  rlcore report outputs/NAME                      writes outputs/NAME/report.html
  rlcore report outputs/ONE outputs/OTHER -o both.html    curves of both in each chart, settings that differ
  rlcore report outputs/NAME --trace trace.json.gz        recorded calls, for ui.perfetto.dev

The page is one file that needs no network: open it in a browser, attach it to an email, or keep it with the run.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = make_parser("report", "Write a page about one or several runs: one HTML file.", _EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help="directory of a run")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write; default: RUN/report.html")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write the timeline for ui.perfetto.dev")
    options = parser.parse_args(list(argv))
    if options.output is None and len(options.runs) > 1:
        raise ConfigError("several runs need a file for their page\nType  -o FILE.html")
    runs = [read_run(directory) for directory in options.runs]
    if options.trace is not None and not any(run.timeline for run in runs):
        raise ConfigError(
            f"{options.runs[0]} has no timeline\nTrain with  plugins.hooks=[report]  or leave out  --trace"
        )
    target = options.output or options.runs[0] / "report.html"
    try:
        target.write_text(page(runs), encoding="utf-8")
        if options.trace is not None:
            count = write_trace([row for run in runs for row in run.timeline], options.trace)
            print(f"{options.trace}: {count:,} calls, open it in ui.perfetto.dev")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}\nType  -o FILE.html") from error
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB, open it in a browser")
    return 0
