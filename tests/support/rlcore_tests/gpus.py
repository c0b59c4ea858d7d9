"""Hide GPUs, so that ordinary tests run the same with and without them.

For a conftest.py, because CUDA reads the variable on first use:

    def pytest_configure(config):
        hide_gpus(config)
"""

from __future__ import annotations

import os
from typing import Any


def hide_gpus(config: Any) -> None:
    """Hide GPUs from this process and its children, unless `-m` selects tests marked gpu."""
    words = config.option.markexpr.replace("(", " ").replace(")", " ").split()
    asked = any(word == "gpu" and words[max(i - 1, 0)] != "not" for i, word in enumerate(words))
    if not asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
