"""`rlcore watch RUN`: the page of a run, refreshed while it trains, on this machine only; or the terminal screen."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live

from rlcore.cli import make_parser
from rlcore.errors import ConfigError, RlcoreError
from rlcore_report.page import document, packed
from rlcore_report.payload import payload
from rlcore_report.run import RecordedRun, read_run
from rlcore_report.show import screen

_EXAMPLES = """\
examples:
  rlcore watch outputs/NAME                   prints an address for the browser on this machine
  rlcore watch outputs/NAME --text            in the terminal, until the run ends
  ssh -L 8642:127.0.0.1:8642 HOST             then open here the address that `rlcore watch` printed on HOST
"""
_PORT = 8642
_SAMPLE_BYTES = 2_000_000
"""Maximum size of the samples in each refresh, in bytes before compression."""
_TEXT_EVERY_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Run the command until Ctrl-C, or with --text until the run ends, and return the exit code."""
    parser = make_parser("watch", "Show a run while it trains: a page on 127.0.0.1, or the terminal.", _EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help="directory of a run")
    parser.add_argument("--text", action="store_true", help="show one run in the terminal instead of a page")
    parser.add_argument("--port", type=int, default=_PORT, metavar="N", help=f"port; 0: any. Default: {_PORT}")
    options = parser.parse_args(list(argv))
    for directory in options.runs:
        read_run(directory)
    try:
        return _text(options.runs[0]) if options.text else _serve(options.runs, options.port)
    except KeyboardInterrupt:
        return 0


def _text(directory: Path) -> int:
    """Draw the screen of a run until it ends; without a terminal, print a line for each new step."""
    console, shown = Console(highlight=False), -1
    with Live(console=console, auto_refresh=False) as live:
        while True:
            run = read_run(directory)
            if console.is_terminal:
                live.update(screen(run), refresh=True)
            elif run.step > shown or run.state != "running":
                shown = run.step
                print(_line(run), flush=True)
            if run.state != "running":
                return 0
            time.sleep(_TEXT_EVERY_S)


def _line(run: RecordedRun) -> str:
    reward = run.metrics.known("reward/mean")
    return f"step {run.step} of {run.total_steps}: {run.state}" + (f", reward {reward[-1][1]:.3g}" if reward else "")


def _serve(directories: Sequence[Path], port: int) -> int:
    with Watch(directories, port) as server:
        print(f"{server.address}     ctrl-C ends the watch, not the run", flush=True)
        server.serve_forever()
    return 0


class Watch(ThreadingHTTPServer):
    """Server of the page and its data on 127.0.0.1, for clients that know the token.

    Requests for another host name are refused, so that a web page that points its name at 127.0.0.1 reads nothing.
    """

    daemon_threads = True

    def __init__(self, directories: Sequence[Path], port: int) -> None:
        """Listen on a port.

        Raises:
            ConfigError: the port is in use, or may not be used.
        """
        self.directories = directories
        self.token = secrets.token_urlsafe(16)
        self._cached: tuple[object, bytes] = ((), b"")
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"--port {port} cannot be used: {reason}\nType  --port 0  for any free port") from error

    @property
    def address(self) -> str:
        """Address of the page, with the token."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def data(self) -> bytes:
        """Return the data of the page, read again only if a file has changed."""
        runs = [read_run(directory) for directory in self.directories]
        names = ("run.json", "metrics.jsonl", "samples.jsonl")
        files = [directory / name for directory in self.directories for name in names]
        marks = [(it.stat().st_size, it.stat().st_mtime_ns) if it.exists() else None for it in files]
        seen = (marks, [run.state for run in runs])
        if self._cached[0] != seen:
            self._cached = (seen, packed(payload(runs, most_sample_bytes=_SAMPLE_BYTES)))
        return self._cached[1]


class _Handler(BaseHTTPRequestHandler):
    server: Watch

    def do_GET(self) -> None:
        """Answer with the page, its data, or a refusal."""
        host = self.headers.get("Host", "")
        _, token, *rest = [*urlsplit(self.path).path.split("/"), ""]
        if host not in (f"127.0.0.1:{self.server.server_port}", f"localhost:{self.server.server_port}"):
            return self._answer(403, b"This address serves 127.0.0.1 only.\n", "text/plain")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._answer(
                403, b"The token is missing or wrong: open the address that rlcore watch printed.\n", "text/plain"
            )
        if rest[:1] == ["data"]:
            return self._data()
        if rest[:1] == [""]:
            page = document(", ".join(it.name for it in self.server.directories), "", live="data")
            return self._answer(200, page.encode(), "text/html; charset=utf-8")
        return self._answer(404, b"There is no such page.\n", "text/plain")

    def _data(self) -> None:
        try:
            self._answer(200, self.server.data(), "application/gzip")
        except RlcoreError as error:
            self._answer(410, f"{error}\n".encode(), "text/plain")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log line of each request."""
