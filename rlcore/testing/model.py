"""The small model that the suites of engines and backends use when their author gives none."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from rlcore.models.load import load_model
from rlcore.quickstart import Recipe, prepare

_RECIPE = Recipe(digits=3, warm_steps=20, warm_batch=32, train_prompts=64, eval_prompts=8)


class UsesModel:
    """Gives tests `model_path`; override the fixture to use another model."""

    device = "cpu"
    """"cuda:0" where the plugin needs it."""
    tolerance = 2e-4
    """Largest difference of two log-probs that count as equal; about 0.05 for bfloat16."""

    @pytest.fixture
    def model_path(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        return small_model(tmp_path_factory.getbasetemp())


def small_model(directory: Path) -> str:
    """A model with its tokenizer, made below `directory` unless it is there."""
    return str(prepare(directory / "rlcore-model", _RECIPE).model)


@functools.lru_cache(maxsize=2)
def plain_model(path: str) -> Any:
    """The model as transformers runs it, in float32 on the CPU: what the suites compare with. Not to be changed."""
    return load_model(path).requires_grad_(False)
