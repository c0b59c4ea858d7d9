"""The built-in plugins pass the contract suites that authors of plugins run."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from rlcore_tests.assets import made_assets, real_assets

from rlcore.algorithms.entropy import AdaptiveEntropyConfig
from rlcore.algorithms.grpo import GRPO, GRPOConfig
from rlcore.algorithms.kl import KLConfig
from rlcore.algorithms.ppo import PPO, PPOConfig
from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.config.schema import DataConfig
from rlcore.controller import dispatch
from rlcore.data.files import FileDataset
from rlcore.protocols.algorithm import Unit
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.testing import (
    AlgorithmContract,
    BackendContract,
    DatasetContract,
    DispatchContract,
    FakeConfig,
    FakeRollout,
    ModelRolloutContract,
    RewardContract,
    RolloutContract,
    RowDispatchContract,
    TrackerContract,
)
from rlcore.trackers.console import ConsoleConfig, ConsoleTracker
from rlcore.trackers.jsonl import JSONLConfig, JSONLTracker
from rlcore.trackers.tensorboard import TensorBoardConfig, TensorBoardTracker
from tests.workers import RankZero


class TestHFRollout(ModelRolloutContract):
    @pytest.fixture
    def model_path(self, assets):
        return str(assets / "models" / "stories260k")

    def make(self, model, context):
        return HFRollout(HFConfig(max_batch_size=4), model=model, context=context)


class TestHFRolloutWithTheModelOfTheSuite(ModelRolloutContract):
    def make(self, model, context):
        return HFRollout(HFConfig(), model=model, context=context)


class TestFakeRollout(RolloutContract):
    def make(self, model, context):
        return FakeRollout(FakeConfig(order="shortest"), model=model, context=context)


class TestFakeRolloutOfAModelWithItsOwnTokenizer(TestFakeRollout):
    @pytest.fixture
    def model_path(self, assets):
        return str(assets / "models" / "stories260k")


class TestLocalBackend(BackendContract):
    @pytest.fixture
    def model_path(self, assets):
        return str(assets / "models" / "stories260k")

    def make(self, model, optimizer, context):
        return LocalBackend(LocalConfig(), model=model, optimizer=optimizer, context=context)


class TestLocalBackendWithTheModelOfTheSuite(BackendContract):
    make = TestLocalBackend.make


class TestGRPO(AlgorithmContract):
    config = GRPOConfig()

    def make(self):
        return GRPO(self.config)


class TestGRPOWithMiniBatchesAndKLInTheLoss(TestGRPO):
    config = GRPOConfig(
        epochs=2, minibatches=3, kl=KLConfig(coefficient=0.01), dual_clip=3.0, average="seq-mean-token-mean"
    )


class TestGRPOWithAdaptiveKLInTheReward(TestGRPO):
    config = GRPOConfig(
        average="seq-mean-token-sum",
        normalize_by_std=False,
        skip_zero_variance_groups=True,
        kl=KLConfig(coefficient=0.01, where="reward", controller="adaptive"),
    )


class InGroups(GRPO):
    """GRPO whose loss may compare the four samples of a prompt."""

    unit = Unit(column="group_id", size=4)

    def collect(self, roles, prompts):
        samples = super().collect(roles, prompts)
        return samples.take(samples.fetch("group_id").argsort(stable=True))


class TestAnAlgorithmWithUnits(AlgorithmContract):
    def make(self):
        return InGroups(GRPOConfig(epochs=2, minibatches=3))


class TestPPO(AlgorithmContract):
    config = PPOConfig()

    def make(self):
        return PPO(self.config)


class TestPPOWithMiniBatchesAndKLInTheReward(TestPPO):
    config = PPOConfig(
        minibatches=2,
        clip_value=0.0,
        adaptive_entropy=AdaptiveEntropyConfig(target=0.5),
        kl=KLConfig(coefficient=0.01, where="reward"),
    )


class TestExactMatch(RewardContract):
    target = "rlcore.rewards.match:ExactMatch"
    examples = (({"completion": " 42\n", "answer": "42"}, 1.0), ({"completion": "43", "answer": "42"}, 0.0))


class TestNumber(RewardContract):
    target = "rlcore.rewards.match:NumberMatch"
    options = {"tolerance": 0.5}  # noqa: RUF012
    examples = (({"completion": "about $1,234.4", "answer": "1234"}, 1.0), ({"completion": "1", "answer": "2"}, 0.0))


class TestGSM8K(RewardContract):
    target = "rlcore.rewards.match:GSM8K"

    @property
    def examples(self):
        return [({"completion": "so #### 72", "answer": "48+24 = 72\n#### 72"}, 1.0), *gold_answers()]


def gold_answers():
    """Reference answers, which must score 1; also those of the original dataset where it is present."""
    files = [folder / "data" / "gsm8k" / "test.jsonl" for folder in (made_assets(), real_assets()) if folder]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()[:5]]
    return [({"completion": row["answer"], "answer": row["answer"]}, 1.0) for row in rows]


class TestSortedDigits(RewardContract):
    target = "rlcore.rewards.sorted_digits:sorted_digits"
    # 132: of its pairs 1<=3 and 3<=2 one is in order, so half of a half
    examples = (
        ({"completion": "123", "digits": "312"}, 1.0),
        ({"completion": "132", "digits": "312"}, 0.25),
        ({"completion": "12", "digits": "312"}, 0.0),
    )


class TestDataParallel(RowDispatchContract):
    def make(self):
        return dispatch.DataParallel()


class TestDataParallelMetrics(RowDispatchContract):
    metrics = True

    def make(self):
        return dispatch.DataParallelMetrics()


class TestAll(DispatchContract):
    def make(self):
        return dispatch.All()


class TestRankZero(DispatchContract):
    def make(self):
        return RankZero()


class TestJSONL(TrackerContract):
    def make(self, run):
        return JSONLTracker(JSONLConfig(), run)

    def logged(self, tracker, run):
        lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], name, value) for line in lines for name, value in line.items()]


class TestConsole(TrackerContract):
    def make(self, run):
        return ConsoleTracker(ConsoleConfig(live=False), run)


class TestLiveConsole(TrackerContract):
    def make(self, run):
        return ConsoleTracker(ConsoleConfig(), run, Console(file=io.StringIO(), force_terminal=True))


class TestTensorBoard(TrackerContract):
    def make(self, run):
        pytest.importorskip("tensorboard")
        return TensorBoardTracker(TensorBoardConfig(), run)

    def logged(self, tracker, run):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run.directory / "tensorboard"))
        events.Reload()
        return [(one.step, name, one.value) for name in events.Tags()["scalars"] for one in events.Scalars(name)]


class TestFiles(DatasetContract):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        self.path = tmp_path / "train.jsonl"
        self.path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+3=", "answer": "5", "hint": "!"}\n')

    def make(self):
        return FileDataset(str(self.path), DataConfig(train=str(self.path)))
