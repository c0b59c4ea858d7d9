"""Every contract test fails for a plugin with the fault that it is there to find.

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
    """An engine with other methods, or whose samples or requests are rewritten."""

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
    known = [(name, tensor) for name, tensor in weights if name in self._shapes]
    FakeRollout.load_weights(self, iter(known), version)


def serves_the_rest_as_new(self, weights, version):
    try:
        FakeRollout.load_weights(self, weights, version)
    except ModelError:
        self.version, self._unusable = version, ""
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
    self._unusable = "a load failed once" if getattr(self, "failed", False) else ""


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
    assert not self._unusable, "closed already"
    self._unusable = "closed"


def cut(sample):
    return [replace(sample, token_ids=sample.token_ids[:-1] or [1], log_probs=sample.log_probs[:-1] or [-1.0])]


def turn(sample):
    return [replace(sample, log_probs=[*sample.log_probs[1:], sample.log_probs[0]])]


for fault, suite in {
    "says that it is one of two": engine(__init__=half_of_a_world),
    "invents a sample": engine(generate=invents_a_sample),
    "loses a sample": engine(samples=lambda one: [] if one.request_id == 23 else [one]),
    "repeats a sample": engine(samples=lambda one: [one] * (1 + (one.request_id == 23))),
    "numbers samples anew": engine(samples=lambda one: [replace(one, request_id=one.request_id // 10)]),
}.items():
    mutant("every_request_is_answered_once", fault, suite)
for fault, change in {
    "leaves out the last": lambda one: one.log_probs[:-1],
    "is NaN": lambda one: [float("nan")] * len(one.token_ids),
    "gives probabilities": lambda one: [0.5] * len(one.token_ids),
}.items():
    suite = engine(samples=lambda one, change=change: [replace(one, log_probs=change(one))])
    mutant("every_token_has_a_finite_log_prob", fault, suite)
for fault, suite in {
    "draws one more": engine(requests=lambda i, r: sampling(max_response_tokens=r.sampling.max_response_tokens + 1)(i, r)),
    "always says stop": engine(samples=lambda one: [replace(one, finish_reason="stop")]),
    "always says length": engine(samples=lambda one: [replace(one, finish_reason="length")], requests=lambda i, r: sampling(max_response_tokens=max(1, r.sampling.max_response_tokens - 1))(i, r)),
}.items():  # fmt: skip
    mutant("the_token_limit_ends_a_response", fault, suite)
for test, option in {
    "a_stop_token_ends_a_response_and_stays_in_it": "stop_token_ids",
    "a_stop_string_ends_a_response_and_stays_in_it": "stop",
}.items():
    mutant(test, "goes on", engine(requests=sampling(**{option: ()})))
    mutant(test, "takes it away", engine(samples=lambda one: cut(one) if one.finish_reason == "stop" else [one]))
    mutant(test, "calls it length", engine(samples=lambda one: [replace(one, finish_reason="length")]))
for fault, change in {
    "draws by place in the batch": lambda i, one: replace(one, seed=one.seed + i),
    "ignores the seed": lambda i, one: replace(one, seed=0),
}.items():
    mutant("a_seed_fixes_the_response_whatever_the_neighbours", fault, engine(requests=change))
mutant(
    "new_weights_come_with_their_version",
    "reports the version before",
    engine(load_weights=lambda self, weights, version: FakeRollout.load_weights(self, weights, version - 1)),
)
for fault, suite in {
    "takes anything": engine(load_weights=takes_all),
    "leaves out unknown names": engine(load_weights=takes_known),
    "serves what came as new": engine(load_weights=serves_the_rest_as_new),
    "stays broken": engine(load_weights=stays_broken),
    "serves a mixture as old": engine(HFRollout, load_weights=serves_a_mixture),
}.items():
    mutant("half_an_update_is_refused_and_never_serves", fault, suite)
mutant("closing_the_iterator_aborts_the_rest", "goes on later", engine(generate=goes_on_with_the_aborted))
mutant("calls_that_overlap_get_their_own_samples", "first come, first served", engine(generate=mixes_calls))
mutant("calls_that_overlap_get_their_own_samples", "one at a time", engine(generate=refuses_a_second_call))
for fault, suite in {
    "checks one by one": engine(generate=checks_late),
    "cuts the prompt": engine(requests=lambda i, one: replace(one, prompt_ids=one.prompt_ids[:8])),
    "names another": engine(requests=lambda i, one: replace(one, request_id=i)),
}.items():
    mutant("a_prompt_that_does_not_fit_is_named_before_anything_runs", fault, suite)
mutant("sleep_and_wake_may_come_twice", "forgets", engine(generate=forgets_after_sleep, sleep=counts_sleeps))
mutant("close_may_come_twice", "closes once", engine(close=closes_once))
for fault, change in {"is shifted by one": turn, "is of another temperature": None}.items():
    suite = (
        engine(HFRollout, samples=change) if change else engine(HFRollout, requests=sampling(temperature=1.0, top_k=0))
    )
    mutant("log_probs_are_those_of_the_trainer", fault, suite)
mutant("new_weights_are_used_and_caches_dropped", "keeps the old", engine(HFRollout, load_weights=keeps_old_weights))
mutant("loaded_tensors_are_only_borrowed", "keeps them", engine(HFRollout, load_weights=keeps_what_was_lent))
for fault, change in {"draws at temperature 0": {"temperature": 1.0}, "ignores top_k": {"top_k": 0}}.items():
    mutant("greedy_and_top_k_1_take_the_most_likely_token", fault, engine(HFRollout, requests=sampling(**change)))


# Backends


def backend(**methods):
    cls = type("Mutant", (LocalBackend,), methods)
    return type(
        "Suite", (BackendContract,),
        {"make": lambda self, model, optimizer, context: cls(LocalConfig(), model=model, optimizer=optimizer, context=context)},
    )  # fmt: skip


def outputs(change):
    """A backend whose `forward` gives changed outputs."""
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
    """A backend that gives another batch to another loss."""

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
    """A backend that loads a changed stream."""

    def load_weights(self, weights, mix=1.0):
        LocalBackend.load_weights(self, change(self, weights), mix)

    return backend(load_weights=load_weights)


def complete(self, weights):
    """A stream in which the present parameters stand in for all that is missing or does not fit."""
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
    "outputs_are_those_of_the_plain_model_at_the_temperature": {
        "ignores the temperature": backend(forward=lambda self, batch, *, temperature: LocalBackend.forward(self, batch, temperature=1.0)),
        "is one token off": outputs(rolled),
        "gives bits for nats": outputs(lambda out: replace(out, entropy=out.entropy / 0.6931)),
    },
    "outputs_do_not_depend_on_order_or_micro_batches": {"keeps the order of micro-batches": backend(forward=in_planned_order)},
    "a_share_without_rows_works": {"gives a token": backend(forward=one_token_at_least)},
    "a_value_head_gives_values": {
        "gives log-probs": outputs(lambda out: TokenOutputs(log_probs=out.values)),
        "leaves the mask out": outputs(lambda out: TokenOutputs(values=out.values + 1)),
        "is constant": outputs(lambda out: TokenOutputs(values=out.values * 0)),
    },
    "the_loss_sees_every_row_once_with_its_own_outputs": {
        "loses a row": with_loss(lambda loss, o, b, n: loss(o, b), lambda batch: batch.take(range(len(batch) - 1))),
        "repeats a row": with_loss(lambda loss, o, b, n: loss(o, b), lambda batch: batch.take([0, *range(len(batch))])),
        "is detached": with_loss(of_detached),
        "is one token off": with_loss(of_rolled),
    },
    "rows_of_a_unit_are_in_one_micro_batch": {"packs rows": backend(_plan=by_length)},
    "the_gradient_does_not_depend_on_how_the_batch_is_cut": {"averages micro-batches": with_loss(averaged)},
    "a_step_reports_norm_and_rate_and_clears_the_gradient": {
        "keeps the gradient": backend(step=without_clearing),
        "ignores the schedule": backend(step=at_a_constant_rate),
    },
    "the_gradient_is_clipped_to_its_norm": {"does not clip": backend(step=without_clipping)},
    "a_gradient_that_is_not_finite_changes_nothing": {
        "says nothing": backend(step=silent_about_skips),
        "counts a step": backend(step=stepping_by_zero),
    },
    "weights_have_hugging_face_names_and_the_bits_of_the_model": {
        "puts a prefix": backend(weights=renamed),
        "rounds": backend(weights=rounded),
    },
    "weights_of_another_model_are_copied_exactly": {
        "rounds": loading(lambda self, weights: ((name, tensor.half()) for name, tensor in weights)),
        "keeps what was lent": backend(load_weights=keeps_tensors),
        "computes with the old": backend(load_weights=shows_them_only, weights=shown_weights),
    },
    "weights_of_another_model_are_mixed_in": {
        "copies": backend(load_weights=copies_always),
        "mixes the other way round": backend(load_weights=mixes_the_other_way),
    },
    "loading_weights_keeps_the_optimizer": {"forgets the moments": backend(load_weights=starts_again)},
    "loading_weights_keeps_the_value_head": {"resets it": backend(load_weights=resets_the_head)},
    "weights_that_do_not_fit_are_refused_by_name": {
        "takes anything": loading(complete),
        "names none": backend(load_weights=names_none),
        "computes with a mixture": backend(load_weights=uses_a_mixture),
        "mixes into a mixture": backend(load_weights=mixes_into_a_mixture),
        "stays incomplete": backend(load_weights=stays_incomplete),
    },
    "weights_are_loaded_while_the_model_is_offloaded": {
        "loses them": backend(offload=leaves_a_copy, reload=takes_the_copy),
    },
    "a_loaded_checkpoint_goes_on_exactly": {
        "forgets the moments": backend(load=without_moments),
        "forgets the step": backend(load=without_steps),
        "pickles": backend(save=pickled),
    },
    "a_frozen_model_that_got_weights_is_saved": {
        "saves only trained ones": backend(save=only_if_trained),
        "saves other weights": backend(save=increased),
    },
    "a_broken_checkpoint_changes_nothing": {
        "changes first, checks later": backend(load=half_loaded),
        "goes on": backend(load=not_checked),
    },
    "an_exported_critic_gives_the_same_values": {"forgets the head": backend(export=exported_without_the_head)},
    "offload_and_reload_bring_everything_back": {
        "forgets the moments": backend(reload=reloaded_without_moments),
        "has no weights while it is away": backend(offload=put_away, reload=brought_back),
    },
    "a_frozen_model_gives_the_same_outputs": {"differs": backend(forward=frozen_differs)},
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
    ("the_examples_get_their_scores", "is always right", reward("always_one")),
    ("any_completion_gets_a_score", "wants digits", reward("needs_a_number")),
    ("the_same_sample_scores_the_same_again", "remembers", reward("counts_calls")),
    ("the_score_does_not_depend_on_the_other_samples", "compares", reward("above_the_mean")),
    ("the_columns_that_it_reads_are_declared", "needs another", reward("reads_what_it_does_not_declare")),
    ("the_columns_that_it_reads_are_declared", "uses another", reward("scores_by_what_it_does_not_declare")),
    ("it_works_in_a_process_of_its_own", "is in this process only", reward("always_one", "only_here")),
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
    """GRPO with a changed loss."""
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
    """Stands between an algorithm and a role, and changes what is sent to `update`."""

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
    """GRPO with the four samples of a prompt as a unit."""
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
    "its_roles_are_an_actor_and_what_it_reads_for": {
        "has no actor": algorithm(roles=lambda self: [RoleSpec(name="rollout", worker="rollout")]),
        "reads for a critic": algorithm(reads=lambda self: {"actor": ["advantage"], "critic": ["values"]}),
    },
    "collect_provides_every_column_that_it_promises": {
        "leaves one out": collected(lambda samples: samples.drop("old_log_probs")),
    },
    "collect_keeps_every_sample_with_its_own_tokens": {
        "moves tokens": collected(with_moved_tokens),
        "loses a row": collected(lambda samples: samples.take(range(len(samples) - 1))),
        "repeats a row": collected(lambda samples: samples.take([0, *range(len(samples))])),
        "fetches tokens": collected(through_the_controller),
    },
    "a_step_without_any_scored_sample_passes": {"takes a maximum": algorithm(collect=without_rewards_it_fails)},
    "losses_read_only_declared_columns_and_change_nothing": {
        "reads another": lost(lambda terms, out, batch: scaled(terms, float(batch["reward"].sum()))),
        "writes": lost(writes_into_the_batch),
        "draws": lost(lambda terms, out, batch: scaled(terms, random.random())),
    },
    "the_gradient_does_not_depend_on_how_the_batch_is_cut": {
        "averages": lost(lambda terms, out, batch: scaled(terms, 1.0 / len(batch))),
        "whitens": lost(lambda terms, out, batch: scaled(terms, batch["advantage"].std(correction=0))),
        "has none": lost(lambda terms, out, batch: replace(terms, terms=terms.terms * 0)),
        "compares rows without a unit": lost(lambda terms, out, batch: compared(batch.per_row(out.log_probs))),
        "averages units": in_groups(loss=lambda self, out, batch: scaled(GRPO.loss(self, out, batch), 1.0 / len(batch))),
    },
    "tokens_outside_the_mask_do_not_matter": {
        "sums over all": lost(lambda terms, out, batch: scaled(terms, out.log_probs.detach().mean())),
        "has terms there": lost(lambda terms, out, batch: LossTerms(terms=batch.per_row(-out.log_probs) * batch["advantage"], average="row-mean")),
    },
    "extreme_ratios_stay_finite": {"has no bound": algorithm(loss=unbounded)},
    "better_answers_become_likelier": {"climbs": lost(lambda terms, out, batch: scaled(terms, -1.0))},
    "update_trains_on_every_sample_with_counts_of_the_mini_batch": {
        "loses a row": sent(lambda mini, counts: (mini.take(range(len(mini) - 1)), counts)),
        "counts the step": sent(lambda mini, counts: (mini, Counts(rows=16, tokens=48, units=16))),
        "counts rows for units": in_groups(update=sent_by(lambda mini, counts: (mini, replace(counts, units=counts.rows)))),
    },
    "update_keeps_units_whole": {
        "sends no units": in_groups(update=sent_by(lambda mini, counts: (mini.drop("unit_id"), counts))),
        "shuffles rows": in_groups(minibatches=by_rows),
    },
    "incomplete_units_are_not_trained": {"trains all": in_groups(_in_units=with_all_units)},
    "update_reports_a_skipped_step": {
        "is silent": algorithm(update=lambda self, roles, experience: {k: v for k, v in GRPO.update(self, roles, experience).items() if k != "actor/skipped"}),
    },
    "state_is_json_and_a_resume_goes_on_in_the_same_way": {
        "holds a tensor": algorithm(state_dict=lambda self: GRPO.state_dict(self) | {"x": torch.ones(1)}),
        "forgets": algorithm(load_state_dict=lambda self, state: None),
    },
}.items():  # fmt: skip
    for fault, suite in suites.items():
        mutant(test, fault, suite)
mutant(
    "the_gradient_does_not_depend_on_how_the_batch_is_cut",
    "the critic averages",
    algorithm(PPO, PPOConfig(), value_loss=lambda self, out, b: scaled(PPO.value_loss(self, out, b), 1.0 / len(b))),
)


# Optional members

for suite in (
    algorithm(witout=("rollout",)),
    backend(model_byte=lambda config, num_parameters, *, world_size, trained: 0),
    engine(engine_byte=lambda config, weights, cache, *, device: 0),
):
    mutant("no_optional_member_is_misspelt", "has another name", suite)


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
        "forgets the last": split(lambda calls, meshes: calls[:-1]),
        "calls nobody": split(lambda calls, meshes: [None] * len(calls)),
    },
    "the_callers_arguments_stay_as_they_are": {"sets an option": mode(split=sets_an_option)},
    "results_are_in_rank_order_without_ranks_that_were_not_called": {
        "is reversed": mode(dispatch.All, DispatchContract, collect=lambda self, outputs, meshes: list(outputs)[::-1]),
        "wants all": mode(RankZero, DispatchContract, collect=lambda self, outputs, meshes: next(o.upper() for o in outputs[::-1])),
        "tells nothing": mode(dispatch.All, DispatchContract, collect=lambda self, outputs, meshes: None),
    },
    "each_row_is_in_one_share_and_ranks_of_a_share_get_the_same": {
        "skips empty shares": split(only_full),
        "splits over all ranks": mode(split=by_rank),
        "reverses": split(lambda calls, meshes: calls[::-1]),
        "copies": mode(split=lambda self, call, meshes: [call] * len(meshes)),
    },
    "rows_of_a_unit_are_in_one_share": {"splits by rows": mode(split=by_row)},
    "collect_joins_one_result_of_each_share_in_row_order": {
        "takes rank 0 of each": mode(collect=lambda self, outputs, meshes: Batch.cat([o for o, m in zip(outputs, meshes) if not m.returns or m.world_size == m.dp_size])),
        "reverses": mode(collect=lambda self, outputs, meshes: Batch.cat([o for o, m in zip(outputs, meshes) if m.returns][::-1])),
    },
    "named_batches_are_split_and_all_else_goes_to_every_rank": {"splits by place only": mode(split=positional_only)},
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
    ("metrics_arrive_as_they_were_logged", "rounds", {"log": lambda self, step, m: JSONLTracker.log(self, step, {k: round(v, 1) for k, v in m.items()})}),
    ("metrics_arrive_as_they_were_logged", "counts from 1", {"log": lambda self, step, m: JSONLTracker.log(self, step + 1, m)}),
    ("numbers_that_are_not_finite_do_not_stop_a_run", "raises", {"log": strict}),
    ("numbers_that_are_not_finite_do_not_stop_a_run", "drops the step", {"log": drops_bad_steps}),
    ("samples_with_any_text_and_without_a_reward_are_taken", "wants a reward", {"log_samples": scored_only}),
    ("no_optional_member_is_misspelt", "has another name", {"phases": lambda self, name: None}),
    ("finish_may_come_twice", "finishes once", {"finish": finishes_once}),
    ("a_resumed_run_has_every_step_once", "appends", {"start": appends}),
    ("a_resumed_run_has_every_step_once", "starts anew", {"start": starts_anew}),
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
        "rows_are_the_same_again_in_the_same_order",
        "draws",
        {"__getitem__": lambda self, i: {"prompt": random.random()}},
    ),
    ("columns_are_those_of_the_rows", "tells one only", {"columns": ("prompt",)}),
    ("columns_are_those_of_the_rows", "tells one twice", {"columns": ("prompt", "answer", "answer")}),
    ("no_optional_member_is_misspelt", "has another name", {"where": None, "wheres": lambda self, i: ""}),
    ("messages_can_say_what_and_where_it_is", "has no name", {"name": ""}),
    ("messages_can_say_what_and_where_it_is", "says one place", {"where": lambda self, i: "lines"}),
):
    mutant(test, fault, dataset(**members))


# Environments


class Repeat:
    """The model has to write what the row says, within any number of turns."""

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
    ("the_examples_get_their_rewards", "counts double", {"step": counts_double}),
    ("the_row_is_left_as_it_was", "takes the answer away", {"reset": takes_the_answer_away}),
    ("anything_that_a_model_writes_is_answered", "wants numbers", {"step": wants_numbers}),
    ("anything_that_a_model_writes_is_answered", "returns a tuple", {"step": returns_a_tuple}),
    ("anything_that_a_model_writes_is_answered", "says nothing", {"step": says_nothing}),
    ("anything_that_a_model_writes_is_answered", "speaks for the model", {"step": speaks_for_the_model}),
    ("anything_that_a_model_writes_is_answered", "blocks", {"step": blocks}),
    ("the_last_turn_has_a_reward", "never looks at last", {"step": never_looks_at_last}),
    ("the_same_episode_goes_the_same_way_again", "draws", {"step": draws}),
    ("episodes_do_not_see_each_other", "keeps the row in its class", {"reset": keeps_the_row_in_its_class}),
    ("tools_have_a_schema", "has a tool without types", {"tools": (weigh,)}),
    ("no_optional_member_is_misspelt", "has another name", {"tool": ()}),
):
    mutant(test, fault, environment(**members))


class TestRepeat(environment()):
    """The environment of which they are mutants passes."""

    step_timeout_s = 60.0


@pytest.fixture(autouse=True)
def _close_trackers():
    yield
    while TRACKERS:
        JSONLTracker.finish(TRACKERS.pop(), {})


def arguments(suite, method, model_path, tmp_path):
    """What pytest would give to a test of a suite."""
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
