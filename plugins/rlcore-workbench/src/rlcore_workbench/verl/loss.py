"""Keys that say how samples become updates: algorithm, loss, KL penalty, mini-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore_workbench.verl.answer import ACTOR, BATCH, ESTIMATOR, MINI, Answer, Rule, available, to
from rlcore_workbench.verl.command import Launch

LOSS = ACTOR + "policy_loss.loss_mode"
GROUPS, OVERLONG = "algorithm.filter_groups.", "reward_model.overlong_buffer."
DAPO = "dapo"
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ALGORITHMS: Mapping[str, Sequence[str]] = {
    "grpo": ("grpo",),
    "gae": ("ppo",),
    "reinforce_plus_plus": ("reinforce_pp", "reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "reinforce_plus_plus_baseline"),
    "geo_mean": ("gmpo",),
}
"""Names there -> names here; any other name is looked for as it is."""


def _algorithm(launch: Launch, value: Any) -> Answer:
    """The estimator, unless the loss has a name of its own."""
    loss = launch.get(LOSS, "vanilla")
    wanted = loss if value == "grpo" and loss != "vanilla" else value
    names = ALGORITHMS.get(str(wanted), (str(wanted),))
    found = next((name for name in names if name in available("algorithm")), None)
    if found is None:
        return Answer("none", note=f"no algorithm '{wanted}' is installed:  rlcore list-plugins --kind algorithm --all")
    return to(algorithm=DAPO if found == "grpo" and needs_dapo(launch) else found)


def needs_dapo(launch: Launch) -> bool:
    """Whether groups are refilled or long responses punished, which the core's own grpo does not do."""
    asked = launch.get(GROUPS + "enable") or launch.get(OVERLONG + "enable")
    return bool(asked) and launch.get(ESTIMATOR, "gae") == "grpo" and launch.get(LOSS, "vanilla") == "vanilla"


def _loss(launch: Launch, value: Any) -> Answer:
    if value == "vanilla":
        return Answer("always", note="the clipped loss")
    if launch.get(ESTIMATOR, "gae") != "grpo":
        return Answer("none", note=f"this loss goes with the advantages of grpo, not {launch.get(ESTIMATOR, 'gae')}")
    return _algorithm(launch, "grpo")


def _mini_batch(launch: Launch, value: Any) -> Answer:
    batch = launch.get(BATCH, 1024)
    count = max(1, round(batch / value))
    if batch % value:
        return Answer(
            "partly",
            (("algorithm.minibatches", count),),
            f"mini-batches are equal parts here; {batch} prompts cannot be cut into parts of {value}",
        )
    return Answer("set", (("algorithm.minibatches", count),), f"{batch} prompts a step, {value} in a mini-batch")


def _clip(launch: Launch, value: Any) -> Answer:
    low, high = (launch.get(f"{ACTOR}clip_ratio_{end}", value) for end in ("low", "high"))
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
        return Answer("none", note="the penalty has one place, and use_kl_loss=True puts it into the loss")
    coefficient = float(launch.get("algorithm.kl_ctrl.kl_coef", 0.001))
    return Answer("set", _kl("reward", coefficient, KL_TYPES.get(launch.get("algorithm.kl_penalty", "kl"), "k1")))


def _kl(where: str, coefficient: float, estimator: str) -> tuple[tuple[str, Any], ...]:
    values = {"coefficient": coefficient, "where": where, "estimator": estimator}
    return tuple((f"algorithm.kl.{name}", value) for name, value in values.items())


def _kl_part(switch: str) -> Rule:
    """A key that counts only with the switch; what it says is written with it."""

    def rule(launch: Launch, value: Any) -> Answer:
        if not launch.get(switch):
            return Answer("always", note=f"has no effect without {switch}=True")
        if isinstance(value, str) and value not in KL_TYPES:
            return Answer("none", note=f"estimators are {', '.join(sorted(set(KL_TYPES.values())))}; k3 is taken")
        return Answer("set", note=f"part of {switch}")

    return rule


def _kl_control(name: str) -> Rule:
    def rule(launch: Launch, value: Any) -> Answer:
        if not launch.get("algorithm.use_kl_in_reward"):
            return Answer("always", note="has no effect without algorithm.use_kl_in_reward=True")
        return Answer("set", ((f"algorithm.kl.{name}", value if isinstance(value, str) else float(value)),))

    return rule


def _of_gae(name: str) -> Rule:
    """Settings of the critic's estimator."""

    def rule(launch: Launch, value: Any) -> Answer:
        if launch.get(ESTIMATOR, "gae") == "gae":
            return Answer("set", ((f"algorithm.{name}", float(value)),))
        return Answer("always", note=f"has no effect with {ESTIMATOR}={launch.get(ESTIMATOR)}")

    return rule


def _by_std(launch: Launch, value: Any) -> Answer:
    if launch.get(ESTIMATOR, "gae") == "grpo" and needs_dapo(launch):
        return Answer("always", note="so it is") if value else to(algorithm__estimator="dr_grpo")
    if launch.get(ESTIMATOR, "gae") == "grpo":
        return to(algorithm__normalise_by_std=value)
    return Answer("always", note=f"has no effect with {ESTIMATOR}={launch.get(ESTIMATOR, 'gae')}")


def _average(launch: Launch, value: Any) -> Answer:
    if value in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        return to(algorithm__average=value)
    return Answer("none", note="averages are token-mean, seq-mean-token-mean and seq-mean-token-sum")


def _groups(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="off unless algorithm.refill.rounds is set")
    if not needs_dapo(launch):
        return Answer("none", note=f"refilling goes with {ESTIMATOR}=grpo and the clipped loss")
    rounds = launch.get(GROUPS + "max_num_gen_batches", 10) or 10
    return to("as many prompts are drawn again as are missing", algorithm__refill__rounds=rounds)


def _of_groups(launch: Launch, value: Any) -> Answer:
    if not launch.get(GROUPS + "enable"):
        return Answer("always", note=f"has no effect without {GROUPS}enable=True")
    if isinstance(value, int):
        return Answer("set", note="algorithm.refill.rounds")
    if value in ("score", "seq_reward", "seq_final_reward", "acc"):
        return Answer("always", note="groups are compared by their reward")
    return Answer("none", note="groups are compared by their reward")


def _overlong(name: str) -> Rule:
    """The penalty for long responses of DAPO."""

    def rule(launch: Launch, value: Any) -> Answer:
        if not launch.get(OVERLONG + "enable"):
            return Answer("always", note="off unless algorithm.overlong.tokens is set")
        if not needs_dapo(launch):
            return Answer("none", note=f"the penalty goes with {ESTIMATOR}=grpo and the clipped loss")
        if name == "enable":
            tokens, factor = launch.get(OVERLONG + "len", 0), float(launch.get(OVERLONG + "penalty_factor", 1.0))
            return to(algorithm__overlong__tokens=tokens, algorithm__overlong__factor=factor)
        return Answer("set", note="part of overlong_buffer.enable") if name else Answer("always", note="logged always")

    return rule


RULES: dict[str, Rule] = {
    ESTIMATOR: _algorithm,
    LOSS: _loss,
    MINI: _mini_batch,
    ACTOR + "clip_ratio": _clip,
    ACTOR + "use_kl_loss": _kl_loss,
    ACTOR + "kl_loss_coef": _kl_part(ACTOR + "use_kl_loss"),
    ACTOR + "kl_loss_type": _kl_part(ACTOR + "use_kl_loss"),
    "algorithm.use_kl_in_reward": _kl_reward,
    "algorithm.kl_ctrl.kl_coef": _kl_part("algorithm.use_kl_in_reward"),
    "algorithm.kl_penalty": _kl_part("algorithm.use_kl_in_reward"),
    "algorithm.kl_ctrl.type": _kl_control("controller"),
    "algorithm.kl_ctrl.target_kl": _kl_control("target"),
    "algorithm.kl_ctrl.horizon": _kl_control("horizon"),
    "algorithm.gamma": _of_gae("gamma"),
    "algorithm.lam": _of_gae("lam"),
    "critic.cliprange_value": _of_gae("clip_value"),
    "algorithm.norm_adv_by_std_in_grpo": _by_std,
    ACTOR + "loss_agg_mode": _average,
    GROUPS + "enable": _groups,
    GROUPS + "metric": _of_groups,
    GROUPS + "max_num_gen_batches": _of_groups,
    OVERLONG + "enable": _overlong("enable"),
    OVERLONG + "len": _overlong("len"),
    OVERLONG + "penalty_factor": _overlong("penalty_factor"),
    OVERLONG + "log": _overlong(""),
}
"""Key -> its rule."""
