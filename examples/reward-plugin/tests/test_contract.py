from example_rewards import EXAMPLES

from rlcore.testing import RewardContract


class TestAscending(RewardContract):
    target, examples = "example_rewards:ascending", EXAMPLES["ascending"]


class TestCountdown(RewardContract):
    target, examples = "example_rewards:Countdown", EXAMPLES["Countdown"]
