"""What came of a run, for the end of the display."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.trainer.run import Run


def summarise(run: Run, overrides: Sequence[str], error: BaseException | None) -> dict[str, Any]:
    """Keys as `rlcore.trackers.console` shows them; what is not known is left out."""
    counters = run.counters
    latest = run.checkpoints.latest()
    directory = _short(run.directory)
    typed = " ".join(shlex.quote(item) for item in overrides if not item.startswith(("run.name=", "run.resume=")))
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
        "error": _text(error),
        "directory": str(directory),
        "metrics_path": str(directory / "metrics.jsonl"),
        "samples_path": str(directory / "samples.jsonl"),
        "checkpoint": str(_short(latest.path)) if latest else None,
        "resume_command": f"rlcore train {typed} run.name={run.directory.name}" if latest else None,
        "next_command": f"rlcore eval {shlex.quote(str(directory))} --samples samples.jsonl" if latest else None,
    }
    return {name: value for name, value in summary.items() if value is not None}


def _short(path: Path) -> Path:
    """As one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}".split("\n")[0]
