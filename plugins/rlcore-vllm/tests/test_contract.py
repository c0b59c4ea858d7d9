"""The engine contract, tested on the in-process engine."""

import pytest
from rlcore_vllm import VLLMConfig, VLLMRollout

from rlcore.testing import ModelRolloutContract


class TestInProcess(ModelRolloutContract):
    def make(self, model, context):
        return VLLMRollout(VLLMConfig(max_batch_size=16), model=model, context=context)

    @pytest.fixture
    def model_path(self, small_model):
        return small_model

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, small_model):
        engine = cls().new(small_model)
        yield engine
        engine.close()
