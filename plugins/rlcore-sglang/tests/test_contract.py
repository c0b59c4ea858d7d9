"""The engine contract, tested on SGLang in its own process."""

import pytest
from rlcore_sglang import SGLangConfig, SGLangRollout

from rlcore.testing import ModelRolloutContract


class TestOwnEngine(ModelRolloutContract):
    # One engine process in about ten was seen up to 1e-3 off, on fixed tokens; see the README.
    tolerance = 5e-3

    def make(self, model, context):
        return SGLangRollout(SGLangConfig(max_batch_size=16), model=model, context=context)

    @pytest.fixture
    def model_path(self, small_model):
        return small_model

    @pytest.fixture
    def engine(self, shared_engine):
        return shared_engine
