"""Every contract test fails for a plugin with the fault that the test is for.

Each mutant is a built-in plugin or a fake with one deliberate fault. A test must fail for it with an AssertionError,
that is, with the message that tells the author what the protocol asks for.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import random
import sys
import time
import types
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlcore.algorithms.grpo import GRPO, GRPOConfig
from rlcore.algorithms.ppo import PPO, PPOConfig
from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.controller import dispatch
from rlcore.data.batch import Batch
from rlcore.errors import ModelError
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.dispatch import Call
from rlcore.protocols.environment import Step
from rlcore.protocols.reward import batched
from rlcore.protocols.tracker import RunInfo
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.testing import (
    AlgorithmContract,
    BackendContract,
    DatasetContract,
    DispatchContract,
    EnvironmentContract,
    FakeConfig,
    FakeRollout,
    ModelRolloutContract,
    RewardContract,
    RolloutContract,
    RowDispatchContract,
    TrackerContract,
)
from rlcore.testing.model import small_model
from rlcore.trackers.jsonl import JSONLConfig, JSONLTracker
from rlcore.types import Counts, LossTerms, Mean, Mesh, Sample, TokenOutputs
from tests.test_contracts import InGroups
from tests.test_contracts import TestJSONL as JSONLSuite
from tests.workers import RankZero

SUITES = [
    RolloutContract,
    ModelRolloutContract,
    BackendContract,
    RewardContract,
    AlgorithmContract,
    DispatchContract,
    RowDispatchContract,
    TrackerContract,
    DatasetContract,
    EnvironmentContract,
]
MUTANTS: list[tuple[str, str, type]] = []
"""(test, what is wrong, suite of the mutant)."""


def mutant(test, fault, suite):
    MUTANTS.append((f"test_{test}", fault, suite))


def names(suite):
    return {name for name in dir(suite) if name.startswith("test_")}


# Rollouts: FakeRollout for the life of an engine, HFRollout where a model runs.


def engine(base=FakeRollout, *, samples=None, requests=None, **methods):
    """Return a suite for an engine with other methods, or with changed samples or requests."""

    async def generate(self, asked):
        asked = [requests(i, one) for i, one in enumerate(asked)] if requests else asked
        async for sample in base.generate(self, asked):
            for changed in samples(sample) if samples else [sample]:
                yield changed

    methods = ({"generate": generate} if samples or requests else {}) | methods
    cls = type("Mutant", (base,), methods)
    config = FakeConfig() if base is FakeRollout else HFConfig()
    contract = RolloutContract if base is FakeRollout else ModelRolloutContract
    return type("Suite", (contract,), {"make": lambda self, model, context: cls(config, model=model, context=context)})


def sampling(**options):
    return lambda i, one: replace(one, sampling=replace(one.sampling, **options))


def half_of_a_world(self, *args, **kwargs):
    FakeRollout.__init__(self, *args, **kwargs)
    self.mesh = Mesh(world_size=2, dp_size=2)


async def invents_a_sample(self, asked):
    yield Sample(request_id=0, token_ids=[1], log_probs=[-1.0], finish_reason="stop", policy_version=0)


async def goes_on_with_the_aborted(self, asked):
    left = [*getattr(self, "left", []), *asked]
    self.left = left
    async for sample in FakeRollout.generate(self, left):
        self.left = [one for one in self.left if one.request_id != sample.request_id]
        yield sample


async def mixes_calls(self, asked):
    shared = self.__dict__.setdefault("shared", [])
    shared += asked
    while shared:
        async for sample in FakeRollout.generate(self, [shared.pop(0)]):
            yield sample


async def refuses_a_second_call(self, asked):
    if getattr(self, "busy", False):
        raise RuntimeError("busy")
    self.busy = True
    async for sample in FakeRollout.generate(self, asked):
        yield sample
    self.busy = False


async def checks_late(self, asked):
    for one in asked:
        async for sample in FakeRollout.generate(self, [one]):
            yield sample


async def forgets_after_sleep(self, asked):
    salt = getattr(self, "salt", 0)
    async for sample in FakeRollout.generate(self, [replace(one, seed=one.seed + salt) for one in asked]):
        yield sample


def counts_sleeps(self):
    self.salt = getattr(self, "salt", 0) + 1


def takes_all(self, weights, version):
    for _ in weights:
        pass
    self.version = version


def takes_known(self, weights, version):
    known = [(name, tensor) for name, tensor in weights if name in self._expected.shapes]
    FakeRollout.load_weights(self, iter(known), version)


def serves_the_rest_as_new(self, weights, version):
    try:
        FakeRollout.load_weights(self, weights, version)
    except ModelError:
        self.version, self._state.broken = version, None
        raise


def serves_a_mixture(self, weights, version):
    try:
        HFRollout.load_weights(self, weights, version)
    except ModelError:
        self._state.broken = None
        raise


def stays_broken(self, weights, version):
    try:
        FakeRollout.load_weights(self, weights, version)
    except ModelError:
        self.failed = True
        raise
    self._state.broken = "a load failed once" if getattr(self, "failed", False) else None


def keeps_old_weights(self, weights, version):
    for _ in weights:
        pass
    self._version = version


def keeps_what_was_lent(self, weights, version):
    own = dict(self._model.named_parameters(remove_duplicate=False))
    for name, tensor in weights:
        own[name].data = tensor
    self._version, self._num_loads = version, self._num_loads + 1


def closes_once(self):
    assert not self._state.is_closed, "closed already"
    self._state.is_closed = True


def cut(sample):
    return [replace(sample, token_ids=sample.token_ids[:-1] or [1], log_probs=sample.log_probs[:-1] or [-1.0])]


def turn(sample):
    return [replace(sample, log_probs=[*sample.log_probs[1:], sample.log_probs[0]])]


for fault, suite in {
    "claims to be one of two ranks": engine(__init__=half_of_a_world),
    "invents a sample": engine(generate=invents_a_sample),
    "loses a sample": engine(samples=lambda one: [] if one.request_id == 23 else [one]),
    "repeats a sample": engine(samples=lambda one: [one] * (1 + (one.request_id == 23))),
    "renumbers samples": engine(samples=lambda one: [replace(one, request_id=one.request_id // 10)]),
}.items():
    mutant("every_request_is_answered_once", fault, suite)
for fault, change in {
    "omits the last log-prob": lambda one: one.log_probs[:-1],
    "returns NaN": lambda one: [float("nan")] * len(one.token_ids),
    "returns probabilities": lambda one: [0.5] * len(one.token_ids),
}.items():
    suite = engine(samples=lambda one, change=change: [replace(one, log_probs=change(one))])
    mutant("every_token_has_a_finite_log_prob", fault, suite)
for fault, suite in {
    "generates one token too many": engine(requests=lambda i, r: sampling(max_response_tokens=r.sampling.max_response_tokens + 1)(i, r)),
    "always reports stop": engine(samples=lambda one: [replace(one, finish_reason="stop")]),
    "always reports length": engine(samples=lambda one: [replace(one, finish_reason="length")], requests=lambda i, r: sampling(max_response_tokens=max(1, r.sampling.max_response_tokens - 1))(i, r)),
}.items():  # fmt: skip
    mutant("the_token_limit_ends_a_response", fault, suite)
for test, option in {
    "a_stop_token_ends_a_response_and_stays_in_it": "stop_token_ids",
    "a_stop_string_ends_a_response_and_stays_in_it": "stop",
}.items():
    mutant(test, "continues", engine(requests=sampling(**{option: ()})))
    mutant(test, "removes it", engine(samples=lambda one: cut(one) if one.finish_reason == "stop" else [one]))
    mutant(test, "reports length", engine(samples=lambda one: [replace(one, finish_reason="length")]))
for fault, change in {
    "seeds by position in the batch": lambda i, one: replace(one, seed=one.seed + i),
    "ignores the seed": lambda i, one: replace(one, seed=0),
}.items():
    mutant("a_seed_determines_the_response_in_any_batch", fault, engine(requests=change))
mutant(
    "samples_have_the_version_of_new_weights",
    "reports the previous version",
    engine(load_weights=lambda self, weights, version: FakeRollout.load_weights(self, weights, version - 1)),
)
for fault, suite in {
    "accepts anything": engine(load_weights=takes_all),
    "ignores unknown names": engine(load_weights=takes_known),
    "serves an incomplete update as the new version": engine(load_weights=serves_the_rest_as_new),
    "does not recover": engine(load_weights=stays_broken),
    "serves a mixture as the old version": engine(HFRollout, load_weights=serves_a_mixture),
}.items():
    mutant("an_incomplete_update_is_refused_and_never_used", fault, suite)
for test, base in {
    "weights_may_arrive_while_groups_are_drawn": FakeRollout,
    "each_token_has_the_log_prob_of_its_version": HFRollout,
}.items():
    mutant(
        test, "reports the last version for all tokens", engine(base, samples=lambda s: [replace(s, token_versions=())])
    )
mutant(
    "responses_wait_while_paused_and_asleep",
    "goes on while it is paused",
    engine(pause=lambda self: None, sleep=lambda self: None),
)
mutant(
    "responses_wait_while_paused_and_asleep",
    "forgets the versions before the pause",
    engine(samples=lambda s: [replace(s, token_versions=())]),
)
mutant(
    "an_incomplete_update_while_groups_are_drawn_is_never_used",
    "serves an incomplete update as the new version",
    engine(load_weights=serves_the_rest_as_new),
)
mutant("closing_the_iterator_aborts_the_rest", "continues aborted requests", engine(generate=goes_on_with_the_aborted))
mutant("overlapping_calls_get_their_own_samples", "mixes the samples of calls", engine(generate=mixes_calls))
mutant("overlapping_calls_get_their_own_samples", "refuses a second call", engine(generate=refuses_a_second_call))
for fault, suite in {
    "checks each prompt only when it is next": engine(generate=checks_late),
    "truncates the prompt": engine(requests=lambda i, one: replace(one, prompt_ids=one.prompt_ids[:8])),
    "names another request": engine(requests=lambda i, one: replace(one, request_id=i)),
}.items():
    mutant("a_prompt_that_does_not_fit_is_named_first", fault, suite)
mutant("sleep_and_wake_are_idempotent", "loses weights", engine(generate=forgets_after_sleep, sleep=counts_sleeps))
mutant("close_is_idempotent", "fails on the second close", engine(close=closes_once))
for fault, change in {"shifts log-probs by one token": turn, "ignores the temperature": None}.items():
    suite = (
        engine(HFRollout, samples=change) if change else engine(HFRollout, requests=sampling(temperature=1.0, top_k=0))
    )
    mutant("log_probs_match_the_trainer", fault, suite)
mutant(
    "new_weights_are_used_and_caches_dropped",
    "keeps the old weights",
    engine(HFRollout, load_weights=keeps_old_weights),
)
mutant("loaded_tensors_are_not_kept", "keeps the tensors", engine(HFRollout, load_weights=keeps_what_was_lent))
for fault, change in {"samples at temperature 0": {"temperature": 1.0}, "ignores top_k": {"top_k": 0}}.items():
    mutant("greedy_and_top_k_1_take_the_most_likely_token", fault, engine(HFRollout, requests=sampling(**change)))


# Backends


def backend(**methods):
    cls = type("Mutant", (LocalBackend,), methods)
    return type(
        "Suite", (BackendContract,),
        {"make": lambda self, model, optimizer, context: cls(LocalConfig(), model=model, optimizer=optimizer, context=context)},
    )  # fmt: skip


def outputs(change):
    """Return a suite for a backend whose `forward` returns changed outputs."""
    return backend(forward=lambda self, batch, *, temperature: change(LocalBackend.forward(self, batch, temperature=temperature)))  # fmt: skip


def rolled(out):
    return TokenOutputs(log_probs=out.log_probs.roll(-1), entropy=out.entropy)


def in_planned_order(self, batch, *, temperature):
    parts = [self._outputs(batch.take(rows), temperature) for rows in self._plan(batch)]
    with torch.no_grad():
        return TokenOutputs(log_probs=torch.cat([part.log_probs for part in parts]), entropy=parts[0].entropy)


def one_token_at_least(self, batch, *, temperature):
    out = LocalBackend.forward(self, batch, temperature=temperature)
    return out if len(batch) else TokenOutputs(log_probs=torch.zeros(1), entropy=torch.zeros(1))


def with_loss(wrap, rows=lambda batch: batch):
    """Return a suite for a backend with a changed loss or batch."""

    def forward_backward(self, batch, loss, *, temperature):
        num = max(1, len(self._plan(batch)))
        return LocalBackend.forward_backward(self, rows(batch), lambda o, b: wrap(loss, o, b, num), temperature=temperature)  # fmt: skip

    return backend(forward_backward=forward_backward)


def averaged(loss, out, batch, num):
    scalar, metrics = loss(out, batch)
    return scalar / num, metrics


def of_detached(loss, out, batch, num):
    return loss(TokenOutputs(log_probs=out.log_probs.detach(), entropy=out.entropy), batch)


def of_rolled(loss, out, batch, num):
    return loss(rolled(out), batch)


def by_length(self, batch):
    return LocalBackend._plan(self, batch.drop("unit_id") if "unit_id" in batch else batch)


def without_clearing(self):
    grads = [None if p.grad is None else p.grad.clone() for p in self._names]
    metrics = LocalBackend.step(self)
    for parameter, grad in zip(self._names, grads):
        parameter.grad = grad
    return metrics


def at_a_constant_rate(self):
    return LocalBackend.step(self) | {"lr": Mean(self.optimizer_config.lr)}


def without_clipping(self):
    config = self.optimizer_config
    self.optimizer_config = replace(config, clip_grad_norm=0.0)
    metrics = LocalBackend.step(self)
    self.optimizer_config = config
    return metrics


def silent_about_skips(self):
    return {name: mean for name, mean in LocalBackend.step(self).items() if name != "skipped"}


def stepping_by_zero(self):
    bad = any(p.grad is not None and not p.grad.isfinite().all() for p in self._names)
    for parameter in self._names if bad else ():
        parameter.grad = torch.zeros_like(parameter)
    return LocalBackend.step(self) | {"skipped": Mean(float(bad))}


def without_moments(self, directory):
    LocalBackend.load(self, directory)
    self._optimizer.state.clear()


def without_steps(self, directory):
    LocalBackend.load(self, directory)
    self.num_steps = 0


def pickled(self, directory):
    LocalBackend.save(self, directory)
    torch.save(self.num_steps, directory / "steps.pt")


def only_if_trained(self, directory):
    if self.context.trained:
        LocalBackend.save(self, directory)


def increased(self, directory):
    own = dict(self._model.named_parameters())
    LocalBackend.load_weights(self, ((name, parameter + 1.0) for name, parameter in own.items()))
    LocalBackend.save(self, directory)
    LocalBackend.load_weights(self, ((name, parameter - 1.0) for name, parameter in own.items()))


def half_loaded(self, directory):
    for parameter in self._names:
        parameter.data.add_(1.0)
    LocalBackend.load(self, directory)


def not_checked(self, directory):
    try:
        LocalBackend.load(self, directory)
    except (ModelError, FileNotFoundError):
        return


@staticmethod
def exported_without_the_head(source, target):
    LocalBackend.export(source, target)
    (target / "value_head.safetensors").unlink()


def reloaded_without_moments(self):
    self._optimizer.state.clear()


def put_away(self):
    for parameter in self._model.parameters():
        parameter.away, parameter.data = getattr(parameter, "away", parameter.data), torch.empty(0)


def brought_back(self):
    for parameter in self._model.parameters():
        parameter.data = getattr(parameter, "away", parameter.data)


def frozen_differs(self, batch, *, temperature):
    return LocalBackend.forward(self, batch, temperature=temperature if self.context.trained else 2.0)


def renamed(self):
    return ((f"module.{name}", tensor) for name, tensor in LocalBackend.weights(self))


def loading(change):
    """Return a suite for a backend that loads changed weights."""

    def load_weights(self, weights, mix=1.0):
        LocalBackend.load_weights(self, change(self, weights), mix)

    return backend(load_weights=load_weights)


def complete(self, weights):
    """Yield all parameters; current ones replace those that are missing or do not fit."""
    own, seen = dict(self._model.named_parameters()), set()
    for name, tensor in weights:
        if name in own and name not in seen and tensor.shape == own[name].shape:
            seen.add(name)
            yield name, tensor
    yield from ((name, parameter) for name, parameter in own.items() if name not in seen)


def keeps_tensors(self, weights, mix=1.0):
    own = dict(self._model.named_parameters())
    for name, tensor in weights:
        own[name].data = tensor


def shows_them_only(self, weights, mix=1.0):
    self.shown = [(name, tensor.clone()) for name, tensor in weights]


def shown_weights(self):
    return iter(getattr(self, "shown", None) or LocalBackend.weights(self))


def copies_always(self, weights, mix=1.0):
    LocalBackend.load_weights(self, weights)


def mixes_the_other_way(self, weights, mix=1.0):
    LocalBackend.load_weights(self, weights, 1.0 - mix or 1.0)


def starts_again(self, weights, mix=1.0):
    LocalBackend.load_weights(self, weights, mix)
    self._optimizer.state.clear()


def resets_the_head(self, weights, mix=1.0):
    LocalBackend.load_weights(self, weights, mix)
    self._value_head.weight.data.zero_()


def names_none(self, weights, mix=1.0):
    try:
        LocalBackend.load_weights(self, weights, mix)
    except ModelError as error:
        raise ModelError("the weights do not fit") from error


def uses_a_mixture(self, weights, mix=1.0):
    try:
        LocalBackend.load_weights(self, weights, mix)
    finally:
        self.weight_update.failure = ""


def mixes_into_a_mixture(self, weights, mix=1.0):
    failure, self.weight_update.failure = self.weight_update.failure, ""
    LocalBackend.load_weights(self, weights, mix)
    self.weight_update.failure = failure if mix < 1 else ""


def stays_incomplete(self, weights, mix=1.0):
    self.failed = getattr(self, "failed", "") or self.weight_update.failure
    LocalBackend.load_weights(self, weights, mix)
    self.weight_update.failure = self.failed


def leaves_a_copy(self):
    self.copy = [parameter.detach().clone() for parameter in self._model.parameters()]


def takes_the_copy(self):
    for parameter, copy in zip(self._model.parameters(), self.copy):
        parameter.data.copy_(copy)


def rounded(self):
    return ((name, tensor.bfloat16()) for name, tensor in LocalBackend.weights(self))


for test, suites in {
    "outputs_match_the_plain_model_at_the_temperature": {
        "ignores the temperature": backend(forward=lambda self, batch, *, temperature: LocalBackend.forward(self, batch, temperature=1.0)),
        "is off by one token": outputs(rolled),
        "returns entropy in bits": outputs(lambda out: replace(out, entropy=out.entropy / 0.6931)),
    },
    "outputs_do_not_depend_on_order_or_micro_batches": {"keeps the order of micro-batches": backend(forward=in_planned_order)},
    "a_share_without_rows_works": {"returns a token": backend(forward=one_token_at_least)},
    "a_value_head_returns_values": {
        "returns log-probs": outputs(lambda out: TokenOutputs(log_probs=out.values)),
        "ignores the mask": outputs(lambda out: TokenOutputs(values=out.values + 1)),
        "is constant": outputs(lambda out: TokenOutputs(values=out.values * 0)),
    },
    "the_loss_sees_every_row_once_with_its_own_outputs": {
        "loses a row": with_loss(lambda loss, o, b, n: loss(o, b), lambda batch: batch.take(range(len(batch) - 1))),
        "repeats a row": with_loss(lambda loss, o, b, n: loss(o, b), lambda batch: batch.take([0, *range(len(batch))])),
        "detaches the outputs": with_loss(of_detached),
        "is off by one token": with_loss(of_rolled),
    },
    "rows_of_a_unit_are_in_one_micro_batch": {"packs rows": backend(_plan=by_length)},
    "the_gradient_does_not_depend_on_micro_batches": {"averages micro-batches": with_loss(averaged)},
    "a_step_reports_norm_and_rate_and_clears_the_gradient": {
        "keeps the gradient": backend(step=without_clearing),
        "ignores the schedule": backend(step=at_a_constant_rate),
    },
    "the_gradient_is_clipped_to_its_norm": {"does not clip": backend(step=without_clipping)},
    "a_gradient_that_is_not_finite_changes_nothing": {
        "does not report it": backend(step=silent_about_skips),
        "counts it as a step": backend(step=stepping_by_zero),
    },
    "weights_have_hugging_face_names_and_exact_values": {
        "adds a prefix": backend(weights=renamed),
        "rounds": backend(weights=rounded),
    },
    "weights_of_another_model_are_copied_exactly": {
        "rounds": loading(lambda self, weights: ((name, tensor.half()) for name, tensor in weights)),
        "keeps the tensors": backend(load_weights=keeps_tensors),
        "computes with the old weights": backend(load_weights=shows_them_only, weights=shown_weights),
    },
    "weights_of_another_model_are_mixed_in": {
        "copies instead": backend(load_weights=copies_always),
        "swaps the weights of the mixture": backend(load_weights=mixes_the_other_way),
    },
    "loading_weights_keeps_the_optimizer": {"loses the moments": backend(load_weights=starts_again)},
    "loading_weights_keeps_the_value_head": {"resets the head": backend(load_weights=resets_the_head)},
    "weights_that_do_not_fit_are_refused_by_name": {
        "accepts anything": loading(complete),
        "names no parameter": backend(load_weights=names_none),
        "computes with a mixture": backend(load_weights=uses_a_mixture),
        "mixes into a mixture": backend(load_weights=mixes_into_a_mixture),
        "stays incomplete": backend(load_weights=stays_incomplete),
    },
    "weights_are_loaded_while_the_model_is_offloaded": {
        "loses the loaded weights": backend(offload=leaves_a_copy, reload=takes_the_copy),
    },
    "a_loaded_checkpoint_resumes_exactly": {
        "loses the moments": backend(load=without_moments),
        "loses the number of steps": backend(load=without_steps),
        "writes a pickle": backend(save=pickled),
    },
    "a_frozen_model_that_received_weights_is_saved": {
        "saves trained models only": backend(save=only_if_trained),
        "saves other weights": backend(save=increased),
    },
    "a_broken_checkpoint_changes_nothing": {
        "changes weights before it checks": backend(load=half_loaded),
        "accepts it": backend(load=not_checked),
    },
    "an_exported_critic_gives_the_same_values": {"omits the head": backend(export=exported_without_the_head)},
    "offload_and_reload_restore_everything": {
        "loses the moments": backend(reload=reloaded_without_moments),
        "has no weights while offloaded": backend(offload=put_away, reload=brought_back),
    },
    "a_frozen_model_gives_the_same_outputs": {"returns other outputs": backend(forward=frozen_differs)},
}.items():  # fmt: skip
    for fault, suite in suites.items():
        mutant(test, fault, suite)


# Rewards

CALLS = itertools.count()


def always_one(completion: str) -> float:
    return 1.0


def counts_calls(completion: str) -> float:
    return float(next(CALLS))


def needs_a_number(completion: str) -> float:
    return float(completion == "1") if completion.isdigit() else float("nan")


@batched
def above_the_mean(completion: list[str]) -> list[float]:
    mean = sum(map(len, completion)) / len(completion)
    return [float(len(text) > mean) for text in completion]


def reads_what_it_does_not_declare(completion: str, **columns: object) -> float:
    return float(completion == columns["answer"])


def scores_by_what_it_does_not_declare(completion: str, **columns: object) -> float:
    return float(completion == columns.get("answer"))


sys.modules["only_here"] = types.ModuleType("only_here")
sys.modules["only_here"].always_one = always_one


def reward(target, module="tests.test_mutants"):
    examples = (({"completion": "1", "answer": "1"}, 1.0), ({"completion": "22", "answer": "1"}, 0.0))
    return type("Suite", (RewardContract,), {"target": f"{module}:{target}", "examples": examples})


for test, fault, suite in (
    ("the_examples_get_their_scores", "always scores 1", reward("always_one")),
    ("any_completion_gets_a_score", "requires digits", reward("needs_a_number")),
    ("scores_are_reproducible", "depends on the number of calls", reward("counts_calls")),
    ("the_score_does_not_depend_on_the_other_samples", "compares samples", reward("above_the_mean")),
    ("all_columns_read_are_declared", "requires an undeclared column", reward("reads_what_it_does_not_declare")),
    ("all_columns_read_are_declared", "uses an undeclared column", reward("scores_by_what_it_does_not_declare")),
    ("it_works_in_a_separate_process", "exists in this process only", reward("always_one", "only_here")),
):
    mutant(test, fault, suite)


# Algorithms

DEFAULT = GRPOConfig(epochs=2, minibatches=3)


def algorithm(base=GRPO, config=DEFAULT, **methods):
    cls = type("Mutant", (base,), methods)
    return type("Suite", (AlgorithmContract,), {"make": lambda self: cls(config)})


def collected(change):
    return algorithm(collect=lambda self, roles, prompts: change(GRPO.collect(self, roles, prompts)))


def lost(change):
    """Return a suite for GRPO with a changed loss."""
    return algorithm(loss=lambda self, out, batch: change(GRPO.loss(self, out, batch), out, batch))


def scaled(terms, factor):
    return replace(terms, terms=terms.terms * factor)


def through_the_controller(samples):
    samples.fetch("old_log_probs")
    return samples


def with_moved_tokens(samples):
    return samples.with_tokens(input_ids=torch.arange(samples.num_tokens))


def writes_into_the_batch(terms, out, batch):
    batch["advantage"].mul_(2.0)
    return terms


def unbounded(self, out, batch):
    terms = GRPO.loss(self, out, batch)
    return replace(terms, terms=-torch.exp(out.log_probs - batch["old_log_probs"]) * batch.per_token("advantage"))


class Recorder:
    """Proxy of a role that changes the arguments of `update`."""

    def __init__(self, group, change):
        self._group, self._change, self.update = group, change, self

    def __getattr__(self, name):
        return getattr(self._group, name)

    def submit(self, mini, counts):
        return self._group.update.submit(*self._change(mini, counts))


def sent_by(change):
    def update(self, roles, experience):
        actor, roles.groups["actor"] = roles.actor, Recorder(roles.actor, change)
        metrics = GRPO.update(self, roles, experience)
        roles.groups["actor"] = actor
        return metrics

    return update


def sent(change):
    return algorithm(update=sent_by(change))


def in_groups(**methods):
    """Return a suite for GRPO with the four samples of a prompt as a unit."""
    return algorithm(InGroups, **methods)


def compared(x):
    return LossTerms(terms=(x[1::2] - x[0::2]).repeat_interleave(2), average="row-mean")


def by_rows(self, sample_id, sizes):
    return GRPO.minibatches(self, sample_id, np.ones_like(sample_id))


def with_all_units(self, roles, experience):
    return experience.with_rows(unit_id=experience.fetch("group_id"))


def without_rewards_it_fails(self, roles, prompts):
    samples = GRPO.collect(self, roles, prompts)
    samples.fetch("reward").max()
    return samples


for test, suites in {
    "roles_contain_an_actor_and_all_readers": {
        "has no actor": algorithm(roles=lambda self: [RoleSpec(name="rollout", worker="rollout")]),
        "reads columns for a missing critic": algorithm(reads=lambda self: {"actor": ["advantage"], "critic": ["values"]}),
    },
    "collect_provides_every_column_that_it_promises": {
        "omits a column": collected(lambda samples: samples.drop("old_log_probs")),
    },
    "collect_keeps_every_sample_with_its_own_tokens": {
        "moves tokens": collected(with_moved_tokens),
        "loses a row": collected(lambda samples: samples.take(range(len(samples) - 1))),
        "repeats a row": collected(lambda samples: samples.take([0, *range(len(samples))])),
        "fetches tokens": collected(through_the_controller),
    },
    "a_step_without_scored_samples_succeeds": {"takes the maximum over no rows": algorithm(collect=without_rewards_it_fails)},
    "losses_read_only_declared_columns_and_modify_nothing": {
        "reads an undeclared column": lost(lambda terms, out, batch: scaled(terms, float(batch["reward"].sum()))),
        "writes into the batch": lost(writes_into_the_batch),
        "is random": lost(lambda terms, out, batch: scaled(terms, random.random())),
    },
    "the_gradient_does_not_depend_on_micro_batches": {
        "averages in the loss": lost(lambda terms, out, batch: scaled(terms, 1.0 / len(batch))),
        "whitens each micro-batch": lost(lambda terms, out, batch: scaled(terms, batch["advantage"].std(correction=0))),
        "has no gradient": lost(lambda terms, out, batch: replace(terms, terms=terms.terms * 0)),
        "compares rows without a unit": lost(lambda terms, out, batch: compared(batch.per_row(out.log_probs))),
        "averages units in the loss": in_groups(loss=lambda self, out, batch: scaled(GRPO.loss(self, out, batch), 1.0 / len(batch))),
    },
    "tokens_outside_the_mask_do_not_matter": {
        "uses masked tokens": lost(lambda terms, out, batch: scaled(terms, out.log_probs.detach().mean())),
        "has terms at masked tokens": lost(lambda terms, out, batch: LossTerms(terms=batch.per_row(-out.log_probs) * batch["advantage"], average="row-mean")),
    },
    "extreme_ratios_stay_finite": {"exponentiates without a bound": algorithm(loss=unbounded)},
    "better_responses_become_more_likely": {"has the wrong sign": lost(lambda terms, out, batch: scaled(terms, -1.0))},
    "update_trains_on_every_sample_with_counts_of_the_mini_batch": {
        "loses a row": sent(lambda mini, counts: (mini.take(range(len(mini) - 1)), counts)),
        "sends the counts of the step": sent(lambda mini, counts: (mini, Counts(rows=16, tokens=48, units=16))),
        "counts rows as units": in_groups(update=sent_by(lambda mini, counts: (mini, replace(counts, units=counts.rows)))),
    },
    "update_keeps_units_whole": {
        "omits the units": in_groups(update=sent_by(lambda mini, counts: (mini.drop("unit_id"), counts))),
        "shuffles rows": in_groups(minibatches=by_rows),
    },
    "incomplete_units_are_not_trained": {"trains all rows": in_groups(_in_units=with_all_units)},
    "update_reports_a_skipped_step": {
        "does not report it": algorithm(update=lambda self, roles, experience: {k: v for k, v in GRPO.update(self, roles, experience).items() if k != "actor/skipped"}),
    },
    "state_is_json_and_a_resume_is_exact": {
        "has a tensor in its state": algorithm(state_dict=lambda self: GRPO.state_dict(self) | {"x": torch.ones(1)}),
        "ignores its state": algorithm(load_state_dict=lambda self, state: None),
    },
}.items():  # fmt: skip
    for fault, suite in suites.items():
        mutant(test, fault, suite)
mutant(
    "the_gradient_does_not_depend_on_micro_batches",
    "averages in the loss of the critic",
    algorithm(PPO, PPOConfig(), value_loss=lambda self, out, b: scaled(PPO.value_loss(self, out, b), 1.0 / len(b))),
)


# Optional members

for suite in (
    algorithm(witout=("rollout",)),
    backend(model_byte=lambda config, num_parameters, *, world_size, trained: 0),
    engine(engine_byte=lambda config, weights, cache, *, device: 0),
):
    mutant("no_optional_member_is_misspelled", "misspells an optional member", suite)


# Dispatch modes


def mode(base=dispatch.DataParallel, contract=RowDispatchContract, **methods):
    cls = type("Mutant", (base,), methods)
    return type("Suite", (contract,), {"make": lambda self: cls()})


def split(change):
    return mode(split=lambda self, call, meshes: change(dispatch.DataParallel.split(self, call, meshes), meshes))


def sets_an_option(self, call, meshes):
    call.kwargs["rank"] = 0
    return dispatch.DataParallel.split(self, call, meshes)


def only_full(calls, meshes):
    return [one if len(one.args[0]) else None for one in calls]


def by_rank(self, call, meshes):
    alone = [Mesh(rank=m.rank, dp_rank=m.rank, dp_size=len(meshes), world_size=len(meshes)) for m in meshes]
    return dispatch.DataParallel.split(self, call, alone)


def by_row(self, call, meshes):
    return dispatch.DataParallel.split(self, Call((call.args[0].drop("unit_id"), *call.args[1:])), meshes)


def positional_only(self, call, meshes):
    calls = dispatch.DataParallel.split(self, Call(call.args), meshes)
    return [Call(one.args, call.kwargs) for one in calls]


for test, suites in {
    "every_rank_gets_a_call_or_none": {
        "omits the last rank": split(lambda calls, meshes: calls[:-1]),
        "calls no rank": split(lambda calls, meshes: [None] * len(calls)),
    },
    "split_does_not_modify_its_arguments": {"adds an argument": mode(split=sets_an_option)},
    "results_are_in_rank_order_and_skip_ranks_not_called": {
        "reverses the results": mode(dispatch.All, DispatchContract, collect=lambda self, outputs, meshes: list(outputs)[::-1]),
        "requires a result of every rank": mode(RankZero, DispatchContract, collect=lambda self, outputs, meshes: next(o.upper() for o in outputs[::-1])),
        "returns None": mode(dispatch.All, DispatchContract, collect=lambda self, outputs, meshes: None),
    },
    "each_row_is_in_one_share_and_ranks_of_a_share_get_the_same": {
        "skips empty shares": split(only_full),
        "splits over all ranks": mode(split=by_rank),
        "reverses the order": split(lambda calls, meshes: calls[::-1]),
        "sends all rows to every rank": mode(split=lambda self, call, meshes: [call] * len(meshes)),
    },
    "rows_of_a_unit_are_in_one_share": {"splits by rows": mode(split=by_row)},
    "collect_merges_one_result_per_share_in_row_order": {
        "takes the wrong rank of each share": mode(collect=lambda self, outputs, meshes: Batch.cat([o for o, m in zip(outputs, meshes) if not m.returns or m.world_size == m.dp_size])),
        "reverses the order": mode(collect=lambda self, outputs, meshes: Batch.cat([o for o, m in zip(outputs, meshes) if m.returns][::-1])),
    },
    "named_batches_are_split_and_other_arguments_replicated": {"splits positional batches only": mode(split=positional_only)},
}.items():  # fmt: skip
    for fault, suite in suites.items():
        mutant(test, fault, suite)


# Trackers


TRACKERS: list[JSONLTracker] = []


def tracker(**methods):
    def remembered(self, config, run):
        JSONLTracker.__init__(self, config, run)
        TRACKERS.append(self)

    cls = type("Mutant", (JSONLTracker,), {"__init__": remembered} | methods)
    return type("Suite", (JSONLSuite,), {"make": lambda self, run: cls(JSONLConfig(), run)})


def drops_bad_steps(self, step, metrics):
    if all(map(torch.isfinite, map(torch.tensor, metrics.values()))):
        JSONLTracker.log(self, step, metrics)


def strict(self, step, metrics):
    self._write(self.metrics_path, json.loads(json.dumps({"step": step, **metrics}, allow_nan=False)))


def scored_only(self, step, samples):
    JSONLTracker.log_samples(self, step, [replace(one, reward=float(one.reward)) for one in samples])


def finishes_once(self, summary):
    for file in (self._files.pop(path) for path in (self.metrics_path, self.samples_path)):
        file.close()


def appends(self, config, *, resume_step):
    for path in (self.metrics_path, self.samples_path):
        self._files[path] = path.open("a")


def starts_anew(self, config, *, resume_step):
    JSONLTracker.start(self, config, resume_step=None)


for test, fault, methods in (
    ("metrics_are_logged_unchanged", "rounds", {"log": lambda self, step, m: JSONLTracker.log(self, step, {k: round(v, 1) for k, v in m.items()})}),
    ("metrics_are_logged_unchanged", "counts from 1", {"log": lambda self, step, m: JSONLTracker.log(self, step + 1, m)}),
    ("numbers_that_are_not_finite_do_not_stop_a_run", "raises", {"log": strict}),
    ("numbers_that_are_not_finite_do_not_stop_a_run", "drops the step", {"log": drops_bad_steps}),
    ("samples_with_any_text_or_no_reward_are_accepted", "requires a reward", {"log_samples": scored_only}),
    ("no_optional_member_is_misspelled", "misspells an optional member", {"phases": lambda self, name: None}),
    ("finish_is_idempotent", "fails on the second finish", {"finish": finishes_once}),
    ("a_resumed_run_has_every_step_once", "repeats steps", {"start": appends}),
    ("a_resumed_run_has_every_step_once", "discards earlier steps", {"start": starts_anew}),
):  # fmt: skip
    mutant(test, fault, tracker(**methods))


# Datasets


class Lines:
    """A dataset of three rows."""

    name = "lines"
    columns = ("prompt", "answer")

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"prompt": f"{index}+1=", "answer": str(index + 1)}

    def where(self, index):
        return f"lines:{index + 1}"


def dataset(**members):
    cls = type("Mutant", (Lines,), members)
    return type("Suite", (DatasetContract,), {"make": lambda self: cls()})


for test, fault, members in (
    (
        "rows_are_reproducible",
        "is random",
        {"__getitem__": lambda self, i: {"prompt": random.random()}},
    ),
    ("columns_match_the_rows", "omits a column", {"columns": ("prompt",)}),
    ("columns_match_the_rows", "repeats a column", {"columns": ("prompt", "answer", "answer")}),
    ("no_optional_member_is_misspelled", "misspells an optional member", {"where": None, "wheres": lambda self, i: ""}),
    ("the_dataset_and_its_rows_have_names", "has no name", {"name": ""}),
    ("the_dataset_and_its_rows_have_names", "returns one location for all rows", {"where": lambda self, i: "lines"}),
):
    mutant(test, fault, dataset(**members))


# Environments


class Repeat:
    """Environment that asks for the text of the row, within any number of turns."""

    def __init__(self, config=None):
        self.row = {}

    async def reset(self, row):
        self.row = row
        return [{"role": "user", "content": f"write {row['answer']}"}]

    async def step(self, completion):
        right = completion.text == self.row["answer"]
        if right or completion.last:
            return Step(reward=float(right), done=True)
        return Step(messages=[{"role": "user", "content": f"no, write {self.row['answer']}"}])


def environment(**members):
    cls = type("Mutant", (Repeat,), members)
    examples = [({"answer": "a"}, ["b", "a"], 1.0), ({"answer": "c"}, ["c"], 1.0), ({"answer": "d"}, ["a"], None)]
    members = {"make": lambda self: cls(), "examples": examples, "step_timeout_s": 0.5}
    return type("Suite", (EnvironmentContract,), members)


async def counts_double(self, completion):
    step = await Repeat.step(self, completion)
    return replace(step, reward=None if step.reward is None else 2 * step.reward)


async def takes_the_answer_away(self, row):
    self.row = dict(row)
    return [{"role": "user", "content": f"write {row.pop('answer')}"}]


async def wants_numbers(self, completion):
    return Step(messages=[{"role": "user", "content": str(int(completion.text or "0") + 1)}])


async def returns_a_tuple(self, completion):
    return [], 1.0, True


async def says_nothing(self, completion):
    return Step()


async def speaks_for_the_model(self, completion):
    return Step(messages=[{"role": "assistant", "content": "a"}])


async def never_looks_at_last(self, completion):
    return await Repeat.step(self, replace(completion, last=False))


async def blocks(self, completion):
    time.sleep(1.2)
    return await Repeat.step(self, completion)


async def draws(self, completion):
    return Step(messages=[{"role": "user", "content": str(random.random())}], reward=0.5)


async def keeps_the_row_in_its_class(self, row):
    type(self).shared = row
    await asyncio.sleep(0.05)
    return await Repeat.reset(self, type(self).shared)


def weigh(grams):
    """Weigh."""


for test, fault, members in (
    ("the_examples_get_their_rewards", "doubles the reward", {"step": counts_double}),
    ("the_row_is_not_modified", "removes a column", {"reset": takes_the_answer_away}),
    ("any_response_is_answered", "requires a number", {"step": wants_numbers}),
    ("any_response_is_answered", "returns a tuple", {"step": returns_a_tuple}),
    ("any_response_is_answered", "returns neither message nor reward", {"step": says_nothing}),
    ("any_response_is_answered", "returns an assistant message", {"step": speaks_for_the_model}),
    ("any_response_is_answered", "blocks the event loop", {"step": blocks}),
    ("the_last_turn_has_a_reward", "ignores completion.last", {"step": never_looks_at_last}),
    ("episodes_are_reproducible", "is random", {"step": draws}),
    ("episodes_are_independent", "stores the row in its class", {"reset": keeps_the_row_in_its_class}),
    ("tools_have_a_schema", "has a tool without types", {"tools": (weigh,)}),
    ("no_optional_member_is_misspelled", "misspells an optional member", {"tool": ()}),
):
    mutant(test, fault, environment(**members))


class TestRepeat(environment()):
    """The unmodified environment passes."""

    step_timeout_s = 60.0


@pytest.fixture(autouse=True)
def _close_trackers():
    yield
    while TRACKERS:
        JSONLTracker.finish(TRACKERS.pop(), {})


def arguments(suite, method, model_path, tmp_path):
    """Return the fixtures of a test, as pytest would pass them."""
    (tmp_path / "run").mkdir()
    given = {
        "model_path": lambda: model_path,
        "tmp_path": lambda: tmp_path,
        "engine": lambda: suite.new(model_path),
        "run": lambda: RunInfo(name="run", directory=tmp_path / "run", total_steps=4),
    }
    return {name: given[name]() for name in inspect.signature(method).parameters}


@pytest.mark.parametrize(
    ("test", "suite"), [pytest.param(t, s, id=f"{t}-{f.replace(' ', '_')}") for t, f, s in MUTANTS]
)
def test_the_contract_finds(test, suite, tmp_path, tmp_path_factory):
    mine = suite()
    method = getattr(mine, test)

    with pytest.raises(AssertionError) as failure:
        method(**arguments(mine, method, small_model(tmp_path_factory.getbasetemp()), tmp_path))

    assert len(str(failure.value)) > 30, "the message must say what the protocol asks for"


@pytest.mark.parametrize("contract", SUITES, ids=lambda contract: contract.__name__)
def test_every_contract_test_has_a_mutant(contract):
    covered = {test for test, _, suite in MUTANTS if issubclass(suite, contract)}

    assert names(contract) - covered - set().union(*(names(base) for base in contract.__bases__)) == set()
