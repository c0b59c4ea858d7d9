"""The interpreter of a pool: another virtual environment with the controller's versions of Python, Ray and rlcore.

Ray's processes share its protocol and pickled messages, so these versions must match. Other packages may differ, as
only plain data is exchanged.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata

from rlcore.errors import CapacityError, ConfigError

_TIMEOUT_S = 30.0
_ASK = """
import json, platform
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
print(json.dumps({"Python": platform.python_version(), "ray": version("ray"), "rlcore": version("rlcore")}))
"""


def check_interpreter(pool: str, python: str) -> str:
    """Return the interpreter's absolute path after checking its versions, which takes a tenth of a second.

    Raises:
        UserError: it is missing, cannot be run, or has different versions.
    """
    setting = f"pools.{pool}.python"
    found = shutil.which(python)
    if found is None:
        raise CapacityError(f"{setting}={python}: there is no such interpreter\nType  {setting}=VENV/bin/python")
    path = os.path.abspath(found)  # not the real path: a virtual environment is found through its symlink
    here = {"Python": platform.python_version(), "ray": metadata.version("ray"), "rlcore": metadata.version("rlcore")}
    there = _versions(setting, path)
    for name, own in here.items():
        if there[name] != own:
            raise ConfigError(
                f"{setting}={python} has {name} {there[name] or '(none)'}, but the controller has {own}\n"
                + _advice(name, path, own)
            )
    return path


def _versions(setting: str, path: str) -> dict[str, str]:
    try:
        answer = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        versions: dict[str, str] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = getattr(error, "stderr", None) or type(error).__name__
        raise ConfigError(
            f"{setting}={path} could not be run as a Python interpreter: {reason.strip().splitlines()[-1]}\n"
            f"Type  {setting}=VENV/bin/python"
        ) from error
    return versions


def _advice(name: str, path: str, own: str) -> str:
    if name == "Python":
        return f"Create the virtual environment with the same Python:  {sys.executable} -m venv VENV"
    return f'Type  {path} -m pip install "{name}=={own}"'
