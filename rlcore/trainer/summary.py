"""The summary at the end of a run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rlcore.registry import catalog
from rlcore.registry.known import known_names
from rlcore.trainer.run import Run, error_text


def summarize(run: Run, error: BaseException | None, *, in_python: bool) -> dict[str, Any]:
    """Return the summary of a run for `rlcore.trackers.console`, without unknown values."""
    counters = run.counters
    latest = run.checkpoints.latest()
    directory = _short(run.directory)
    verb, target = ("eval", "--samples samples.jsonl") if run.config.data.eval else ("export", "my-model")
    again = f"rlcore train {shlex.quote(str(directory))}"
    if in_python:
        again = f'rlcore.train(…, settings={{…, "run.name": "{run.directory.name}"}})'
    summary: dict[str, Any] = {
        "steps": counters.step,
        "total_steps": run.config.trainer.steps,
        "seconds": counters.seconds,
        "samples": counters.samples,
        "tokens": counters.tokens,
        "reward_first": counters.first_reward,
        "reward_last": counters.last_reward,
        "eval_first": counters.first_eval,
        "eval_last": counters.last_eval,
        "error": error_text(error) if error else None,
        "directory": str(directory),
        **{
            f"{name}_path": str(directory / f"{name}.jsonl")
            for name in ("metrics", "samples")
            if (run.directory / f"{name}.jsonl").exists()
        },
        "checkpoint": str(_short(latest.path)) if latest else None,
        "resume_command": again if latest else None,
        "next_command": f"rlcore {verb} {shlex.quote(str(directory))} {target}" if latest else None,
        "report_command": "\n".join(_to_report(directory)),
    }
    return {name: value for name, value in summary.items() if value is not None}


def _to_report(directory: Path) -> list[str]:
    """Return the lines to type to see the run: the command, after its installation if it is missing."""
    command = f"rlcore report {shlex.quote(str(directory))}"
    installed = any(not catalog().hidden(entry) for entry in catalog().find("command", "report"))
    return [command] if installed else [f"pip install {known_names('command')['report']}", command]


def _short(path: Path) -> Path:
    """Return the path relative to the working directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
