"""`rlcore export`: write a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

_EXAMPLES = """\
examples:
  rlcore export outputs/RUN my-model                       the newest checkpoint of a run
  rlcore export outputs/RUN/checkpoints/step_000100 my-model
  python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('my-model')"
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="rlcore export",
        description="Write the model of a checkpoint, with its tokenizer, as a directory in Hugging Face layout.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="a run, or one of its checkpoints")
    parser.add_argument("directory", type=Path, help="a new directory")
    parser.add_argument("--role", default="actor", help="actor (default) or critic")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of input errors")
    options = parser.parse_args(list(argv))

    from rlcore.trainer.export import export, find_checkpoint

    checkpoint = find_checkpoint(options.checkpoint)
    export(checkpoint, options.directory, options.role)
    print(f"{options.role} of step {checkpoint.step}: {options.directory}")
    return 0
