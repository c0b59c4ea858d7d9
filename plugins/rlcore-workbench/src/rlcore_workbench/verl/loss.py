"""Keys for the update: algorithm, loss, KL penalty, mini-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlcore_workbench.migration.answer import Answer, Rule, available, to
from rlcore_workbench.migration.launch import Launch
from rlcore_workbench.verl.names import ACTOR, ESTIMATOR

LOSS = ACTOR + "policy_loss.loss_mode"
GROUPS, OVERLONG = "algorithm.filter_groups.", "reward_model.overlong_buffer."
CORRECTION = "algorithm.rollout_correction."
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ESTIMATORS: Mapping[str, str] = {
    **{name: name for name in ("grpo", "rloo", "opo", "gpg", "remax")},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
"""Estimators without a critic; any other name is looked up unchanged among the algorithms."""
LOSSES: Mapping[str, str] = {
    **{name: name for name in ("gspo", "sapo", "gpg", "clip_cov", "kl_cov", "cispo", "gvpo")},
    "geo_mean": "gmpo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}
"""Losses other than `vanilla` that are algorithms here."""
_IGNORED: Mapping[str, frozenset[str]] = {
    "clip_low": frozenset({"sapo", "gpg", "kl_cov", "gvpo"}),
    "clip_high": frozenset({"sapo", "gpg", "kl_cov", "gvpo"}),
    "dual_clip": frozenset(LOSSES),
    "average": frozenset({"sapo", "geo_mean", "gvpo"}),
}
"""Setting -> losses of verl that ignore it."""


def loss_of(launch: Launch) -> str:
    """Return the loss, or vanilla if the requested one does not support the estimator."""
    loss = str(launch.get(LOSS, "vanilla"))
    fits = LOSSES.get(loss, loss) in available("algorithm") and str(launch.get(ESTIMATOR, "gae")) in ESTIMATORS
    return loss if fits else "vanilla"


def chosen(launch: Launch) -> tuple[str, str]:
    """Return the algorithm and its setting `estimator`; empty means the algorithm's default."""
    if launch.trainer == "sft":
        return "sft", ""
    if launch.get("distillation.enabled"):
        return "distillation", ""
    asked, loss = str(launch.get(ESTIMATOR, "gae")), loss_of(launch)
    if asked == "gae":
        return ("dual_clip_ppo" if corrected(launch) else "ppo"), ""
    if asked not in ESTIMATORS:
        return asked, ""
    estimator = ESTIMATORS[asked]
    if estimator == "grpo" and not launch.get("algorithm.norm_adv_by_std_in_grpo", True):
        estimator = "dr_grpo"
    if loss != "vanilla":
        own = {"gpg": "gpg", "gvpo": estimator}.get(loss, "grpo")  # gvpo has no advantages
        return LOSSES.get(loss, loss), estimator if estimator != own else ""
    if estimator == "gpg":
        return "reinforce", "gpg"  # the algorithm gpg has its own loss
    if ESTIMATORS[asked] != "grpo":
        return estimator, ""
    wanted = (launch.get(GROUPS + "enable"), launch.get(OVERLONG + "enable"), corrected(launch))
    return ("dapo", estimator if estimator != "grpo" else "") if any(wanted) else ("grpo", "")


def corrected(launch: Launch) -> bool:
    """Return whether the launch weights or rejects samples where the engine and the trainer differ."""
    return bool(launch.get(CORRECTION + "rollout_is") or launch.get(CORRECTION + "rollout_rs"))


def _algorithm(launch: Launch, value: Any) -> Answer:
    """Return the algorithm of the estimator, unless the loss decides it."""
    name, estimator = chosen(launch)
    if name not in available("algorithm"):
        return Answer("none", note=f"no algorithm '{name}' is installed:  rlcore list-plugins --kind algorithm --all")
    more: dict[str, Any] = {"algorithm__estimator": estimator} if estimator else {}
    if name == "dapo" and not launch.get(GROUPS + "enable"):
        more["algorithm__refill__rounds"] = 0
    return to(algorithm=name, **more)


def _loss(launch: Launch, value: Any) -> Answer:
    if value == "vanilla":
        return Answer("always", note="the clipped loss")
    if launch.get(ESTIMATOR, "gae") not in ESTIMATORS:
        return Answer("none", note=f"this loss needs advantages of groups, not {launch.get(ESTIMATOR, 'gae')}")
    if loss_of(launch) == "vanilla":
        return Answer("none", note=f"no algorithm has the loss '{value}':  rlcore list-plugins --kind algorithm --all")
    if value in ("dppo_tv", "dppo_kl"):
        return to(algorithm="dppo", algorithm__divergence=value.removeprefix("dppo_"))
    return to(algorithm=chosen(launch)[0])


def _of_loss(setting: str) -> Rule:
    """Return a rule for a setting of all losses except those that ignore it."""

    def rule(launch: Launch, value: Any) -> Answer:
        loss = loss_of(launch)
        if value is None:
            return Answer("always", note="null: the default")
        if loss in _IGNORED.get(setting, ()):
            if loss.startswith("dppo"):
                return Answer("none", note="the ratio is not truncated")
            return Answer("always", note=f"has no effect with {LOSS}={loss}")
        name = "limit" if setting.startswith("clip") and loss.startswith("dppo") else setting
        return Answer("set", ((f"algorithm.{name}", _number(value)),))

    return rule


def _number(value: Any) -> Any:
    """Convert to float; a shell variable, such as $CLIP, stays as it is."""
    return value if isinstance(value, str) and "$" in value else float(value)


def _clip(launch: Launch, value: Any) -> Answer:
    ends = [launch.get(f"{ACTOR}clip_ratio_{end}") for end in ("low", "high")]
    low, high = (_number(value if end is None else end) for end in ends)
    if loss_of(launch) in _IGNORED["clip_low"]:
        return Answer("always", note=f"has no effect with {LOSS}={loss_of(launch)}")
    if loss_of(launch).startswith("dppo"):
        return to(algorithm__limit=low)
    return to(algorithm__clip_low=low, algorithm__clip_high=high)


def _kl_loss(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="no KL penalty in the loss unless algorithm.kl.coefficient is set")
    coefficient = float(launch.get(ACTOR + "kl_loss_coef", 0.001))
    kind = KL_TYPES.get(launch.get(ACTOR + "kl_loss_type", "low_var_kl"), "k3")
    return Answer("set", _kl("loss", coefficient, kind))


def _kl_reward(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="no KL penalty in the reward unless algorithm.kl.where=reward")
    if launch.get(ACTOR + "use_kl_loss"):
        return Answer("none", note="there is only one penalty, and use_kl_loss=True puts it into the loss")
    coefficient = float(launch.get("algorithm.kl_ctrl.kl_coef", 0.001))
    return Answer("set", _kl("reward", coefficient, KL_TYPES.get(launch.get("algorithm.kl_penalty", "kl"), "k1")))


def _kl(where: str, coefficient: float, estimator: str) -> tuple[tuple[str, Any], ...]:
    values = {"coefficient": coefficient, "where": where, "estimator": estimator}
    return tuple((f"algorithm.kl.{name}", value) for name, value in values.items())


def _gamma(launch: Launch, value: Any) -> Answer:
    estimator = launch.get(ESTIMATOR, "gae")
    if estimator in ("gae", "reinforce_plus_plus"):
        return to(algorithm__gamma=_number(value))
    return Answer("always", note=f"has no effect with {ESTIMATOR}={estimator}")


def _by_std(launch: Launch, value: Any) -> Answer:
    if ESTIMATORS.get(launch.get(ESTIMATOR, "gae")) != "grpo":
        return Answer("always", note=f"has no effect with {ESTIMATOR}={launch.get(ESTIMATOR, 'gae')}")
    if chosen(launch)[0] == "gvpo":
        return Answer("always", note="gvpo compares rewards without the deviation of their group")
    if chosen(launch)[0] == "grpo":
        return to(algorithm__normalize_by_std=value)
    return (
        Answer("always", note="already the default")
        if value
        else to(algorithm__estimator=chosen(launch)[1] or "dr_grpo")
    )


def _average(launch: Launch, value: Any) -> Answer:
    if loss_of(launch) in _IGNORED["average"]:
        return Answer("always", note=f"{LOSS}={loss_of(launch)} has its own average")
    if value in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        return to(algorithm__average=value)
    if value == "seq-mean-token-sum-norm":
        longest = launch.get(ACTOR + "loss_scale_factor") or launch.get("data.max_response_length", 512)
        note = f"the sum is not divided by {longest}, so gradients are {longest} times as large"
        return Answer("partly", (("algorithm.average", "seq-mean-token-sum"),), note)
    return Answer("none", note="the averages are token-mean, seq-mean-token-mean and seq-mean-token-sum")


def _groups(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="off unless algorithm.refill.rounds is set")
    if launch.get(ESTIMATOR, "gae") not in ESTIMATORS:
        return Answer("none", note=f"refilling needs advantages of groups, not {launch.get(ESTIMATOR, 'gae')}")
    rounds = launch.get(GROUPS + "max_num_gen_batches", 10) or 10
    return to("missing prompts are sampled again", algorithm__refill__rounds=rounds)


def _overlong(name: str) -> Rule:
    """Return a rule for DAPO's penalty for long responses."""

    def rule(launch: Launch, value: Any) -> Answer:
        if not launch.get(OVERLONG + "enable"):
            return Answer("always", note="off unless algorithm.overlong.tokens is set")
        if launch.get(ESTIMATOR, "gae") not in ESTIMATORS:
            note = "with a critic it is a reward of rlcore-rewards:  {name: overlong, limit: N, buffer: N}"
            return Answer("none", note=note)
        if name == "enable":
            tokens, factor = launch.get(OVERLONG + "len", 0), float(launch.get(OVERLONG + "penalty_factor", 1.0))
            return to(algorithm__overlong__tokens=tokens, algorithm__overlong__factor=factor)
        return Answer("set", note="part of overlong_buffer.enable") if name else Answer("always", note="always logged")

    return rule


def _weights(launch: Launch, value: Any) -> Answer:
    """Translate importance weights: one threshold truncates them, two form a band."""
    if not value:
        return Answer("always", note="no weights unless algorithm.correction.weight is set")
    if value not in ("token", "sequence"):
        return Answer("none", note="weights are per token or per sequence")
    low, _, high = launch.text(CORRECTION + "rollout_is_threshold", "2.0").strip("\"'").rpartition("_")
    settings = {"weight": value, "high": float(high)}
    if low:
        settings |= {"beyond": "mask", "low": float(low)}
    return Answer("set", tuple((f"algorithm.correction.{name}", it) for name, it in settings.items()))


def _rejection(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="nothing is rejected unless algorithm.correction.reject is set")
    name = {"seq_mean_k1": "mean_k1", "seq_mean_k3": "mean_k3", "seq_max_k3": "max_k3"}.get(value)
    if name is None:
        return Answer("none", note="responses can be rejected by mean_k1, mean_k3 or max_k3")
    low, _, high = launch.text(CORRECTION + "rollout_rs_threshold", "").strip("\"'").rpartition("_")
    above, note = float(high), "rejected responses still count in the mean"
    if name == "mean_k1":  # verl's thresholds are ratios
        above = min(math.log(float(high)), -math.log(float(low)) if low else math.inf)
        note = "the bound is the same in both directions, and rejected responses still count in the mean"
    return Answer(
        "partly", (("algorithm.correction.reject", name), ("algorithm.correction.reject_above", round(above, 6))), note
    )


RULES: dict[str, Rule] = {
    ESTIMATOR: _algorithm,
    LOSS: _loss,
    ACTOR + "clip_ratio": _clip,
    ACTOR + "clip_ratio_low": _of_loss("clip_low"),
    ACTOR + "clip_ratio_high": _of_loss("clip_high"),
    ACTOR + "clip_ratio_c": _of_loss("dual_clip"),
    ACTOR + "use_kl_loss": _kl_loss,
    "algorithm.use_kl_in_reward": _kl_reward,
    "algorithm.gamma": _gamma,
    "algorithm.norm_adv_by_std_in_grpo": _by_std,
    ACTOR + "loss_agg_mode": _average,
    GROUPS + "enable": _groups,
    OVERLONG + "enable": _overlong("enable"),
    OVERLONG + "len": _overlong("len"),
    OVERLONG + "penalty_factor": _overlong("penalty_factor"),
    OVERLONG + "log": _overlong(""),
    CORRECTION + "rollout_is": _weights,
    CORRECTION + "rollout_rs": _rejection,
}
"""Key -> rule."""
