"""`rlcore check`: run the contract suite of a kind for one plugin and print one line per test.

The suite runs in a child process (child.py), so a plugin that hangs or crashes fails one test and not the command.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.cli import make_parser
from rlcore.errors import ConfigError, did_you_mean
from rlcore_workbench.options import parse_options, read_rows
from rlcore_workbench.process import Child

KINDS = ("algorithm", "backend", "dataset", "dispatch", "environment", "hooks", "reward", "rollout", "tracker")
_EXAMPLES = """\
examples:
  rlcore check reward gsm8k --examples graded.jsonl      lines such as {"completion": "#### 4", "answer": "4", "score": 1}
  rlcore check algorithm grpo --option minibatches=2 --option kl.coefficient=0.01
  rlcore check algorithm best_of_n --suite keeps_every_sample=false
  rlcore check environment calculator --examples episodes.jsonl     lines such as {"prompt": "1+1", "completions": ["2"], "score": 1}
  rlcore check rollout vllm --device cuda:0 --tolerance 0.05
  rlcore check reward my_rewards.py:score                your own file; EXAMPLES in it are used

exit code: 0 every test passed, 1 one failed, 2 the input is wrong
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    options = _parser().parse_args(list(argv))
    if options.kind not in KINDS:
        raise ConfigError(
            f"no contract suite for the kind '{options.kind}'.{did_you_mean(options.kind, list(KINDS))}\n"
            f"Type  rlcore check KIND NAME   with one of: {', '.join(KINDS)}"
        )
    if options.timeout <= 0:
        raise ConfigError(f"--timeout {options.timeout:g}: expected more than 0\nType  --timeout 600")
    if options.examples and options.kind not in ("reward", "environment"):
        raise ConfigError(
            f"--examples is for rewards and environments, not for kind '{options.kind}'\nLeave out  --examples"
        )
    if options.kind == "dataset" and not options.data:
        raise ConfigError(f"dataset '{options.name}' needs a file to open\nType  --data FILE")
    spec = {
        "kind": options.kind,
        "name": options.name,
        "options": parse_options(options.option),
        "examples": _examples(options.examples, options.kind) if options.examples else None,
        "data": options.data,
        "model": options.model,
        "device": options.device,
        "tolerance": options.tolerance,
        "skip": options.skip,
        "suite": parse_options(options.suite),
    }
    return Report(verbose=options.verbose).run(spec, options.timeout)


def _parser() -> argparse.ArgumentParser:
    description = "Run the contract suite of a kind for one plugin, in a separate process."
    parser = make_parser("check", description, _EXAMPLES)
    parser.add_argument("kind", help=", ".join(KINDS))
    parser.add_argument("name", help="a registered name, name@package, module:attribute or file.py:attribute")
    parser.add_argument("--option", action="append", default=[], metavar="K=V", help="a setting of the plugin")
    parser.add_argument("--examples", type=Path, metavar="FILE", help="JSONL of samples or episodes with their `score`")
    parser.add_argument("--data", default="", metavar="FILE", help="file for a dataset to open")
    parser.add_argument(
        "--model", default="", metavar="DIR", help="model for engines and backends; default: a tiny one"
    )
    parser.add_argument("--device", default="cpu", help="device for engines and backends; default: cpu")
    parser.add_argument("--tolerance", type=float, metavar="X", help="tolerance of log-probs; about 0.05 for bfloat16")
    parser.add_argument("--suite", action="append", default=[], metavar="K=V", help="set an attribute of the suite")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="WORDS", help="leave out tests whose names contain these words"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="time limit of the whole suite in seconds; default: 600",
    )
    parser.add_argument("--verbose", action="store_true", help="show the traceback of every failure")
    return parser


def _examples(path: Path, kind: str) -> list[tuple[Any, ...]]:
    """Read examples from JSONL. A `score` of null means that the reward does not apply.

    For rewards, a line is a sample and its `score`. For environments, it is a row with `completions`, the responses of
    the model turn by turn, and `score`, the reward of the episode.
    """
    examples: list[tuple[Any, ...]] = []
    for number, row in enumerate(read_rows(path, "samples with a score"), 1):
        score = row.pop("score", "nothing")
        if kind == "environment":
            texts = row.pop("completions", None)
            if not isinstance(texts, list) or not texts or not (score is None or isinstance(score, int | float)):
                raise ConfigError(
                    f"{path}, example {number}: `completions`, a list, or a numeric `score` is missing\n"
                    'Write  {"completions": ["...", "..."], "score": 1.0, and the columns that the environment reads}'
                )
            examples.append((row, texts, None if score is None else float(score)))
            continue
        if "completion" not in row or (score is not None and not isinstance(score, int | float)):
            raise ConfigError(
                f"{path}, example {number}: `completion` or a numeric `score` is missing\n"
                'Write  {"completion": "...", "score": 1.0, and the columns that the reward reads}'
            )
        examples.append((row, None if score is None else float(score)))
    return examples


class Report:
    """Report of the tests, printed line by line as the child process runs them."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self.passed = self.failed = 0
        self.unchecked: list[str] = []
        self._running = "setup"
        self._ended = False

    def run(self, spec: dict[str, Any], timeout_s: float) -> int:
        """Run the suite in a child process and return the exit code."""
        start = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as printed:
            text = json.dumps(spec)
            with Child("rlcore_workbench.child", text, printed=printed, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1") as child:
                for message in child.messages(timeout_s, together=True):
                    self._take(message)
            if not self._ended:
                self.failed += 1
                printed.seek(0)
                last = [f"| {line}" for line in printed.read().splitlines()[-8:]]
                print(f"  FAIL  {self._running}", child.reason, *last, sep="\n        ")
        for what in self.unchecked:
            print(f"  not checked  {what}")
        print(f"{self.passed} of {self.passed + self.failed} passed in {time.monotonic() - start:.1f} s")
        return 1 if self.failed or not self.passed else 0

    def _take(self, message: dict[str, Any]) -> None:
        """Handle one message of the child process."""
        match message["event"]:
            case "error":
                raise ConfigError(message["text"])
            case "plugin":
                print(f"check {message['text']}", flush=True)
            case "start":
                self._running = message["test"]
            case "unchecked":
                self.unchecked.append(message["text"])
            case "end":
                self._ended = True
            case "test":
                self._line(message)

    def _line(self, message: dict[str, Any]) -> None:
        good = message["outcome"] == "passed"
        if message["outcome"] == "skipped":
            self.unchecked.append(f"{message['test']}: {message['reason']}")
            return
        self.passed, self.failed = self.passed + good, self.failed + (not good)
        print(f"  {'ok  ' if good else 'FAIL'}  {message['test']:<72} {message['seconds']:6.2f} s", flush=True)
        if not good:
            text = message["details"] if self._verbose else message["reason"]
            print("\n".join(f"        {line}" for line in text.splitlines()), flush=True)
