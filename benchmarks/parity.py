"""Compare the values and gradients of rlcore's formulas with verl's and TRL's on the same random numbers.

    pip install verl trl -e plugins/rlcore-algorithms      (in a separate virtual environment; rlcore needs neither)
    python benchmarks/parity.py

Everything is float64 where the other side allows it. The last column explains intended differences.
"""

import importlib
import importlib.metadata
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rlcore_algorithms.choose import choose_at_random, choose_largest
from rlcore_algorithms.cispo import CISPO
from rlcore_algorithms.covariance import ClipCov, KLCov
from rlcore_algorithms.dr_grpo import DrGRPO
from rlcore_algorithms.estimators import ROW_ESTIMATORS, returns_to_go
from rlcore_algorithms.gmpo import GMPO
from rlcore_algorithms.gspo import GSPO
from rlcore_algorithms.pairs import logistic
from rlcore_algorithms.remax import ReMax
from rlcore_algorithms.sapo import SAPO
from torch import Tensor

from rlcore.algorithms.advantages import gae, group_normalized
from rlcore.algorithms.correction import CorrectionConfig, correct
from rlcore.algorithms.grpo import GRPO
from rlcore.algorithms.kl import kl_estimate
from rlcore.algorithms.losses import clipped_value_loss
from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.rewards.relative import relative
from rlcore.testing import FakeRoles
from rlcore.types import LossTerms
from rlcore.workers.averaging import count, reduce_terms

ROWS, TOKENS, GROUP = 24, 17, 4
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
Row = tuple[str, str, float, str]


class Table:
    """Random responses, padded to [ROWS, TOKENS] for the others and concatenated for rlcore."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
        self.mask = torch.arange(TOKENS) < self.lengths[:, None]
        self.old = -1.5 + normal(ROWS, TOKENS)
        self.new = self.old + 0.4 * normal(ROWS, TOKENS)
        self.ref = self.old + 0.3 * normal(ROWS, TOKENS)
        self.values = normal(ROWS, TOKENS)
        self.old_values = self.values + 0.5 * normal(ROWS, TOKENS)
        self.reward = normal(ROWS)
        self.advantage = normal(ROWS)
        self.group_id = torch.arange(ROWS) // GROUP
        self.token_rewards = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
        self.token_rewards[torch.arange(ROWS), self.lengths - 1] = self.reward

    def batch(self) -> Batch:
        return Batch.of(
            lengths=self.lengths,
            tokens={"loss_mask": torch.ones(int(self.lengths.sum()), dtype=torch.bool)},
            rows={"advantage": self.advantage},
        )

    def loss(self, algorithm: Any, **columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value and the gradient per token of an algorithm's policy loss; `columns` are further token columns."""
        new = self.new[self.mask].requires_grad_()
        terms, _ = algorithm.policy_loss(new, self.old[self.mask], self.batch().with_tokens(**columns))
        whole = LossTerms(terms=terms, average=algorithm.config.average)
        value = reduce_terms(whole, self.batch(), count(self.lengths))
        return value.detach(), torch.autograd.grad(value, new)[0]

    def padded(self, formula: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the value and the gradient per token of a formula over padded log-probs."""
        new = self.new.clone().requires_grad_()
        value = formula(new)
        return value.detach(), torch.autograd.grad(value, new)[0][self.mask]


def main() -> None:
    print("| formula | other implementation | largest difference | why |\n|---|---|---|---|")
    for package, rows in (("verl", with_verl), ("trl", with_trl)):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"| | {package} is not installed | | |")
            continue
        for what, other, difference, why in rows(Table()):
            print(f"| {what} | {package} {version}: `{other}` | {difference:.1e} | {why} |", flush=True)


def with_verl(table: Table) -> Iterator[Row]:
    core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    config: Any = importlib.import_module("verl.workers.config").ActorConfig
    mask, index = table.mask.double(), table.group_id.numpy()
    rewards = {"token_level_rewards": table.token_rewards, "response_mask": mask}
    grouped = {**rewards, "index": index}

    def advantage(name: str, found: Tensor, why: str = "", **arguments: Any) -> Row:
        function = getattr(core, f"compute_{name}_advantage")
        wanted = function(**{key: _copy(value) for key, value in arguments.items()})[0][table.mask]
        found = found.repeat_interleave(table.lengths) if len(found) == ROWS else found
        return f"advantages of {name.removesuffix('_outcome')}", function.__name__, _apart(found, wanted), why

    group = (table.reward, table.group_id, table.lengths)
    yield advantage("grpo_outcome", group_normalized(*group[:2]), "float32 here", **grouped)
    centered = group_normalized(*group[:2], by_std=False)
    unscaled = {"norm_adv_by_std_in_grpo": False}
    name, other, far, why = advantage("grpo_outcome", centered, "float32 here", **grouped, **unscaled)
    yield f"{name}, not scaled (Dr. GRPO)", other, far, why
    yield advantage("rloo_outcome", ROW_ESTIMATORS["rloo"](*group), **grouped)
    yield advantage("opo_outcome", ROW_ESTIMATORS["opo"](*group), **grouped)
    yield advantage("gpg_outcome", ROW_ESTIMATORS["gpg"](*group), **grouped)
    greedy = table.reward.roll(1)
    samples = Batch.of(lengths=table.lengths, rows={"baseline": greedy})
    found = ReMax(ReMax.Config()).with_advantages(None, samples, table.reward)["advantage"]
    yield advantage("remax_outcome", found, "float32 here", **rewards, reward_baselines=greedy)
    bessel = "verl's variance divides by n - 1 tokens, ours by n"
    yield advantage(
        "reinforce_plus_plus_baseline_outcome",
        ROW_ESTIMATORS["reinforce_plus_plus_baseline"](*group),
        bessel,
        **grouped,
    )
    end_to_end = table.token_rewards[table.mask], table.batch()["loss_mask"], table.lengths
    returns = returns_to_go(*end_to_end, 0.9)
    discounted = core.compute_reinforce_plus_plus_outcome_advantage(**rewards, config=SimpleNamespace(gamma=0.9))[1]
    yield (
        "returns of reinforce_plus_plus, gamma 0.9",
        "compute_reinforce_plus_plus_outcome_advantage",
        _apart(returns, discounted[table.mask]),
        "",
    )
    _, ours = gae(end_to_end[0], table.values[table.mask], *end_to_end[1:], gamma=0.99, lam=0.95)
    _, theirs = core.compute_gae_advantage_return(table.token_rewards, table.values, mask, 0.99, 0.95)
    yield (
        "returns of GAE, gamma 0.99, lambda 0.95",
        "compute_gae_advantage_return",
        _apart(ours, theirs[table.mask]),
        "",
    )

    for name, algorithm, settings in (
        ("vanilla", GRPO(GRPO.Config(**WIDE, dual_clip=3.0)), {"clip_ratio_c": 3.0}),
        ("gspo", GSPO(GSPO.Config(**WIDE)), {}),
        ("geo_mean", GMPO(GMPO.Config()), {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
        ("cispo", CISPO(CISPO.Config(clip_low=0.2, clip_high=0.28)), {}),
        ("sapo", SAPO(SAPO.Config()), {"tau_pos": 1.0, "tau_neg": 1.05}),
    ):
        given = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **settings}
        actor = config(strategy="fsdp", rollout_n=GROUP, use_dynamic_bsz=True, **given)
        function = core.get_policy_loss_fn(name)
        wide = table.advantage[:, None].expand(-1, TOKENS)
        mode = algorithm.config.average

        def formula(new: Tensor) -> Tensor:
            return function(table.old, new, wide, mask, mode, actor)[0]  # noqa: B023

        why = "verl adds 1e-8 to the length of a response" if mode == "seq-mean-token-mean" else ""
        yield _loss(name, function.__name__, table.loss(algorithm), table.padded(formula), why)

    for ours, theirs in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")):
        found = kl_estimate(table.new[table.mask], table.ref[table.mask], ours)
        far = _apart(found, core.kl_penalty_forward(table.new, table.ref, theirs)[table.mask])
        yield f"KL estimate {ours}", f"kl_penalty({theirs})", far, "verl bounds k3 at 10" if ours == "k3" else ""
    returns = table.values + 1
    terms, _ = clipped_value_loss(*(x[table.mask] for x in (table.values, table.old_values, returns)), clip=0.2)
    wanted, _ = core.compute_value_loss(table.values, returns, table.old_values, mask, 0.2)
    yield "clipped value loss", "compute_value_loss", _apart(terms.mean(), wanted), ""
    wanted = torch.zeros(ROWS, dtype=torch.float64)
    found = np.zeros(ROWS)
    for part in (table.reward, table.advantage):
        one_token = {"token_level_rewards": part[:, None].clone(), "response_mask": torch.ones(ROWS, 1)}
        wanted += core.compute_grpo_outcome_advantage(**one_token, index=index)[0][:, 0]
        found += relative(part.numpy(), index, "std")
    far = _apart(torch.from_numpy(found), wanted)
    yield "two rewards with relative=std", "compute_grpo_outcome_advantage of each (GDPO)", far, ""

    yield from _tokens_of_large_covariance(table, core, config)
    yield from _corrections(table)


def _tokens_of_large_covariance(table: Table, core: Any, config: Any) -> Iterator[Row]:
    """Compare clip_cov and kl_cov. verl selects tokens by the current log-probs, so ours get the same ones here."""
    mask, wide = table.mask.double(), table.advantage[:, None].expand(-1, TOKENS)
    roles = FakeRoles(["actor"])
    rows = {"sample_id": torch.arange(ROWS), "num_loss_tokens": table.lengths}
    chosen_by = table.batch().with_tokens(old_log_probs=table.new[table.mask]).with_rows(**rows)
    for name, made, choose, settings in (
        ("clip_cov", ClipCov(ClipCov.Config(**WIDE)), (choose_at_random, 1.0, (0.5, 2.0), 0), ("clip", 1.0)),
        ("kl_cov", KLCov(KLCov.Config()), (choose_largest, 0.1), ("kl", 0.1)),
    ):
        how, *given = choose
        chosen = how(roles, BatchRef.publish(chosen_by, roles.store), "advantage", *given).local()["chosen"]
        kind, share = settings
        bounds = {"clip_cov_lb": 0.5, "clip_cov_ub": 2.0} if kind == "clip" else {}
        actor = config(strategy="fsdp", rollout_n=GROUP, use_dynamic_bsz=True, clip_ratio_low=0.2, clip_ratio_high=0.28)
        policy_loss = SimpleNamespace(**{f"{kind}_cov_ratio": share}, ppo_kl_coef=1.0, **bounds)
        object.__setattr__(actor, "policy_loss", policy_loss)
        function = core.get_policy_loss_fn(name)
        wanted = table.padded(lambda new: function(table.old, new, wide, mask, "token-mean", actor)[0])  # noqa: B023
        found = table.loss(made, chosen=chosen)
        if (
            name == "clip_cov"
        ):  # verl also removes the value of the selected tokens; only the gradient matters for training
            found, wanted = (found[1], found[1]), (wanted[1], wanted[1])
        why = "all tokens inside the bounds selected; gradient only" if name == "clip_cov" else ""
        yield _loss(name, function.__name__, found, wanted, why)


def _corrections(table: Table) -> Iterator[Row]:
    helper: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    mask, d = table.mask.double(), table.old - table.ref  # as if `ref` were the engine's log-probs
    batch = table.batch().with_tokens(rollout_log_probs=table.ref[table.mask])

    def ours(**settings: Any) -> Tensor:
        return correct(torch.ones_like(d[table.mask]), table.old[table.mask], batch, CorrectionConfig(**settings))[0]

    for what, found, level, threshold in (
        ("token weights, truncated", ours(weight="token", high=1.2), "token", 1.2),
        ("token weights, band", ours(weight="token", beyond="mask", low=0.8, high=1.2), "token", "0.8_1.2"),
        ("sequence weights, truncated", ours(weight="sequence", high=1.2), "sequence", 1.2),
    ):
        wanted = helper.compute_rollout_correction_weights(d, mask, level, threshold)[0][table.mask]
        yield f"correction: {what}", "compute_rollout_correction_weights", _apart(found, wanted), ""
    for name, above, option, threshold in (
        ("mean_k1", 0.1, "seq_mean_k1", f"{np.exp(-0.1)}_{np.exp(0.1)}"),
        ("mean_k3", 0.04, "seq_mean_k3", "0.04"),
        ("max_k3", 0.1, "seq_max_k3", "0.1"),
    ):
        found = ours(reject=name, reject_above=above)
        assert 0 < float(found.mean()) < 1, "some are rejected, some are not"
        wanted = helper.compute_rollout_rejection_mask(d, mask, option, threshold)[0][table.mask]
        yield f"correction: rejected by {name}", "compute_rollout_rejection_mask", _apart(found, wanted), ""


def with_trl(table: Table) -> Iterator[Row]:
    trainer: Any = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    for what, algorithm, settings in (
        ("dapo", GRPO(GRPO.Config(**WIDE)), {}),
        ("grpo", GRPO(GRPO.Config(**WIDE, average="seq-mean-token-mean")), {}),
        ("dr_grpo", DrGRPO(DrGRPO.Config(**WIDE)), {}),
        ("grpo", GSPO(GSPO.Config(**WIDE)), {"importance_sampling_level": "sequence"}),
        ("cispo", CISPO(CISPO.Config(clip_high=0.28)), {"epsilon_high": 1.28}),
        ("sapo", SAPO(SAPO.Config()), {}),
    ):
        value, gradient = table.loss(algorithm)
        wanted = table.padded(lambda new: _trl_loss(trainer, table, new, what, settings))  # noqa: B023
        why = ""
        if what == "dr_grpo":  # a sum over tokens, which TRL divides by the longest possible response
            value, gradient, why = value / TOKENS, gradient / TOKENS, "after dividing ours by the token limit"
        level = f", {settings['importance_sampling_level']} level" if "importance_sampling_level" in settings else ""
        name = type(algorithm).__name__
        yield _loss(name, f"GRPOTrainer(loss_type={what}{level})", (value, gradient), wanted, why)
    yield _of_scores(table)
    yield _of_preferences(table)


def _of_scores(table: Table) -> Row:
    """Compare the Bradley-Terry loss on scores of whole responses."""
    trainer: Any = importlib.import_module("trl.trainer.reward_trainer").RewardTrainer
    scores = table.reward.clone().requires_grad_()
    found = _logistic(table, scores, scores)
    state = SimpleNamespace(**_QUIET, args=SimpleNamespace(center_rewards_coefficient=None))
    wanted = trainer.compute_loss(state, lambda **_: SimpleNamespace(logits=scores[:, None]), {})
    wanted = wanted.detach(), torch.autograd.grad(wanted, scores)[0]
    return _loss("RewardModel", "RewardTrainer.compute_loss", found, wanted)


def _of_preferences(table: Table) -> Row:
    """Compare DPO on log-probs of two models."""
    trainer: Any = importlib.import_module("trl.trainer.dpo_trainer").DPOTrainer
    new, padded = table.new.clone().requires_grad_(), torch.zeros(ROWS, TOKENS)
    gap = torch.where(table.mask, new - table.ref, 0.0).sum(1)
    found = _logistic(table, 0.1 * gap, new)
    ways = {"f_divergence_type": "reverse_kl", "loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.1}
    ways |= {"aux_loss_enabled": False, "ld_alpha": None, "precompute_ref_logps": True, "use_weighting": False}
    references = torch.where(table.mask, table.ref, 0.0).sum(1).chunk(2)
    inputs = {
        "input_ids": torch.zeros(ROWS, 1 + TOKENS, dtype=torch.int64),
        "completion_mask": torch.nn.functional.pad(table.mask.long(), (1, 0)),
        "ref_chosen_logps": references[0],
        "ref_rejected_logps": references[1],
    }
    outputs = SimpleNamespace(
        log_probs=torch.where(table.mask, new, 0.0), entropy=padded, mean_logits=padded, is_top1=padded.bool()
    )
    wanted = trainer._compute_loss(SimpleNamespace(**_QUIET, **ways), lambda **_: outputs, inputs, False)
    wanted = wanted.detach(), torch.autograd.grad(wanted, new)[0]
    return _loss("DPO", "DPOTrainer(loss_type=sigmoid)", found, wanted)


_QUIET: dict[str, Any] = {
    "model": SimpleNamespace(training=False),
    "accelerator": SimpleNamespace(
        device="cpu", gather=lambda value: value.reshape(-1), gather_for_metrics=lambda value: value.reshape(-1)
    ),
    "_metrics": {"eval": defaultdict(list)},
    "_total_train_tokens": 0,
}
"""Attributes that TRL's trainers need to log metrics."""


def _logistic(table: Table, x: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value and gradient of a pairwise loss. TRL puts all chosen samples first; rlcore keeps pairs adjacent."""
    order = torch.arange(ROWS).reshape(2, -1).T.reshape(-1)
    batch = table.batch().with_rows(unit_id=torch.arange(ROWS) // 2)
    value = reduce_terms(logistic(x[order]), batch, count(table.lengths, batch.unit_sizes()))
    return value.detach(), torch.autograd.grad(value, leaf, retain_graph=True)[0]


def _trl_loss(trainer: Any, table: Table, new: Tensor, loss_type: str, settings: dict[str, Any]) -> Tensor:
    """Call the trainer's own method on an object with the attributes that it reads."""
    trainer_state: dict[str, Any] = {
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "aux_loss_coef": 0.0,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": TOKENS,
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(
            delta=None,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
            use_bias_correction_kl=False,
        ),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda value: value.reshape(-1), reduce=lambda value, reduction: value
        ),
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (new, torch.zeros_like(new), None),
        **settings,
    }
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, TOKENS, dtype=torch.int64),
        "completion_mask": table.mask.long(),
        "advantages": table.advantage,
        "old_per_token_logps": table.old,
        "num_items_in_batch": table.mask.sum(),
    }
    return trainer._compute_loss(SimpleNamespace(**trainer_state), None, inputs)


def _loss(what: str, other: str, found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], why: str = "") -> Row:
    assert float(wanted[1].abs().max()) > 0, f"{other} has no gradient"
    return f"loss and gradient of {what}", other, max(map(_apart, found, wanted)), why


def _apart(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found.double() - wanted.double()).abs().max())


def _copy(value: Any) -> Any:
    """Copy an argument, because some functions of verl modify theirs."""
    return value.clone() if isinstance(value, Tensor) else value.copy() if isinstance(value, np.ndarray) else value


if __name__ == "__main__":
    main()
