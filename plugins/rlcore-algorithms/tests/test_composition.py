"""Combinations of estimator and loss: which ones work, and which are refused when the config is read."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

import pytest
import torch
from rlcore_algorithms.best_of_n import BestOfN
from rlcore_algorithms.cispo import CISPO
from rlcore_algorithms.covariance import ClipCov, KLCov
from rlcore_algorithms.dapo import DAPO
from rlcore_algorithms.distillation import Distillation
from rlcore_algorithms.family import PER_TOKEN, Estimator, Family
from rlcore_algorithms.gmpo import GMPO
from rlcore_algorithms.gpg import GPG
from rlcore_algorithms.gspo import GSPO
from rlcore_algorithms.kto import KTO
from rlcore_algorithms.optimal_token_baseline import OptimalTokenBaseline
from rlcore_algorithms.ppo import DualClipPPO
from rlcore_algorithms.remax import ReMax
from rlcore_algorithms.rloo import RLOO
from rlcore_algorithms.sapo import SAPO
from rlcore_algorithms.sft import SFT

from rlcore.algorithms.correction import CorrectionConfig
from rlcore.config.build import build, build_plugin
from rlcore.config.compose import compose, presets
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError
from rlcore.protocols.optional import CorrectsStaleness
from rlcore.registry import resolve
from rlcore.registry.known import known_names
from rlcore.testing import FakeRoles
from rlcore.types import TokenOutputs

LOSSES = [Family, GSPO, GMPO, CISPO, SAPO, GPG, ClipCov, KLCov]
WHOLE = [GSPO, GMPO]
OFF, BY_TOKEN = CorrectionConfig(), CorrectionConfig(weight="token", high=10.0)


def collected(made):
    """Return the experience of an algorithm on two prompts with fake roles."""
    roles = FakeRoles([role.name for role in made.roles()])
    rows = {"prompt_id": [8, 5], "group_id": [0, 1], "seed": [1, 2]}
    return made.collect(roles, Batch.of(lengths=[2, 3], tokens={"input_ids": [1, 2, 3, 4, 5]}, rows=rows)).local()


def step(algorithm, **settings):
    """Compute the terms of the actor's loss on that experience."""
    made = algorithm(algorithm.Config(**settings))
    experience = collected(made)
    log_probs = torch.where(experience["loss_mask"], experience["rollout_log_probs"], 0.0)
    return made.loss(TokenOutputs(log_probs=log_probs, entropy=-log_probs), experience).terms


@pytest.mark.parametrize("algorithm", [*LOSSES, DualClipPPO], ids=lambda algorithm: algorithm.__name__)
def test_every_policy_loss_is_multiplied_by_the_weights_of_its_tokens(algorithm):
    plain, weighted = (algorithm(algorithm.Config(minibatches=2, correction=it)) for it in (OFF, BY_TOKEN))
    experience = collected(plain)
    mask, old = experience["loss_mask"], experience["old_log_probs"]
    log_ratio = torch.where(mask, torch.sin(torch.arange(len(old)) * 1.0), 0.0)
    experience = experience.with_tokens(rollout_log_probs=old - log_ratio)

    terms = [it.loss(TokenOutputs(log_probs=old + 0.1, entropy=-old), experience).terms for it in (plain, weighted)]

    torch.testing.assert_close(terms[1][mask], (terms[0] * log_ratio.exp())[mask])


def test_every_algorithm_says_if_it_corrects_for_older_weights():
    names = [it.name for it in entry_points(group="rlcore.algorithm") if it.value.startswith(("rlcore.", "rlcore_alg"))]
    found = {}
    for name in names:
        algorithm = resolve("algorithm", name).object
        settings = {"teacher": "DIR"} if name == "distillation" else {}
        weighted = {"correction": BY_TOKEN} if hasattr(algorithm.Config(**settings), "correction") else {}
        made = [algorithm(algorithm.Config(**settings, **more)) for more in ({}, weighted)]
        assert all(isinstance(it, CorrectsStaleness) for it in made)
        found[name] = [it.corrects for it in made]

    always = {"online_dpo", "best_of_n", "sft", "dpo", "orpo", "kto", "gvpo", "reward_model"}
    assert len(found) == 29
    assert found == {name: [name in always, True] for name in names}


@pytest.mark.parametrize("estimator", get_args(Estimator))
@pytest.mark.parametrize("algorithm", LOSSES, ids=lambda algorithm: algorithm.__name__)
def test_every_estimator_works_with_every_loss_except_token_advantages_with_response_ratios(algorithm, estimator):
    if algorithm in WHOLE and estimator in PER_TOKEN:
        with pytest.raises(ConfigError, match="expected an estimator with one advantage per response"):
            algorithm.Config(estimator=estimator)
        return

    terms = step(algorithm, estimator=estimator)

    assert terms.isfinite().all()
    assert terms.any()


@pytest.mark.parametrize(
    ("algorithm", "settings", "words"),
    [
        (GSPO, {"estimator": "reinforce_plus_plus"}, ["algorithm.estimator", "gspo has one ratio", "estimator=grpo"]),
        (GSPO, {"average": "token-mean"}, ["algorithm.average", "one term per response"]),
        (GMPO, {"average": "seq-mean-token-sum"}, ["algorithm.average", "gmpo"]),
        (GSPO, {"dual_clip": 3.0}, ["algorithm.dual_clip", "gspo has no such bound"]),
        (SAPO, {"clip_high": 0.28}, ["algorithm.clip_high", "sapo has no such bound", "clip_high=0.2"]),
        (SAPO, {"tau_positive": 0.0}, ["algorithm.tau_positive", "more than 0"]),
        (GPG, {"epochs": 2}, ["algorithm.epochs", "no ratio"]),
        (GPG, {"clip_low": 0.1}, ["algorithm.clip_low"]),
        (CISPO, {"dual_clip": 2.0}, ["algorithm.dual_clip", "cispo"]),
        (KLCov, {"minibatches": 1}, ["algorithm.minibatches", "the penalty has no gradient", "minibatches=2"]),
        (KLCov, {"share": 0.0}, ["algorithm.share"]),
        (ClipCov, {"cov_low": 6.0}, ["algorithm.cov_high", "more than cov_low=6.0"]),
        (ReMax, {"skip_zero_variance_groups": True}, ["algorithm.skip_zero_variance_groups", "have a gradient"]),
        (ReMax, {"refill": {"rounds": 3}}, ["algorithm.refill.rounds", "estimator=remax", "refill.rounds=0"]),
        (DAPO, {"estimator": "reinforce"}, ["algorithm.refill.rounds", "estimator=reinforce"]),
        (GPG, {"skip_zero_variance_groups": True}, ["algorithm.skip_zero_variance_groups", "alpha already"]),
        (DAPO, {"kl": {"coefficient": 0.1, "estimator": "k1"}}, ["algorithm.kl.estimator", "no gradient on average"]),
        (DAPO, {"kl": {"controller": "adaptive", "where": "reward"}}, ["algorithm.kl.coefficient", "multiplies it"]),
        (DAPO, {"overlong": {"factor": 0.5}}, ["algorithm.overlong.factor", "without overlong.tokens"]),
        (BestOfN, {"keep": "passed"}, ["algorithm.threshold", "the lowest reward that passes"]),
        (RLOO, {"gamma": 0.9}, ["algorithm.gamma", "estimator=rloo", "one return for a whole response"]),
        (
            GMPO,
            {"estimator": "optimal_token_baseline"},
            ["algorithm.estimator", "gmpo has one ratio", "estimator=grpo"],
        ),
        (OptimalTokenBaseline, {"gamma": 0.9}, ["algorithm.gamma", "estimator=optimal_token_baseline"]),
        (RLOO, {"estimator": "rlo"}, ["algorithm.estimator", "rloo"]),
        (DAPO, {"refill": {"rounds": -1}}, ["algorithm.refill.rounds"]),
        (DAPO, {"overlong": {"tokens": -1}}, ["algorithm.overlong.tokens"]),
        (Distillation, {}, ["algorithm.teacher", "a directory in Hugging Face layout"]),
        (
            Distillation,
            {"server": {"url": "http://h"}},
            ["algorithm.server.model", "the name of the model on the server"],
        ),
        (Distillation, {"server": {"url": "h:1", "model": "m"}}, ["algorithm.server.url", "http://…"]),
        (
            Distillation,
            {"teacher": "DIR", "server": {"url": "http://h", "model": "m"}},
            ["algorithm.teacher", "nothing with server.url=http://h"],
        ),
        (SFT, {"average": "row-mean"}, ["algorithm.average", "token-mean"]),
        (KTO, {"beta": 0.0}, ["algorithm.beta", "more than 0"]),
        (KTO, {"desirable_weight": -1.0}, ["algorithm.desirable_weight", "0 or more"]),
        (KTO, {"desirable_weight": 0.0, "undesirable_weight": 0.0}, ["algorithm.desirable_weight", "more than 0"]),
        (SFT, {"clip_high": 0.3}, ["algorithm.clip_high", "no such setting"]),
    ],
)
def test_settings_that_make_no_sense_are_refused_when_the_config_is_read(algorithm, settings, words):
    with pytest.raises(ConfigError) as raised:
        build(algorithm.Config, settings, "algorithm")

    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "\n" in str(raised.value), "the second line says what to type"


def test_every_registered_algorithm_loads_and_its_module_docstring_has_its_equation():
    found = [entry for entry in entry_points(group="rlcore.algorithm") if entry.value.startswith("rlcore_algorithms")]

    assert {entry.name: "rlcore-algorithms" for entry in found} == known_names("algorithm")
    for entry in found:
        algorithm = entry.load()
        module = __import__(algorithm.__module__, fromlist=["__doc__"])
        assert any(sign in module.__doc__ for sign in ("=", "loss")), entry.name
        assert "arXiv" in module.__doc__ or "https://" in module.__doc__ or entry.name == "sft", entry.name
        assert len(Path(module.__file__).read_text().splitlines()) <= 140, entry.name


@pytest.mark.parametrize(
    "name", [name for name, owners in presets("algorithm").items() if "rlcore-algorithms" in owners]
)
def test_shipped_presets_configure_algorithms_of_this_package(name):
    config = compose([f"algorithm={name}"], complete=False).config.algorithm
    resolved = resolve("algorithm", config.name)

    assert resolved.package == "rlcore-algorithms"
    assert build_plugin("algorithm", config, resolved.object) != resolved.object.Config()
