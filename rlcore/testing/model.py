"""The default small model of the suites for engines and backends."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from rlcore.models.load import load_model
from rlcore.quickstart import Recipe, prepare

_RECIPE = Recipe(digits=3, warm_steps=20, warm_batch=32, train_prompts=64, eval_prompts=8)


class UsesModel:
    """Fixture `model_path` for tests; override it to use another model."""

    device = "cpu"
    """Device of the tests, such as "cuda:0"."""
    tolerance = 2e-4
    """Largest difference of two log-probs that count as equal; about 0.05 for bfloat16."""

    @pytest.fixture
    def model_path(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        return small_model(tmp_path_factory.getbasetemp())


def small_model(directory: Path) -> str:
    """Return a model with its tokenizer below `directory`, created if missing."""
    return str(prepare(directory / "rlcore-model", _RECIPE).model)


@functools.lru_cache(maxsize=2)
def plain_model(path: str) -> Any:
    """Return the model in transformers' implementation, float32 on the CPU, as the reference. Do not modify it."""
    return load_model(path).requires_grad_(False)
