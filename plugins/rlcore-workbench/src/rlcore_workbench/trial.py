"""`rlcore try`: run a reward on a file of completions, or an algorithm's loss on a small batch, without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import make_parser
from rlcore.errors import ConfigError, did_you_mean
from rlcore_workbench.options import parse_options

KINDS = ("reward", "algorithm")
_EXAMPLES = """\
examples:
  rlcore try reward gsm8k completions.jsonl              lines such as {"completion": "#### 4", "answer": "4"}
  rlcore try reward my_rewards.py:score outputs/RUN/samples.jsonl
  rlcore try reward gsm8k,length completions.jsonl --option length.max=512
  rlcore try algorithm grpo --option clip_high=0.28      on a generated batch
  rlcore try algorithm grpo --save my_batch              save that batch for changes
  rlcore try algorithm grpo my_batch

exit code: 0 all samples are scored and all losses are valid, 1 some are not, 2 the input is wrong
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = make_parser("try", "Try a reward or an algorithm without training.", _EXAMPLES)
    parser.add_argument("kind", help=", ".join(KINDS))
    parser.add_argument("name", help="a registered name, module:attribute or file.py:attribute; several rewards: a,b")
    parser.add_argument("file", type=Path, nargs="?", help="completions as JSONL, or the directory of a recorded batch")
    parser.add_argument("--option", action="append", default=[], metavar="K=V", help="a setting of the plugin")
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="time limit of a reward per sample, in seconds; default: 10",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=20,
        metavar="N",
        help="show this many samples of a reward; all are scored; default: 20",
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="save the batch of an algorithm")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(list(argv))
    if options.kind not in KINDS:
        raise ConfigError(
            f"nothing to try for the kind '{options.kind}'.{did_you_mean(options.kind, list(KINDS))}\n"
            f"Type  rlcore try reward NAME FILE   or  rlcore try algorithm NAME   ; others: rlcore check {options.kind} NAME"
        )
    settings = parse_options(options.option)
    if options.kind == "algorithm":
        from rlcore_workbench.try_algorithm import try_algorithm

        return try_algorithm(options.name, settings, batch=options.file, save=options.save, as_json=options.json)
    if options.file is None:
        raise ConfigError(f"no completions to score\nType  rlcore try reward {options.name} completions.jsonl")
    if options.save or options.timeout <= 0:
        wrong = "--save is for algorithms" if options.save else f"--timeout {options.timeout:g}: expected more than 0"
        raise ConfigError(f"{wrong}\nType  rlcore try reward {options.name} {options.file}")
    from rlcore_workbench.try_reward import try_rewards

    names = options.name.split(",")
    return try_rewards(
        names, options.file, settings, timeout_s=options.timeout, max_rows=options.rows, as_json=options.json
    )
