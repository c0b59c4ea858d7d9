"""Pytest fixtures with a trained model and data. Import them in a conftest:

    from rlcore_tests.assets import assets, each_assets

Both return a folder with models/stories260k, a small Llama, and data/gsm8k/{train,test}.jsonl, word problems. Those in
`assets` are generated and kept in rlcore's cache. `each_assets` also has the pretrained model and the original GSM8K if
RLCORE_TEST_ASSETS (or the folder `shared` next to the checkout) holds them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path

import pytest

import rlcore
from rlcore.quickstart import cache_directory, make_once
from rlcore_tests import story_model, texts
from rlcore_tests.story_model import save_story_model
from rlcore_tests.texts import write_problem

_PROBLEMS = {"train": 200, "test": 50}


def made_assets() -> Path:
    """Return the folder with the generated assets, created if missing."""
    sources = [Path(str(path)).read_bytes() for path in (__file__, story_model.__file__, texts.__file__)]
    key = hashlib.sha256(b"".join(sources)).hexdigest()[:12]  # any change of the recipe makes new assets
    return make_once(cache_directory() / f"test-assets-{key}", _make)


def _make(directory: Path) -> None:
    save_story_model(directory / "models" / "stories260k")
    data = directory / "data" / "gsm8k"
    data.mkdir(parents=True)
    draw = random.Random(0)
    for name, count in _PROBLEMS.items():
        lines = [json.dumps(write_problem(draw)) + "\n" for _ in range(count)]
        (data / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def real_assets() -> Path | None:
    """Return the folder with the pretrained model and the original data, or None."""
    folder = Path(os.environ.get("RLCORE_TEST_ASSETS") or Path(rlcore.__file__).parents[2] / "shared")
    return folder if (folder / "models" / "stories260k").is_dir() and (folder / "data" / "gsm8k").is_dir() else None


@pytest.fixture(scope="session")
def assets() -> Path:
    """Return the folder with the generated model and data."""
    return made_assets()


@pytest.fixture(scope="session", params=["made", "real"] if real_assets() else ["made"])
def each_assets(request: pytest.FixtureRequest) -> Path | None:
    """Return the folder with the generated assets and, if present, the one with the pretrained model and GSM8K."""
    return real_assets() if request.param == "real" else made_assets()
