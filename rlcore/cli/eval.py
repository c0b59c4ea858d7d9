"""`rlcore eval`: score a checkpoint or a model on held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import make_parser

_EXAMPLES = """\
examples:
  rlcore eval outputs/RUN                                  the newest checkpoint, with the settings of its run
  rlcore eval outputs/RUN eval.samples_per_prompt=8 eval.temperature=1
  rlcore eval DIR data.eval=test.jsonl reward=gsm8k        any model in Hugging Face layout
  rlcore eval DIR preset=quickstart --samples samples.jsonl
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    description = "Score a checkpoint or a model on the prompts of data.eval. Settings are key=value, as for train."
    parser = make_parser("eval", description, _EXAMPLES)
    parser.add_argument("model", type=Path, help="a run, one of its checkpoints, or a model directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write every sample with its reward, as JSONL")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    options = parser.parse_intermixed_args(list(argv))

    from rlcore.api.evaluate import evaluate_inputs
    from rlcore.api.inputs import Inputs
    from rlcore.api.run import is_writable
    from rlcore.errors import ConfigError

    if options.samples and not is_writable(options.samples.absolute().parent):
        raise ConfigError(f"--samples={options.samples} cannot be written\nType  --samples FILE")
    found = evaluate_inputs(options.model, Inputs(settings=options.overrides), samples=bool(options.samples))
    if options.samples:
        options.samples.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in found.samples]
        options.samples.write_text("".join(lines), encoding="utf-8")
    if options.json:
        print(json.dumps(found.metrics | {"seconds": found.seconds}))
        return 0
    for name, value in found.metrics.items():
        print(f"{name.removeprefix('eval/'):<16} {value:g}")
    print(f"{'seconds':<16} {found.seconds:.1f}")
    return 0
