"""The contract tests of backends at world size 1."""

from cpu_double import CPUMegatron
from rlcore_megatron import MegatronConfig

from rlcore.testing import BackendContract


class TestMegatron(BackendContract):
    config = MegatronConfig()

    def make(self, model, optimizer, context):
        return CPUMegatron(self.config, model=model, optimizer=optimizer, context=context)
