"""The command `rlcore`. Each subcommand is one module of this package with `main(argv) -> int`, imported on use.

Exit codes: 0 success; 1 the run failed; 2 the input is wrong (message only; --traceback adds the traceback); 75 a
process, node, disk or network failed, and the same command continues; 130 ctrl-C, even if the run wrote its checkpoint;
141 the reader of the output has closed it. SIGTERM: 0 if the run wrote its checkpoint, 143 before its first step.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcore.cli.ending import FAILED, INPUT, INTERRUPTED, PIPE_CLOSED, RETRY, reported

if TYPE_CHECKING:
    from argparse import ArgumentParser

_TEMPORARY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
COMMANDS = {
    "train": "train a model",
    "eval": "score a model or a checkpoint on held-out prompts",
    "rollout": "generate and score samples without training",
    "list-plugins": "list installed plugins without importing them",
    "config": "print the composed configuration and the source of each value",
    "export": "write a checkpoint as a Hugging Face directory",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version"):
        from rlcore.version import __version__

        print(f"rlcore {__version__}")
        return 0
    with reported():
        return _guarded(arguments[0], arguments[1:])


def make_parser(command: str, description: str, examples: str) -> ArgumentParser:
    """Create the parser of a subcommand, with the option --traceback."""
    from argparse import ArgumentParser, RawDescriptionHelpFormatter

    formatter = RawDescriptionHelpFormatter
    parser = ArgumentParser(
        prog=f"rlcore {command}", description=description, epilog=examples, formatter_class=formatter
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of input errors")
    return parser


def _guarded(name: str, arguments: list[str]) -> int:
    """Run a command and convert errors to messages and exit codes."""
    from rlcore.errors import InfrastructureError, RlcoreError, UserError

    try:
        code = _command(name, arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except RlcoreError as error:
        code = INPUT if isinstance(error, UserError) else RETRY if isinstance(error, InfrastructureError) else FAILED
        if "--traceback" in arguments:
            import traceback

            traceback.print_exception(error)
            return code
        print(f"error: {error}", file=sys.stderr)
        for note in () if code == INPUT else getattr(error, "__notes__", []):
            print(note, file=sys.stderr)
        return code
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno in _TEMPORARY and "--traceback" not in arguments:
            print(f"error: a disk or the network failed: {error}\nType the same command again.", file=sys.stderr)
            return RETRY
        message = _resource_message(error)
        if not message or "--traceback" in arguments:
            raise
        print(f"error: {message}", file=sys.stderr)
        return FAILED if isinstance(error, MemoryError) else INPUT


def _resource_message(error: OSError | MemoryError) -> str:
    """Return a message for a setting that exceeds a limit of the machine, or "" if the traceback is needed."""
    if isinstance(error, MemoryError):
        return (
            "this machine has no more memory for this process\n"
            "Lower trainer.prompts_per_step or sampling.samples_per_prompt, or use a smaller dataset; "
            "--traceback shows where it failed"
        )
    if error.errno == errno.ENAMETOOLONG:
        return f"{error.strerror}: '{str(error.filename)[:60]}…'\nType a shorter name or path."
    return ""


def _command(name: str, arguments: list[str]) -> int:
    import importlib

    if name in COMMANDS:
        module = importlib.import_module(f"rlcore.cli.{name.replace('-', '_')}")
        return int(module.main(arguments))
    from rlcore.errors import ConfigError, did_you_mean
    from rlcore.registry import catalog, resolve
    from rlcore.registry.known import known_names

    plugins = [entry.name for entry in catalog().of("command")]
    absent = [command for command in known_names("command") if command not in plugins]
    if name.partition("@")[0] in (*plugins, *absent):
        return int(resolve("command", name).object(arguments))
    known = [*COMMANDS, *plugins]
    hint = did_you_mean(name, [*known, *absent])
    raise ConfigError(f"no command '{name}'.{hint}\nCommands: {', '.join(known)}; rlcore --help")


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rlcore COMMAND [arguments]",
            "",
            "Reinforcement-learning post-training of language models.",
            "",
            *lines,
            "",
            "  from the package rlcore-report: show, report, watch, compare",
            "  from the package rlcore-workbench: doctor, new-plugin, check, try, migrate",
            "  rlcore COMMAND --help shows each command with examples; rlcore --version",
            "",
            "example: rlcore train preset=quickstart",
        ]
    )
