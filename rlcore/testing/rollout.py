"""Contract of an inference engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.errors import RlcoreError, SampleError
from rlcore.models.load import load_model, load_tokenizer
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.optional import Pauses, UpdatesInFlight
from rlcore.protocols.rollout import Rollout, RolloutContext
from rlcore.testing.expect import allowed, equal, no_misspelled_member, raises
from rlcore.testing.model import UsesModel, plain_model
from rlcore.testing.waiting import HANG_S
from rlcore.types import Request, Sample, Sampling

_LONG = 48
"""Limit of responses that are in flight while weights arrive."""
_PAUSE_S = 0.5
_HOT = 2.0
"""Temperature at which a model rarely ends its response, the highest that vLLM accepts."""


class RolloutContract(UsesModel):
    """Override `make`. For an engine that starts slowly, also override the fixture `engine` with a wider scope."""

    def make(self, model: ModelConfig, context: RolloutContext) -> Rollout:
        """Return a new engine."""
        raise NotImplementedError(f"{type(self).__name__} must override make(self, model, context)")

    def new(self, model_path: str) -> Rollout:
        return self.make(ModelConfig(path=model_path), RolloutContext(device=self.device))

    @pytest.fixture
    def engine(self, model_path: str) -> Iterator[Rollout]:
        engine = self.new(model_path)
        yield engine
        engine.close()

    def test_no_optional_member_is_misspelled(self, engine: Rollout) -> None:
        no_misspelled_member("rollout", engine)

    def test_every_request_is_answered_once(self, engine: Rollout) -> None:
        equal(engine.mesh.dp_size, 1, "an engine without other ranks must get all prompts, which are split by its mesh")
        equal(run(engine, []), [], "generate([]) must return no samples: a rank with an empty share calls it")
        requests = [request(i * 10 + 3, max_response_tokens=1 + 3 * (i % 3)) for i in range(7)]
        found = sorted(sample.request_id for sample in run(engine, requests))
        equal(found, [one.request_id for one in requests], "yield one Sample per request_id, in any order")

    def test_every_token_has_a_finite_log_prob(self, engine: Rollout) -> None:
        for sample in run(engine, [request(i, temperature=i / 2) for i in range(4)]):
            equal(len(sample.log_probs), len(sample.token_ids), "log_probs[i] belongs to token i")
            good = all(math.isfinite(x) and x <= 1e-6 for x in sample.log_probs)
            assert good, f"the trainer exponentiates log-probs; finite and at most 0, got {list(sample.log_probs)}"

    def test_the_token_limit_ends_a_response(self, engine: Rollout, model_path: str) -> None:
        end = load_tokenizer(model_path).eos_token_id
        for sample in run(engine, [request(limit, max_response_tokens=limit) for limit in (1, 2, 9)]):
            limit, length = sample.request_id, len(sample.token_ids)
            assert 0 < length <= limit, f"max_response_tokens={limit}, and the response has {length} tokens"
            wanted = "stop" if sample.token_ids[-1] == end or length < limit else "length"
            equal(
                sample.finish_reason, wanted, f"{length} of {limit} tokens; the reason decides who counts as truncated"
            )

    def test_a_stop_token_ends_a_response_and_stays_in_it(self, engine: Rollout) -> None:
        free = longest(run(engine, [request(i) for i in range(4)]))
        ids = list(free.token_ids)
        stop = ids[len(ids) // 2]
        cut = run(engine, [request(free.request_id, stop_token_ids=(stop,))])[0]
        wanted = ids[: ids.index(stop) + 1]
        equal((list(cut.token_ids), cut.finish_reason), (wanted, "stop"), f"stop_token_ids={stop} ends with that token")

    def test_a_stop_string_ends_a_response_and_stays_in_it(self, engine: Rollout, model_path: str) -> None:
        tokenizer = load_tokenizer(model_path)
        free = longest(run(engine, [request(i) for i in range(4)]))
        ids, middle = list(free.token_ids), len(free.token_ids) // 2
        stop = tokenizer.decode(ids[middle : middle + 2]).strip()
        wanted = next(ids[: i + 1] for i in range(len(ids)) if stop in tokenizer.decode(ids[: i + 1]))
        cut = run(engine, [request(free.request_id, stop=(stop,))])[0]
        found = (list(cut.token_ids), cut.finish_reason)
        equal(found, (wanted, "stop"), f"stop={stop!r} ends the response with the token that completes it")

    def test_a_seed_determines_the_response_in_any_batch(self, engine: Rollout) -> None:
        requests = [request(i, num_prompt=1 + i % 3) for i in range(6)]
        alone = tokens([run(engine, [one])[0] for one in requests])
        equal(tokens(run(engine, requests[::-1])), alone, "a seed must give the same tokens in any batch")
        other = tokens(run(engine, [replace(one, seed=one.seed + 1000) for one in requests]))
        assert alone != other, f"six other seeds gave the same responses, as would all samples of a group: {alone}"

    def test_samples_have_the_version_of_new_weights(self, engine: Rollout, model_path: str) -> None:
        for version in (3, 4):
            engine.load_weights(iter(weights(model_path)), version)
            found = {sample.policy_version for sample in run(engine, [request(i) for i in range(3)])}
            equal(found, {version}, "after load_weights(…, version) samples report that version")

    def test_an_incomplete_update_is_refused_and_never_used(self, engine: Rollout, model_path: str) -> None:
        asked = [request(i) for i in range(3)]
        engine.load_weights(iter(weights(model_path)), 5)
        before = tokens(run(engine, asked))
        new = [(name, tensor + 1.0) for name, tensor in weights(model_path)]
        for rule, broken in (("missing", new[:-1]), ("unknown", [*new, ("no.such.weight", torch.ones(2))])):
            with raises(f"load_weights must raise when a weight is {rule}"):
                engine.load_weights(iter(broken), 6)
            try:
                served = run(engine, asked)
            except (RlcoreError, RuntimeError):
                continue  # the engine may refuse or continue with version 5
            equal({sample.policy_version for sample in served}, {5}, "version 6 is incomplete and must not be used")
            equal(tokens(served), before, "an incomplete update must not be used")
        engine.load_weights(iter(weights(model_path)), 7)
        with allowed("a complete update must restore an engine after a failed one"):
            equal(tokens(run(engine, asked)), before, "a complete update must replace every weight")

    def test_closing_the_iterator_aborts_the_rest(self, engine: Rollout) -> None:
        async def first_only() -> None:
            stream: Any = engine.generate([request(i, max_response_tokens=1 + 5 * i) for i in range(5)])
            await anext(stream)
            await stream.aclose()

        asyncio.run(asyncio.wait_for(first_only(), HANG_S))
        found = sorted(sample.request_id for sample in run(engine, [request(70), request(71)]))
        equal(found, [70, 71], "after an abort the next call must get its own samples only")

    def test_overlapping_calls_get_their_own_samples(self, engine: Rollout) -> None:
        async def ask(first: int) -> list[int]:
            asked = [request(first + i, max_response_tokens=2 + 4 * i) for i in range(3)]
            return sorted([sample.request_id async for sample in engine.generate(asked)])

        async def overlap() -> list[list[int]]:
            return list(await asyncio.gather(ask(10), ask(20)))

        rule = "environments request the next turn while other calls of generate() are running; each must get its own samples"
        with allowed(rule):
            found = asyncio.run(asyncio.wait_for(overlap(), HANG_S))
        equal(found, [[10, 11, 12], [20, 21, 22]], rule)

    def test_weights_may_arrive_while_groups_are_drawn(self, engine: Rollout, model_path: str) -> None:
        needs_updates_in_flight(engine)
        engine.load_weights(iter(weights(model_path)), 1)

        def update(version: int) -> None:
            engine.load_weights(iter(weights(model_path)), version)

        samples = draw_during_updates(engine, [lambda: update(2), lambda: update(3)])
        for _, sample in samples:
            found = list(sample.token_versions) or [sample.policy_version] * len(sample.token_ids)
            equal(len(found), len(sample.token_ids), "token_versions[i] belongs to token i; empty if all are equal")
            good = found == sorted(found) and found[-1] == sample.policy_version and {*found} <= {1, 2, 3}
            assert good, f"versions follow the updates, and the last one is policy_version; got {found}"
        last = {sample.policy_version for _, sample in samples[-2:]}
        equal(last, {3}, "responses that end after the last update have tokens of its version")
        assert any(len({*sample.token_versions}) > 1 for _, sample in samples), (
            "responses in flight go on under the new weights; none has tokens of two versions"
        )

    def test_responses_wait_while_paused_and_asleep(self, engine: Rollout, model_path: str) -> None:
        if not isinstance(engine, Pauses):
            pytest.skip("the engine has no pause and resume")
        drawn: list[tuple[Request, Sample]] = []

        async def set_aside() -> None:
            for action in (engine.pause, engine.pause, engine.sleep):
                action()
            await asyncio.sleep(_PAUSE_S)
            assert len(drawn) < 10, "responses must wait while the engine is paused"
            engine.wake()
            engine.load_weights(iter(weights(model_path)), 2)
            for action in (engine.resume, engine.resume):
                action()

        engine.load_weights(iter(weights(model_path)), 1)
        draw_during_updates(engine, [set_aside], drawn)
        equal(len(drawn), 10, "all responses must continue after resume")
        assert any({*sample.token_versions} == {1, 2} for _, sample in drawn), (
            "responses keep their tokens and continue under the new weights; none has tokens of two versions"
        )

    def test_an_incomplete_update_while_groups_are_drawn_is_never_used(self, engine: Rollout, model_path: str) -> None:
        needs_updates_in_flight(engine)
        engine.load_weights(iter(weights(model_path)), 1)
        half = [(name, tensor + 1.0) for name, tensor in weights(model_path)][:-1]

        def fail() -> None:
            with raises("load_weights must raise when a weight is missing, also while groups are drawn"):
                engine.load_weights(iter(half), 2)

        try:
            samples = draw_during_updates(engine, [fail])
        except (RlcoreError, RuntimeError):
            samples = []  # running calls may raise, or go on under the old weights
        found = {version for _, sample in samples for version in (*sample.token_versions, sample.policy_version)}
        assert 2 not in found, "version 2 is incomplete and must not be used"
        engine.load_weights(iter(weights(model_path)), 3)
        with allowed("a complete update must restore an engine after one that failed while it generated"):
            served = run(engine, [request(0), request(1)])
        equal({sample.policy_version for sample in served}, {3}, "samples report the version of the complete update")

    def test_a_prompt_that_does_not_fit_is_named_first(self, engine: Rollout, model_path: str) -> None:
        context_length = plain_model(model_path).config.get_text_config().max_position_embeddings
        seen: list[Sample] = []
        with raises("a prompt as long as the context must raise SampleError", SampleError) as caught:
            run(engine, [request(1, max_response_tokens=1), request(31, num_prompt=context_length)], seen)
        assert "31" in str(caught[0]), f"the error must name request 31: {caught[0]}"
        equal(seen, [], "the check must come before anything is generated")

    def test_sleep_and_wake_are_idempotent(self, engine: Rollout) -> None:
        before = tokens(run(engine, [request(0), request(1)]))
        for action in (engine.sleep, engine.sleep, engine.wake, engine.wake):
            action()
        equal(tokens(run(engine, [request(0), request(1)])), before, "an engine must keep its weights while asleep")

    def test_close_is_idempotent(self, model_path: str) -> None:
        engine = self.new(model_path)
        engine.close()
        with allowed("close() is called again when a run fails, and must have no effect"):
            engine.close()


class ModelRolloutContract(RolloutContract):
    """Also compares log-probs with the trainer's. For every engine that runs a model."""

    def test_log_probs_match_the_trainer(self, engine: Rollout, model_path: str) -> None:
        engine.load_weights(iter(weights(model_path)), 1)
        self.compare(engine, model_path)

    def test_new_weights_are_used_and_caches_dropped(self, engine: Rollout, model_path: str, tmp_path: Path) -> None:
        self.compare(engine, model_path)  # fills the caches
        changed = load_model(model_path).requires_grad_(False)
        for parameter in changed.parameters():
            parameter.mul_(1.5)
        changed.save_pretrained(tmp_path)
        engine.load_weights(iter(changed.named_parameters()), 2)
        self.compare(engine, str(tmp_path))

    def test_each_token_has_the_log_prob_of_its_version(self, engine: Rollout, model_path: str, tmp_path: Path) -> None:
        needs_updates_in_flight(engine)
        changed = load_model(model_path).requires_grad_(False)
        for parameter in changed.parameters():
            parameter.mul_(1.5)
        changed.save_pretrained(tmp_path)
        engine.load_weights(iter(weights(model_path)), 1)
        update = partial(engine.load_weights, changed.named_parameters(), 2)
        for asked, sample in draw_during_updates(engine, [update]):
            _, old = self.scores(model_path, asked, sample, _HOT)
            _, new = self.scores(str(tmp_path), asked, sample, _HOT)
            versions = torch.tensor(list(sample.token_versions) or [sample.policy_version] * len(old))
            gap = float((torch.where(versions == 1, old, new) - torch.tensor(list(sample.log_probs))).abs().max())
            assert gap <= self.tolerance, f"up to {gap:.3g} from the log-probs of the weights named in token_versions"

    def test_loaded_tensors_are_not_kept(self, engine: Rollout, model_path: str) -> None:
        lent = [(name, tensor.clone()) for name, tensor in weights(model_path)]
        engine.load_weights(iter(lent), 1)
        for _, tensor in lent:
            tensor.zero_()
        self.compare(engine, model_path)

    def test_greedy_and_top_k_1_take_the_most_likely_token(self, engine: Rollout, model_path: str) -> None:
        engine.load_weights(iter(weights(model_path)), 1)
        for options in ({"temperature": 0.0}, {"top_k": 1}):
            asked = [request(i, num_prompt=2 + i, **options) for i in range(3)]
            for sample in run(engine, asked):
                scores, drawn = self.scores(model_path, asked[sample.request_id], sample, 1.0)
                gap = float((scores.amax(1) - drawn).max())
                assert gap <= self.tolerance, f"{options} took a token that is {gap:.3g} less likely than the best"

    def compare(self, engine: Rollout, model_path: str) -> None:
        """Compare log-probs of samples with those of the plain model."""
        for temperature, top_k in ((1.0, 0), (0.7, 3), (0.0, 0)):
            asked = [request(i, num_prompt=1 + 3 * i, temperature=temperature, top_k=top_k) for i in range(3)]
            for sample in run(engine, asked):
                _, wanted = self.scores(model_path, asked[sample.request_id], sample, temperature or 1.0)
                gap = float((wanted - torch.tensor(list(sample.log_probs))).abs().max())
                assert gap <= self.tolerance, (
                    f"temperature={temperature}, top_k={top_k}: up to {gap:.3g} from the trainer's log-probs; they are"
                    " log softmax(logits / temperature) under the newest weights, before any truncation"
                )

    @torch.no_grad()
    def scores(self, path: str, asked: Request, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
        """Return [n, V] log-probs of the plain model at each token of a response, and [n] of the sampled tokens."""
        ids = torch.tensor([[*asked.prompt_ids, *sample.token_ids]])
        logits: Tensor = plain_model(path)(ids).logits[0, len(asked.prompt_ids) - 1 : -1]
        scores = (logits.float() / temperature).log_softmax(-1)
        return scores, scores.gather(1, ids[0, len(asked.prompt_ids) :, None]).squeeze(1)


def request(request_id: int, *, num_prompt: int = 4, **options: Any) -> Request:
    """Return a request with a prompt of ids that every tokenizer has."""
    sampling = Sampling(**({"max_response_tokens": 12} | options))
    prompt = [3 + (request_id + i) % 20 for i in range(num_prompt)]
    return Request(request_id=request_id, prompt_ids=prompt, sampling=sampling, seed=7 * request_id + 1)


def run(engine: Rollout, requests: Sequence[Request], seen: list[Sample] | None = None) -> list[Sample]:
    """Return all samples of one call in the order of arrival."""
    found = [] if seen is None else seen

    async def drain() -> None:
        async for sample in engine.generate(requests):
            found.append(sample)

    asyncio.run(asyncio.wait_for(drain(), HANG_S))
    return found


def needs_updates_in_flight(engine: Rollout) -> None:
    if not isinstance(engine, UpdatesInFlight):
        pytest.skip("the engine does not declare in_flight_updates")


def draw_during_updates(
    engine: Rollout,
    updates: Sequence[Callable[[], Awaitable[None] | None]],
    seen: list[tuple[Request, Sample]] | None = None,
) -> list[tuple[Request, Sample]]:
    """Draw a short and four long groups of two, each in a call of its own, and return the samples as they finish.

    The next update follows each sample.
    """
    found = [] if seen is None else seen
    waiting = list(updates)

    async def draw(first: int, limit: int) -> None:
        asked = {first + i: request(first + i, max_response_tokens=limit, temperature=_HOT) for i in range(2)}
        async for sample in engine.generate(list(asked.values())):
            found.append((asked[sample.request_id], sample))
            if waiting and (update := waiting.pop(0)()) is not None:
                await update

    async def overlap() -> None:
        await asyncio.gather(*(draw(10 * i, 2 if i == 0 else _LONG) for i in range(5)))

    with ThreadPoolExecutor(1) as thread:  # hosts draw groups in a thread
        thread.submit(asyncio.run, asyncio.wait_for(overlap(), HANG_S)).result(HANG_S)
    return found


def tokens(samples: Sequence[Sample]) -> dict[int, list[int]]:
    """Return token ids by request."""
    return {sample.request_id: list(sample.token_ids) for sample in sorted(samples, key=lambda one: one.request_id)}


def longest(samples: Sequence[Sample]) -> Sample:
    return max(samples, key=lambda sample: len(sample.token_ids))


def weights(model_path: str) -> list[tuple[str, Tensor]]:
    """Return the parameters by name, tied ones once, as a trainer sends them."""
    return list(plain_model(model_path).named_parameters())
