"""The contract tests of backends at world size 1."""

import pytest
from rlcore_fsdp import FSDPBackend, FSDPConfig

from rlcore.testing import BackendContract


class TestFSDP(BackendContract):
    config = FSDPConfig()

    @pytest.fixture
    def model_path(self, assets):
        return str(assets / "models" / "stories260k")

    def make(self, model, optimizer, context):
        return FSDPBackend(self.config, model=model, optimizer=optimizer, context=context)
