from example_dpo import ExampleDPO

from rlcore.testing import AlgorithmContract


class TestExampleDPO(AlgorithmContract):
    keeps_every_sample = False

    def make(self):
        return ExampleDPO(ExampleDPO.Config(beta=0.5))
