"""`rlcore config`: print the config that the given settings compose, and the source of each value."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlcore.cli import make_parser

_EXAMPLES = """\
examples:
  rlcore config                                            every setting with its default
  rlcore config preset=quickstart algorithm=ppo            a preset with another algorithm
  rlcore config preset=gsm8k model.path=DIR > run.yaml     save it for  rlcore train preset=run.yaml
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    description = "Print the composed config. Settings are key=value, as for rlcore train; ??? marks required ones."
    parser = make_parser("config", description, _EXAMPLES)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    parser.add_argument("--json", action="store_true", help="as JSON, with the sources under a separate key")
    options = parser.parse_intermixed_args(list(argv))

    from rlcore.config.compose import compose
    from rlcore.config.show import as_json, as_yaml

    composed = compose(options.overrides, complete=False)
    sys.stdout.write(as_json(composed) if options.json else as_yaml(composed))
    return 0
