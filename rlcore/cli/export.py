"""`rlcore export`: write a checkpoint as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import make_parser

_EXAMPLES = """\
examples:
  rlcore export outputs/RUN my-model                       the newest checkpoint of a run
  rlcore export outputs/RUN/checkpoints/step_000100 my-model --dtype bfloat16
  rlcore export outputs/RUN/checkpoints/best my-model      with checkpoint.keep_best
  python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('my-model')"
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    description = "Write the model of a checkpoint, with its tokenizer, as a directory in Hugging Face layout."
    parser = make_parser("export", description, _EXAMPLES)
    parser.add_argument("checkpoint", type=Path, help="a run, or one of its checkpoints")
    parser.add_argument("directory", type=Path, help="a new directory")
    parser.add_argument("--role", default="actor", help="actor (default) or critic")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (float32)")
    options = parser.parse_args(list(argv))

    from rlcore.trainer.export import export, find_checkpoint

    checkpoint = find_checkpoint(options.checkpoint)
    export(checkpoint, options.directory, options.role, options.dtype or "")
    print(f"{options.role} of step {checkpoint.step}: {options.directory}")
    return 0
