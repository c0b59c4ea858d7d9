"""The files that describe how a run was started, so that it can be continued and repeated.

RUN/config.yaml     the composed configuration; `rlcore train RUN` and `rlcore train preset=RUN/config.yaml` read it
RUN/starts.jsonl    one line for each start: time, command, directory, Python, packages and state of git
"""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config.build import to_plain
from rlcore.errors import ConfigError, did_you_mean_path

if TYPE_CHECKING:
    from rlcore.trainer.plan import Plan

GENERATE = "rlcore.trainer.recording:Generate"
"""Algorithm of `rlcore rollout`."""
logger = logging.getLogger(__name__)
_CONFIG = "config.yaml"
_STARTS = "starts.jsonl"
_GIT_TIMEOUT_S = 10.0


def record_start(plan: Plan) -> None:
    """Write both files to the directory of a run that is about to start or to resume."""
    import yaml  # type: ignore[import-untyped]

    beside = plan.directory / f".{_CONFIG}.writing"
    text = yaml.safe_dump(to_plain(plan.config), sort_keys=False, allow_unicode=True)
    beside.write_text(f"# Settings of this run; to continue it:  rlcore train RUN\n{text}", encoding="utf-8")
    beside.replace(plan.directory / _CONFIG)
    line = {
        "time": round(time.time(), 3),
        "step": plan.resume.step if plan.resume else 0,
        "command": sys.argv,
        "directory": str(Path.cwd()),
        "python": f"{platform.python_version()} ({sys.executable})",
        "machine": f"{platform.node()}, {platform.platform()}",
        "packages": _packages(),
        "git": _git_state(Path.cwd()),
    }
    with (plan.directory / _STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def recorded_config(directory: Path) -> dict[str, Any]:
    """Return the settings with which a run in this directory continues: its own, and its checkpoints if there are any.

    Raises:
        ConfigError: it is not the directory of a run, or its config.yaml is damaged.
    """
    import yaml

    if not directory.is_dir():
        runs = [path.parent for path in directory.absolute().parent.glob(f"*/{_CONFIG}")]
        raise ConfigError(
            f"'{directory}' is not key=value, and there is no run of this name.{did_you_mean_path(directory, runs)}\n"
            f"Type  {directory}=VALUE   or  rlcore train outputs/RUN"
        )
    config: Any
    try:
        config = yaml.safe_load((directory / _CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:  # of a version that did not write it
        from rlcore.trainer.checkpoint import newest

        checkpoint = newest(directory / "checkpoints")
        config = dict(checkpoint.state["config"]) if checkpoint else None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{directory / _CONFIG} is damaged: {reason}\nCorrect it, or remove it to use the settings of the checkpoint."
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"'{directory}' is not the directory of a run: it has neither {_CONFIG} nor a checkpoint\n"
            "Type  rlcore train outputs/RUN   or settings:  rlcore train model.path=DIR data.train=FILE …"
        )
    if config.get("algorithm") == {"name": GENERATE}:
        raise ConfigError(
            f"{directory} has samples of  rlcore rollout\nTrain on them with  rlcore train … schedule.replay={directory}"
        )
    _warn_moved(directory)
    place = {"directory": str(directory.absolute().parent), "name": directory.absolute().name, "resume": "auto"}
    return {**config, "run": {**config.get("run", {}), **place}}


def _warn_moved(directory: Path) -> None:
    """Warn if a run continues in another working directory than that of its last start."""
    try:
        before = json.loads((directory / _STARTS).read_text(encoding="utf-8").splitlines()[-1])["directory"]
    except (OSError, ValueError, IndexError, KeyError, TypeError):  # written by another version, or half a line
        return
    if Path(before) != Path.cwd():
        logger.warning(
            "%s was started in %s: relative paths in its settings now begin in %s; type  cd %s",
            *(directory, before, Path.cwd(), before),
        )


def _packages() -> dict[str, str]:
    """Return the version of every installed package."""
    from importlib.metadata import distributions

    return dict(sorted((it.name, it.version) for it in distributions()))


def _git_state(directory: Path) -> dict[str, Any] | None:
    """Return commit, branch and changed files of the working tree, or None outside one or without git."""
    asked = ["git", "-C", str(directory), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    heads = dict(line.removeprefix("# branch.").split(" ", 1) for line in lines if line.startswith("# branch."))
    changed = [line.rsplit(" ", 1)[-1] for line in lines if not line.startswith("#")]
    return {"commit": heads.get("oid"), "branch": heads.get("head"), "changed": changed}
