"""GPUs and tests: a machine with GPUs runs the ordinary tests as one without does.

For a conftest.py, as CUDA reads the variable when it is first used:

    def pytest_configure(config):
        hide_gpus(config)
"""

from __future__ import annotations

import os
from typing import Any


def hide_gpus(config: Any) -> None:
    """Hide GPUs from this process and its children, unless `-m` asks for tests marked gpu."""
    words = config.option.markexpr.replace("(", " ").replace(")", " ").split()
    asked = any(word == "gpu" and words[max(i - 1, 0)] != "not" for i, word in enumerate(words))
    if not asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
