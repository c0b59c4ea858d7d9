"""`rlcore rollout`: generate and score samples of a data set, and write them in the format of a recorded run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import make_parser

_EXAMPLES = """\
examples:
  rlcore rollout DIR samples data.train=train.jsonl reward=gsm8k rollout=vllm sampling.samples_per_prompt=16
  rlcore rollout outputs/RUN samples                       the newest checkpoint, with the settings of its run
  rlcore rollout DIR samples preset=quickstart trainer.steps=10
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    description = (
        "Generate and score samples for data.train, for as many prompts as it has or for trainer.steps steps or"
        " trainer.epochs, without training. Settings are key=value, as for train. The same command continues after an"
        " interruption."
        " Train on the samples with  rlcore train … schedule.replay=DIRECTORY"
    )
    parser = make_parser("rollout", description, _EXAMPLES)
    parser.add_argument("model", type=Path, help="a run, one of its checkpoints, or a model directory")
    parser.add_argument("directory", type=Path, help="a new directory for the samples, or one to continue")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    options = parser.parse_intermixed_args(list(argv))

    from rlcore.api.inputs import Inputs
    from rlcore.api.rollout import roll_out

    typed = " ".join(shlex.quote(item) for item in argv)
    directory = options.directory.absolute()
    inputs = Inputs(settings=options.overrides)
    roll_out(options.model, directory, inputs, f"rlcore rollout {typed}", lambda text: print(text, flush=True))
    _report(directory)
    return 0


def _report(directory: Path) -> None:
    """Print how many samples there are, and how many have no reward."""
    from rlcore.data.recorded import open_batch
    from rlcore.trainer.recording import STEPS, recorded_steps

    steps = recorded_steps(directory / STEPS)
    statuses = [open_batch(directory / STEPS / f"{step:06d}")["reward_status"] for step in steps]
    counts = [sum(int((it == status).sum()) for it in statuses) for status in range(4)]
    print(f"samples    {sum(counts):,} in {len(steps)} steps: {directory / STEPS}")
    if sum(counts[1:]):
        print(f"no reward  {counts[1]:,} skipped, {counts[2]:,} timed out, {counts[3]:,} failed")
