"""Contract tests for every algorithm of the package, with its defaults and with settings that change the data flow."""

import torch
from rlcore_algorithms.best_of_n import BestOfN
from rlcore_algorithms.cispo import CISPO
from rlcore_algorithms.covariance import ClipCov, KLCov
from rlcore_algorithms.dapo import DAPO
from rlcore_algorithms.distillation import Distillation
from rlcore_algorithms.dpo import DPO
from rlcore_algorithms.dppo import DPPO
from rlcore_algorithms.dr_grpo import DrGRPO
from rlcore_algorithms.gmpo import GMPO
from rlcore_algorithms.gpg import GPG
from rlcore_algorithms.gspo import GSPO
from rlcore_algorithms.gvpo import GVPO
from rlcore_algorithms.kto import KTO
from rlcore_algorithms.online_dpo import OnlineDPO
from rlcore_algorithms.opo import OPO
from rlcore_algorithms.optimal_token_baseline import OptimalTokenBaseline
from rlcore_algorithms.orpo import ORPO
from rlcore_algorithms.ppo import DualClipPPO
from rlcore_algorithms.reinforce import Reinforce
from rlcore_algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rlcore_algorithms.remax import ReMax
from rlcore_algorithms.reward_model import RewardModel
from rlcore_algorithms.rloo import RLOO
from rlcore_algorithms.sampling import OverlongConfig
from rlcore_algorithms.sapo import SAPO
from rlcore_algorithms.served_teacher import TeacherServerConfig
from rlcore_algorithms.sft import SFT

from rlcore.algorithms.correction import CorrectionConfig
from rlcore.algorithms.entropy import AdaptiveEntropyConfig
from rlcore.algorithms.kl import KLConfig
from rlcore.testing import AlgorithmContract

LATER = {"epochs": 2, "minibatches": 3}
BY_TOKEN = CorrectionConfig(weight="token", high=1.5)
BY_SEQUENCE = CorrectionConfig(weight="sequence", low=0.5, high=5.0, reject="mean_k3", reject_above=3.0)

VARIANTS = {
    "Reinforce": (Reinforce, {}),
    "ReinforceLater": (Reinforce, LATER),
    "ReinforcePlusPlus": (ReinforcePlusPlus, {}),
    "ReinforcePlusPlusWithDiscountAndPenalty": (
        ReinforcePlusPlus,
        {**LATER, "gamma": 0.9, "kl": KLConfig(coefficient=0.01, where="reward", estimator="k1")},
    ),
    "ReinforcePlusPlusBaseline": (ReinforcePlusPlusBaseline, {"kl": KLConfig(coefficient=0.01, estimator="k2")}),
    "RLOO": (RLOO, {}),
    "RLOOWithPenalty": (RLOO, {"kl": KLConfig(coefficient=0.01, where="reward")}),
    "DrGRPO": (DrGRPO, LATER),
    "DAPO": (DAPO, {**LATER, "overlong": OverlongConfig(tokens=2, factor=0.1)}),
    "DAPOCorrectedByToken": (DAPO, {"correction": BY_TOKEN}),
    "OPO": (OPO, {}),
    "OptimalTokenBaseline": (OptimalTokenBaseline, {}),
    "OptimalTokenBaselineLater": (OptimalTokenBaseline, {**LATER, "kl": KLConfig(coefficient=0.01, where="reward")}),
    "ReMax": (ReMax, {}),
    "GPG": (GPG, {"minibatches": 2}),
    "GSPO": (GSPO, {**LATER, "clip_low": 0.2, "clip_high": 0.2}),
    "GSPOWithRLOO": (GSPO, {"estimator": "rloo", "correction": BY_SEQUENCE}),
    "CISPO": (CISPO, LATER),
    "CISPOOfTokenAdvantages": (CISPO, {"estimator": "reinforce_plus_plus", "gamma": 0.95}),
    "GMPO": (GMPO, LATER),
    "GVPO": (GVPO, {}),
    "GVPOLater": (GVPO, LATER),
    "DPPO": (DPPO, LATER),
    "DPPOByKL": (DPPO, {**LATER, "divergence": "kl", "limit": 0.05, "correction": BY_TOKEN}),
    "SAPO": (SAPO, LATER),
    "SAPOWithReMaxCorrectedBySequence": (SAPO, {"estimator": "remax", "correction": BY_SEQUENCE}),
    "ClipCov": (ClipCov, {"share": 0.05, "cov_low": 0.0}),
    "KLCov": (KLCov, {"share": 0.2, "penalty": 0.01}),
    "DualClipPPO": (DualClipPPO, {"correction": BY_TOKEN}),
    "Distillation": (Distillation, {"teacher": "somewhere"}),
    "DistillationFromAServer": (Distillation, {"server": TeacherServerConfig(url="http://h", model="m")}),
    "DistillationWithAdaptiveEntropy": (
        Distillation,
        {"teacher": "somewhere", "adaptive_entropy": AdaptiveEntropyConfig(target=0.5)},
    ),
}
for name, (algorithm, settings) in VARIANTS.items():
    globals()[f"Test{name}"] = type(
        f"Test{name}",
        (AlgorithmContract,),
        {"make": lambda self, algorithm=algorithm, settings=settings: algorithm(algorithm.Config(**settings))},
    )


def likelier_for_the_teacher(self, experience):
    """Select the best rows: the fake teacher's log-prob of a token is (id % 3) / 4 below the student's."""
    local = experience.local()
    loss = local.per_row(torch.where(local["loss_mask"], local["input_ids"] % 3, 0))
    return loss <= loss.min()


def better_than_the_greedy_response(self, experience):
    return experience.fetch("advantage") > 0


TestDistillation.better = likelier_for_the_teacher  # noqa: F821
TestDistillationWithAdaptiveEntropy.better = likelier_for_the_teacher  # noqa: F821
TestDistillationFromAServer.better = likelier_for_the_teacher  # noqa: F821
TestReMax.better = better_than_the_greedy_response  # noqa: F821
TestSAPOWithReMaxCorrectedBySequence.better = better_than_the_greedy_response  # noqa: F821


class TestOnlineDPO(AlgorithmContract):
    keeps_every_sample = False

    def make(self):
        return OnlineDPO(OnlineDPO.Config())


class TestOnlineDPOOverSeveralMiniBatches(TestOnlineDPO):
    def make(self):
        return OnlineDPO(OnlineDPO.Config(**LATER, beta=0.5))


class TestBestOfN(AlgorithmContract):
    keeps_every_sample = False

    def make(self):
        return BestOfN(BestOfN.Config(minibatches=2))


class TestAllThatPassed(TestBestOfN):
    def make(self):
        return BestOfN(BestOfN.Config(keep="passed", threshold=0.5))


class TestSFT(AlgorithmContract):
    def make(self):
        return SFT(SFT.Config(minibatches=2))

    def better(self, experience):
        return torch.ones(len(experience), dtype=torch.bool)


class TestDPO(AlgorithmContract):
    def make(self):
        return DPO(DPO.Config(minibatches=2))

    def better(self, experience):
        return torch.arange(len(experience)) % 2 == 0


class TestORPO(TestDPO):
    def make(self):
        return ORPO(ORPO.Config(minibatches=2, beta=0.5))


class TestKTO(AlgorithmContract):
    def make(self):
        return KTO(KTO.Config(minibatches=2, undesirable_weight=0.5))

    def roles_and_prompts(self, algorithm, *, keep_scored=True):
        roles, prompts = super().roles_and_prompts(algorithm, keep_scored=keep_scored)
        return roles, prompts.with_rows(label=torch.tensor([True, False, False, True]))

    def better(self, experience):
        return experience.fetch("desirable")


class TestRewardModel(AlgorithmContract):
    def make(self):
        return RewardModel(RewardModel.Config(minibatches=2))

    def better(self, experience):
        return torch.arange(len(experience)) % 2 == 0

    def test_collect_keeps_every_sample_with_its_own_tokens(self):
        _, roles, experience = self.collected()
        assert roles.store.num_far_reads == 0
        generated, found = roles.generated, experience.local()
        ends = generated.offsets()[1:] - 1
        assert torch.equal(found.lengths, generated.lengths + 1)
        last = found.offsets()[1:] - 1
        assert torch.equal(found["input_ids"][last], generated["input_ids"][ends])
        assert torch.equal(found["input_ids"][last - 1], generated["input_ids"][ends])
        assert found["loss_mask"].nonzero().squeeze(1).tolist() == last.tolist()
