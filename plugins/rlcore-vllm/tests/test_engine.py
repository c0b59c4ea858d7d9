"""In-process engine: new weights while it generates, overlapping calls, and restored process state."""

import asyncio
import os
import random
import re

import pytest
import torch
from conftest import interrupted, make_hf, make_vllm, requests_of, run, tokens
from models import flattened, save_tiny, teacher_forced
from rlcore_tests.counts import counted_tokens

from rlcore.errors import InfrastructureError, ModelError, NumericalError
from rlcore.models.load import load_model, load_tokenizer
from rlcore.testing.rollout import weights
from rlcore.testing.waiting import HANG_S

pytestmark = pytest.mark.usefixtures("scheduling")
PROMPT = list(range(4, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory, small_model):
    return save_tiny("Llama", tmp_path_factory.mktemp("llama"), small_model)


@pytest.fixture(scope="module")
def shared(model, scheduling):
    engine = make_vllm(model)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared, model):
    shared.load_weights(iter(weights(model)), 0)
    return shared


def changed(path):
    model = load_model(path).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(1.3)
    return model


def test_a_response_continues_under_new_weights_with_the_version_of_each_token(engine, model, tmp_path):
    asked = requests_of([PROMPT], max_response_tokens=60)
    old = run(engine, asked)[0].token_ids
    new_model = changed(model)
    new_model.save_pretrained(tmp_path)

    sample = asyncio.run(interrupted(engine, asked, new_model.named_parameters()))[0]

    cut = list(sample.token_versions).count(0)
    assert 0 < cut < 60 and list(sample.token_versions) == [0] * cut + [7] * (60 - cut)
    assert sample.policy_version == 7
    assert list(sample.token_ids[:cut]) == list(old[:cut])
    rest = run(make_hf(str(tmp_path)), requests_of([[*PROMPT, *sample.token_ids[:cut]]], max_response_tokens=60 - cut))[
        0
    ]
    assert list(sample.token_ids[cut:]) == list(rest.token_ids), "the KV cache of the old weights was used"
    assert list(sample.log_probs[cut:]) == pytest.approx(list(rest.log_probs), abs=2e-4)


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.5}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}],
    ids=lambda penalty: next(iter(penalty)),
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_are_those_of_the_reference_engine(engine, model, penalty, temperature):
    greedy = requests_of([PROMPT, PROMPT[:9]], max_response_tokens=40, **penalty)
    asked = greedy if not temperature else requests_of([PROMPT], max_response_tokens=40, temperature=1.0, **penalty)

    found = run(engine, asked)

    if not temperature:
        expected = run(make_hf(model), greedy)
        assert (
            tokens(found)
            == tokens(expected)
            != tokens(run(engine, requests_of([PROMPT, PROMPT[:9]], max_response_tokens=40)))
        )
    for request in asked:
        sample = found[request.request_id]
        exact = teacher_forced(load_model(model), request.prompt_ids, sample)
        assert list(sample.log_probs) == pytest.approx(exact, abs=2e-4), "log-probs are the model's own"


@pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
@pytest.mark.parametrize(
    ("asked", "pattern"),
    [({"regex": "[0-9]{3}"}, "[0-9]{3}"), ({"json_schema": '{"type": "boolean"}'}, "true|false")],
    ids=["regex", "json"],
)
def test_structured_output_follows_its_pattern(engine, model, asked, pattern):
    tokenizer = load_tokenizer(model)

    # a structured output ends with the tokenizer's end token, which is not that of this random model
    ends = {"stop_token_ids": (tokenizer.eos_token_id,), "max_response_tokens": 30}
    samples = run(engine, requests_of([PROMPT] * 4, temperature=1.0, **ends, **asked))

    texts = [tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples.values()]
    assert [text for text in texts if not re.fullmatch(pattern, text.strip())] == []
    assert {sample.finish_reason for sample in samples.values()} == {"stop"}


@torch.no_grad()
def continued(old, new, ids, num_more):
    """Return (tokens, log-probs) that `new` generates greedily from the KV cache that `old` computed for all ids but one."""
    cache = old(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
    tokens, log_probs = [ids[-1]], []
    for _ in range(num_more):
        scores = new(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
    return tokens[1:], log_probs


def test_an_in_place_response_continues_with_its_existing_cache(model):
    engine, new_model = make_vllm(model, pause="in_place"), changed(model)
    asked = requests_of([PROMPT], max_response_tokens=60)

    sample = asyncio.run(interrupted(engine, asked, new_model.named_parameters()))[0]
    again = run(engine, asked)[0]
    engine.load_weights(iter(new_model.named_parameters()), 8)
    fresh = run(engine, asked)[0]
    engine.close()

    cut = list(sample.token_versions).count(0)
    assert 0 < cut < 60 and list(sample.token_versions) == [0] * cut + [7] * (60 - cut)
    begun = [*PROMPT, *sample.token_ids[:cut]]
    tokens, log_probs = continued(load_model(model), new_model, begun, 60 - cut)
    assert list(sample.token_ids[cut:]) == tokens
    assert list(sample.log_probs[cut:]) == pytest.approx(log_probs, abs=2e-4)
    recomputed, other = continued(new_model, new_model, begun, 60 - cut)
    assert (tokens, log_probs) != (recomputed, pytest.approx(other, abs=2e-3)), (
        "the models are too similar for this test"
    )
    assert list(again.token_ids) == list(fresh.token_ids), "a later request found the old KV cache"
    assert list(again.log_probs) == pytest.approx(list(fresh.log_probs), abs=1e-5)


def sampled(engine, num_tokens):
    """Return (request, sample) of a response with at least `num_tokens` tokens at temperature 1."""
    for seed in range(50):
        asked = requests_of([PROMPT], seed=seed, temperature=1.0, max_response_tokens=60)
        sample = run(engine, asked)[0]
        if len(sample.token_ids) >= num_tokens:
            return asked, sample
    raise AssertionError("the model ends every response early")


def test_the_engine_uses_the_requested_scheduler(engine, scheduling):
    config = engine._engine._engine.vllm_config.scheduler_config
    assert config.async_scheduling == (scheduling == "async")


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_an_update_with_the_same_weights_changes_no_seeded_response(model, pause):
    engine = make_vllm(model, pause=pause)
    try:
        asked, undisturbed = sampled(engine, 40)
        sample = asyncio.run(interrupted(engine, asked, load_model(model).named_parameters()))[0]
    finally:
        engine.close()

    assert set(sample.token_versions) == {0, 7}
    assert list(sample.token_ids) == list(undisturbed.token_ids)
    assert list(sample.log_probs) == pytest.approx(list(undisturbed.log_probs), abs=1e-4)


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_every_token_has_the_version_of_the_weights_that_sampled_it(model, pause):
    engine, flatter = make_vllm(model, pause=pause), flattened(model)
    try:
        asked, _ = sampled(engine, 40)
        sample = asyncio.run(interrupted(engine, asked, flatter.named_parameters()))[0]
    finally:
        engine.close()

    log_probs = {0: teacher_forced(load_model(model), PROMPT, sample), 7: teacher_forced(flatter, PROMPT, sample)}
    assert set(sample.token_versions) == {0, 7}
    of_its_version = [log_probs[version][i] for i, version in enumerate(sample.token_versions)]
    assert list(sample.log_probs) == pytest.approx(of_its_version, abs=2e-4)


def test_a_paused_response_continues_under_weights_loaded_meanwhile(engine, model):
    asked = requests_of([PROMPT], max_response_tokens=60)

    async def generate():
        return [sample async for sample in engine.generate(asked)]

    async def paused():
        task = asyncio.create_task(generate())
        for _ in range(20):
            await asyncio.sleep(0)
        for action in (engine.pause, engine.pause):
            action()
        engine.load_weights(iter(weights(model)), 7)
        await asyncio.sleep(0.5)
        assert not task.done(), "it must not continue before resume()"
        for action in (engine.resume, engine.resume):
            action()
        return await asyncio.wait_for(task, HANG_S)

    sample = asyncio.run(paused())[0]

    assert list(sample.token_ids) == list(run(engine, asked)[0].token_ids), "the weights were the same"
    cut = list(sample.token_versions).count(0)
    assert 0 < cut < len(sample.token_ids), "the response ended before the pause"
    assert list(sample.token_versions) == [0] * cut + [7] * (len(sample.token_ids) - cut)


@pytest.mark.parametrize(("num_whole", "text"), [(-1, "are missing"), (None, "out of luck")])
def test_an_incomplete_update_in_the_middle_of_a_response_ends_it(engine, model, num_whole, text):
    def half():
        yield from weights(model)[:num_whole]
        if num_whole is None:
            raise ValueError("out of luck")

    async def generate():
        stream = engine.generate(requests_of([PROMPT, PROMPT[1:]], max_response_tokens=60))
        first = asyncio.ensure_future(anext(stream))
        for _ in range(20):
            await asyncio.sleep(0)
        with pytest.raises((ModelError, ValueError), match=text):
            engine.load_weights(half(), 7)
        with pytest.raises(InfrastructureError, match="incomplete weights"):
            await first

    asyncio.run(asyncio.wait_for(generate(), HANG_S))
    assert engine._engine._engine.get_num_unfinished_requests() == 0


def test_an_incomplete_update_between_two_samples_of_one_step_withholds_the_second(engine, model):
    async def generate():
        stream = engine.generate(requests_of([PROMPT, PROMPT], max_response_tokens=4))
        await anext(stream)
        with pytest.raises(ModelError, match="are missing"):
            engine.load_weights(iter(weights(model)[:-1]), 7)
        with pytest.raises(InfrastructureError, match="incomplete weights"):
            await anext(stream)

    asyncio.run(asyncio.wait_for(generate(), HANG_S))


@pytest.mark.parametrize(("action", "text"), [("sleep", "is asleep"), ("close", "is closed")])
def test_sleep_or_close_in_the_middle_of_a_response_ends_it(model, action, text):
    engine = make_vllm(model)

    async def generate():
        first = asyncio.ensure_future(anext(engine.generate(requests_of([PROMPT], max_response_tokens=60))))
        for _ in range(5):
            await asyncio.sleep(0)
        getattr(engine, action)()
        with pytest.raises(InfrastructureError, match=text):
            await first

    try:
        asyncio.run(asyncio.wait_for(generate(), HANG_S))
    finally:
        engine.close()


def test_sleep_and_wake_in_the_middle_of_a_response_ends_it(model):
    engine = make_vllm(model)

    async def generate():
        first = asyncio.ensure_future(anext(engine.generate(requests_of([PROMPT], max_response_tokens=60))))
        for _ in range(5):
            await asyncio.sleep(0)
        engine.sleep()
        engine.wake()
        with pytest.raises(InfrastructureError, match="put to sleep in the middle of request 0\nGenerate it again"):
            await first

    try:
        asyncio.run(asyncio.wait_for(generate(), HANG_S))
    finally:
        engine.close()


def test_a_request_that_vllm_refuses_removes_its_whole_call_from_the_engine(engine, monkeypatch):
    own, added = engine._engine._engine.add_request, []

    def add(name, *arguments, **options):
        if len(added) == 2:
            raise ValueError("out of luck")
        added.append(name)
        own(name, *arguments, **options)

    monkeypatch.setattr(engine._engine._engine, "add_request", add)
    with pytest.raises(ValueError, match="out of luck"):
        run(engine, requests_of([[3], [4], [5]]))

    assert added and engine._engine._engine.get_num_unfinished_requests() == 0
    assert not engine._engine._outboxes


def test_weights_that_vllms_loader_skips_are_reported(engine, model):
    with pytest.raises(ModelError, match=r"loader did not update \d+ parameters; the first is 'lm_head.weight'"):
        engine._engine.load(iter(weights(model)[:3]), 7)


def test_overlapping_calls_get_their_own_samples(engine):
    first, second = requests_of([[3, 4]], max_response_tokens=30), requests_of([[9, 8], [5]], max_response_tokens=10)

    async def both():
        async def collect(asked):
            return {sample.request_id: sample async for sample in engine.generate(asked)}

        return await asyncio.gather(collect(first), collect(second))

    found = asyncio.run(asyncio.wait_for(both(), HANG_S))

    assert [tokens(part) for part in found] == [tokens(run(engine, first)), tokens(run(engine, second))]


def test_samples_are_yielded_as_they_finish(engine):
    short, long = requests_of([[3]], max_response_tokens=2)[0], requests_of([[3], [3]], max_response_tokens=40)[1]

    async def lengths():
        return [len(sample.token_ids) async for sample in engine.generate([long, short])]

    first, second = asyncio.run(lengths())
    assert first == 2 < second


def test_tokens_of_unfinished_responses_are_counted(engine):
    asked = requests_of([[3], [4]], max_response_tokens=40)
    found = asyncio.run(asyncio.wait_for(counted_tokens(engine, asked), HANG_S))

    assert found[0] < found[-2]
    before = engine.num_tokens
    samples = run(engine, asked)
    assert engine.num_tokens - before >= sum(len(sample.token_ids) for sample in samples.values())


def test_closing_the_iterator_leaves_no_request_in_the_engine(engine):
    async def first_only():
        stream = engine.generate(requests_of([[3], [4], [5]], temperature=1.0, max_response_tokens=90))
        await anext(stream)
        await stream.aclose()

    asyncio.run(first_only())

    assert engine._engine._engine.get_num_unfinished_requests() == 0
    assert not engine._engine._outboxes


def test_the_sender_may_reuse_its_memory_for_the_next_weight(engine, model):
    asked = requests_of([PROMPT, [3]])
    wanted = run(engine, asked)
    pairs = weights(model)
    room = torch.empty(max(tensor.numel() for _, tensor in pairs))

    def lent():
        for name, tensor in pairs:
            yield name, room[: tensor.numel()].view(tensor.shape).copy_(tensor.detach())

    engine.load_weights(lent(), 0)

    assert tokens(run(engine, asked)) == tokens(wanted)


def test_more_requests_than_fit_at_once_get_the_same_samples(engine, model):
    asked = requests_of([[3 + i, 5, 7] for i in range(40)], temperature=1.0)
    narrow = make_vllm(model, max_batch_size=4)
    try:
        assert tokens(run(narrow, asked)) == tokens(run(engine, asked))
    finally:
        narrow.close()


def test_a_prompt_that_waits_for_a_free_slot_does_not_disturb_seeds(model):
    """Use prompts of 100 tokens with 4096 tokens per step: chunked prefill would split the forty-first."""
    engine = make_vllm(model, max_batch_size=64, prefix_caching=False)
    try:
        prompts = [[3 + (i + j) % 60 for j in range(100)] for i in range(50)]
        asked = requests_of(prompts, temperature=1.0, max_response_tokens=4)
        together = run(engine, asked)
        assert tokens({45: together[45]}) == tokens(run(engine, [asked[45]]))
    finally:
        engine.close()


def test_logits_that_are_not_finite_raise_an_error(engine, model):
    poisoned = [(name, tensor * float("nan")) for name, tensor in weights(model)]
    engine.load_weights(iter(poisoned), 1)

    with pytest.raises(NumericalError, match=r"request 0: .* not finite at position 2"):
        run(engine, requests_of([[3, 4]]))


def test_a_sleeping_or_closed_engine_refuses_with_advice(model):
    engine = make_vllm(model)
    engine.sleep()
    with pytest.raises(InfrastructureError, match=r"is asleep\nCall wake"):
        run(engine, requests_of([[3]]))
    engine.close()
    with pytest.raises(InfrastructureError, match="closed"):
        run(engine, requests_of([[3]]))


def test_an_engine_restores_the_process_state(model):
    torch.manual_seed(5)
    random.seed(5)
    wanted = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    set_num_threads, preload = torch.set_num_threads, os.environ.get("LD_PRELOAD")
    names = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}

    make_vllm(model).close()

    assert torch.equal(torch.rand(3), wanted[0]) and random.random() == wanted[1]
    assert torch.set_num_threads is set_num_threads
    assert os.environ.get("LD_PRELOAD") == preload
    assert {name: os.environ.get(name) for name in names} == names
