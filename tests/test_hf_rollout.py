"""The `hf` engine: same tokens as transformers' generate, and log-probs of a plain forward pass, under any load."""

import asyncio
from dataclasses import replace

import pytest
import torch

from rlcore.errors import InfrastructureError, ModelError, NumericalError, SampleError
from rlcore.models.load import load_model, load_tokenizer
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts import hf
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.testing.waiting import HANG_S
from rlcore.types import Request, Sampling
from tests.models import (
    FAMILIES,
    TRAINED,
    log_probs_of,
    make_backend,
    make_batch,
    random_ids,
    save_model,
    trained_model,
)

TEXTS = ["Once upon a time", "Lily and Tom", "The", "One day, a little girl named Lily found a needle in her room."]


@pytest.fixture(scope="module")
def stories(assets):
    return str(assets / "models" / "stories260k")


@pytest.fixture(scope="module")
def plain(stories):
    return load_model(stories, attention="eager")


@pytest.fixture(scope="module")
def prompts(stories):
    tokenizer = load_tokenizer(stories)
    return [tokenizer(text).input_ids for text in TEXTS]


@pytest.fixture(scope="module")
def shared_engine(stories):
    return make_engine(stories)


@pytest.fixture
def engine(stories):
    return make_engine(stories)


def make_engine(path, precision="float32", **config):
    model = ModelConfig(path=path, precision=precision)
    return HFRollout(HFConfig(**config), model=model, context=RolloutContext())


def requests_of(prompts, seed=0, **sampling):
    asked = Sampling(**({"max_response_tokens": 20} | sampling))
    return [Request(request_id=i, prompt_ids=ids, sampling=asked, seed=seed + i) for i, ids in enumerate(prompts)]


async def collect(engine, requests):
    return [sample async for sample in engine.generate(requests)]


def run(engine, requests):
    """Return samples by request id."""
    samples = asyncio.run(asyncio.wait_for(collect(engine, requests), HANG_S))
    assert sorted(s.request_id for s in samples) == sorted(r.request_id for r in requests)
    return {sample.request_id: sample for sample in samples}


def tokens(samples):
    return {request_id: list(samples[request_id].token_ids) for request_id in sorted(samples)}


def assert_same(found, expected):
    """Check for equal tokens, finish reasons and versions, and log-probs equal up to rounding."""
    assert tokens(found) == tokens(expected)
    for request_id, sample in expected.items():
        other = found[request_id]
        assert (other.finish_reason, other.policy_version) == (sample.finish_reason, sample.policy_version)
        assert list(other.log_probs) == pytest.approx(list(sample.log_probs), abs=1e-4)


def greedy_by_transformers(model, prompt, num_tokens, **options):
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            **options,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", TRAINED)
def test_greedy_equals_transformers_generate_on_a_trained_model(name):
    path = trained_model(name)
    plain, tokenizer = load_model(path, attention="eager"), load_tokenizer(path)
    prompts = [tokenizer(text).input_ids for text in TEXTS]

    samples = run(make_engine(path), requests_of(prompts, temperature=0.0, max_response_tokens=60))

    for i, prompt in enumerate(prompts):
        assert list(samples[i].token_ids) == greedy_by_transformers(plain, prompt, 60)
    assert tokenizer.decode(samples[0].token_ids).strip().startswith(", there was a little")


def test_a_repetition_penalty_changes_its_request_alone_as_in_transformers(shared_engine, plain, prompts):
    length = 80  # so long that the model repeats itself
    asked = requests_of(prompts, temperature=0.0, max_response_tokens=length)
    penalty = replace(asked[1].sampling, repetition_penalty=1.4)
    asked[1] = replace(asked[1], sampling=penalty)

    samples = run(shared_engine, asked)

    penalized = greedy_by_transformers(plain, prompts[1], length, repetition_penalty=1.4)
    assert list(samples[1].token_ids) == penalized != greedy_by_transformers(plain, prompts[1], length)
    assert list(samples[0].token_ids) == greedy_by_transformers(plain, prompts[0], length)
    expected = log_probs_of(plain, [*prompts[1], *penalized], 1.0)[len(prompts[1]) :]
    assert list(samples[1].log_probs) == pytest.approx(expected.tolist(), abs=1e-4), "log-probs are the model's own"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_log_probs_equal_transformers_for_every_family(family, tmp_path):
    path = save_model(family, tmp_path, seed=5)
    own = load_model(path, attention="eager")
    prompts = random_ids([9, 2, 1, 6], seed=7)

    greedy = run(make_engine(path), requests_of(prompts, temperature=0.0, max_response_tokens=12))
    drawn = run(make_engine(path), requests_of(prompts, temperature=0.8, max_response_tokens=12))

    for i, prompt in enumerate(prompts):
        assert list(greedy[i].token_ids) == greedy_by_transformers(own, prompt, 12)
        for samples, temperature in ((greedy, 1.0), (drawn, 0.8)):
            expected = log_probs_of(own, [*prompt, *samples[i].token_ids], temperature)[len(prompt) :]
            assert list(samples[i].log_probs) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 20}, {"top_p": 0.8, "min_p": 0.05}, {"temperature": 0.0}],
    ids=str,
)
def test_reported_log_probs_are_those_of_a_plain_forward_pass(sampling, shared_engine, plain, prompts):
    samples = run(shared_engine, requests_of(prompts, max_response_tokens=30, **sampling))

    for i, prompt in enumerate(prompts):
        ids = [*prompt, *samples[i].token_ids]
        expected = log_probs_of(plain, ids, sampling.get("temperature") or 1.0)[len(prompt) :]
        assert list(samples[i].log_probs) == pytest.approx(expected.tolist(), abs=1e-4)
        assert len(samples[i].log_probs) == len(samples[i].token_ids) > 0


def test_log_probs_agree_with_those_of_the_training_backend(shared_engine, stories, prompts):
    samples = run(shared_engine, requests_of(prompts, temperature=0.9))
    batch = make_batch(
        [[*prompt, *samples[i].token_ids] for i, prompt in enumerate(prompts)],
        prompt_lengths=[len(prompt) for prompt in prompts],
    )

    out = make_backend(stories).forward(batch, temperature=0.9)

    drawn = [x for i in range(len(prompts)) for x in samples[i].log_probs]
    assert out.log_probs[batch["loss_mask"]].tolist() == pytest.approx(drawn, abs=1e-4)


def test_sample_does_not_depend_on_other_requests(shared_engine, prompts):
    requests = requests_of(prompts * 3, temperature=1.0)

    together = run(shared_engine, requests)
    backwards = run(shared_engine, requests[::-1])

    assert_same(backwards, together)
    for request in requests[::2]:
        assert_same(run(shared_engine, [request]), {request.request_id: together[request.request_id]})


def test_samples_of_one_prompt_differ_by_seed_and_agree_with_it(shared_engine, prompts):
    requests = requests_of([prompts[0]] * 6)
    requests[5] = replace(requests[5], seed=requests[0].seed)

    samples = tokens(run(shared_engine, requests))

    assert samples[5] == samples[0]
    assert len({tuple(ids) for ids in samples.values()}) == 5


def test_prompt_of_several_samples_goes_through_the_model_once(engine, prompts):
    seen = []
    engine._model.register_forward_pre_hook(
        lambda module, args, options: seen.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    run(engine, requests_of([prompts[0]] * 5 + [prompts[3]] * 3, max_response_tokens=2))

    assert seen == [(1, len(prompts[0]) + len(prompts[3])), (8, 1)]


@pytest.mark.parametrize(
    "config",
    [
        {"max_batch_size": 1},
        {"max_batch_size": 3},
        {"max_batch_tokens": 1},
        {"max_batch_tokens": 150},
        {"max_batch_size": 5, "max_batch_tokens": 200},
    ],
    ids=str,
)
def test_less_capacity_than_requests_gives_the_same_samples(config, stories, shared_engine, prompts):
    requests = requests_of(prompts * 3, max_response_tokens=20)
    # different limits, so that sequences leave and join at different times
    requests = [
        replace(r, sampling=replace(r.sampling, max_response_tokens=3 + 5 * (i % 4))) for i, r in enumerate(requests)
    ]
    engine = make_engine(stories, **config)
    in_flight = []
    engine._model.register_forward_pre_hook(
        lambda module, args, options: in_flight.append(len(options["input_ids"])), with_kwargs=True
    )

    found = run(engine, requests)

    assert_same(found, run(shared_engine, requests))
    assert max(in_flight) <= config.get("max_batch_size", 12)
    if config == {"max_batch_tokens": 1}:
        assert max(in_flight) == 1


def test_prompts_longer_than_one_pass_are_read_in_several(monkeypatch, stories, shared_engine, prompts):
    requests = requests_of(prompts * 2)
    expected = run(shared_engine, requests)
    monkeypatch.setattr(hf, "_PREFILL_TOKENS", 8)

    assert_same(run(make_engine(stories), requests), expected)


def test_response_ends_with_a_stop_token_that_stays_in_it(shared_engine, prompts):
    free = run(shared_engine, requests_of(prompts[:1]))[0]
    stop = free.token_ids[7]
    end = list(free.token_ids).index(stop) + 1

    cut = run(shared_engine, requests_of(prompts[:1], stop_token_ids=(stop, 511)))[0]

    assert (free.finish_reason, len(free.token_ids)) == ("length", 20)
    assert cut.token_ids == free.token_ids[:end]
    assert cut.log_probs == pytest.approx(free.log_probs[:end], abs=1e-5)
    assert cut.finish_reason == "stop"


def test_response_ends_with_the_models_end_token(tmp_path):
    path = save_model("llama", tmp_path, eos_token_id=[7, 9], initializer_range=0.1)
    samples = run(make_engine(path), requests_of(random_ids([3] * 8), max_response_tokens=58))

    stopped = [sample for sample in samples.values() if sample.finish_reason == "stop"]
    assert {sample.token_ids[-1] for sample in stopped} == {7, 9}
    for sample in samples.values():
        assert not {7, 9} & set(sample.token_ids[:-1])
        assert (sample.token_ids[-1] in (7, 9)) == (sample.finish_reason == "stop")


def test_end_token_as_the_last_allowed_one_is_a_stop(shared_engine, prompts):
    free = run(shared_engine, requests_of(prompts[:1]))[0]
    limit = list(free.token_ids).index(free.token_ids[7]) + 1

    cut = run(shared_engine, requests_of(prompts[:1], max_response_tokens=limit, stop_token_ids=(free.token_ids[7],)))[
        0
    ]

    assert (len(cut.token_ids), cut.finish_reason) == (limit, "stop")


@pytest.mark.parametrize("stop", [(" girl",), ("irl na",), ("never", "ther"), (".",)], ids=str)
def test_response_ends_with_the_token_that_completes_a_stop_string(stop, shared_engine, prompts):
    decode = load_tokenizer(shared_engine._path).decode
    free = run(shared_engine, requests_of(prompts[:1], temperature=0.0, max_response_tokens=40))[0]
    texts = [decode(free.token_ids[: n + 1]) for n in range(40)]
    end = next(n for n, text in enumerate(texts) if any(one in text for one in stop)) + 1

    cut = run(shared_engine, requests_of(prompts[:1], temperature=0.0, max_response_tokens=40, stop=stop))[0]

    assert cut.token_ids == free.token_ids[:end]
    assert cut.finish_reason == "stop"
    assert end < 40


@pytest.mark.parametrize("limit", [1, 2, 20])
def test_response_ends_at_its_limit(limit, shared_engine, prompts):
    samples = run(shared_engine, requests_of(prompts, max_response_tokens=limit))

    assert {(len(sample.token_ids), sample.finish_reason) for sample in samples.values()} == {(limit, "length")}


def test_response_ends_where_the_context_does(shared_engine):
    prompt = [1, *random_ids([508], vocab_size=500)[0]]

    sample = run(shared_engine, requests_of([prompt], max_response_tokens=20))[0]

    assert (len(sample.token_ids), sample.finish_reason) == (3, "length")


def test_no_requests_are_no_samples(shared_engine):
    assert run(shared_engine, []) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": [3] * 512}, "request 1: a prompt of 512 tokens leaves no room in a context of 512\nType  data"),
        ({"prompt_ids": []}, "request 1 has an empty prompt\nGive it at least one token"),
        ({"prompt_ids": [5, 512]}, "request 1: token id 512 is not among the 512 of the model\nUse the tokenizer"),
        ({"prompt_ids": [-1]}, "request 1: token id -1 is not among"),
        ({"sampling": Sampling(max_response_tokens=0)}, "request 1: max_response_tokens=0\nIt must be at least 1"),
    ],
    ids=["too long", "empty", "unknown token", "negative token", "no token asked"],
)
def test_request_that_cannot_run_is_refused_before_any_other_has_run(change, message, shared_engine):
    good, bad, _ = requests_of([[5]] * 3, max_response_tokens=1)

    with pytest.raises(SampleError, match=message):
        run(shared_engine, [good, replace(bad, **change)])


def test_closing_the_iterator_aborts_the_rest(engine, prompts):
    passes = []
    engine._model.register_forward_pre_hook(lambda module, args: passes.append(1))
    requests = requests_of(prompts * 2, max_response_tokens=30)
    requests[3] = replace(requests[3], sampling=Sampling(max_response_tokens=2))

    async def first():
        stream = engine.generate(requests)
        sample = await anext(stream)
        await stream.aclose()
        return sample

    sample = asyncio.run(asyncio.wait_for(first(), HANG_S))

    assert (sample.request_id, len(sample.token_ids)) == (3, 2)
    assert len(passes) == 2
    assert len(run(engine, requests_of(prompts))) == 4


def test_cancelled_task_stops_and_the_engine_still_works(engine, prompts):
    async def cancelled():
        task = asyncio.create_task(collect(engine, requests_of(prompts, max_response_tokens=400)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), HANG_S))
    assert len(run(engine, requests_of(prompts))) == 4


def test_two_concurrent_calls_do_not_affect_each_other(shared_engine, prompts):
    one, other = requests_of(prompts), requests_of(prompts[::-1], seed=50, temperature=0.5)
    expected = run(shared_engine, one), run(shared_engine, other)

    async def both():
        return await asyncio.gather(collect(shared_engine, one), collect(shared_engine, other))

    found = asyncio.run(asyncio.wait_for(both(), HANG_S))

    for samples, wanted in zip(found, expected):
        assert_same({sample.request_id: sample for sample in samples}, wanted)


def test_aborting_one_of_two_concurrent_calls_leaves_the_other(shared_engine, prompts):
    one, other = requests_of(prompts), requests_of(prompts[::-1], seed=50, temperature=0.5)
    expected = run(shared_engine, other)

    async def both():
        task = asyncio.create_task(collect(shared_engine, one))
        kept = asyncio.create_task(collect(shared_engine, other))
        for _ in range(4):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await kept

    found = asyncio.run(asyncio.wait_for(both(), HANG_S))

    assert_same({sample.request_id: sample for sample in found}, expected)


def weights_of(path, factor=1.0):
    return [(name, factor * tensor.detach()) for name, tensor in load_model(path).named_parameters()]


def test_new_weights_change_the_version_and_the_output(engine, stories, prompts):
    requests = requests_of(prompts)
    first = run(engine, requests)
    engine.load_weights(iter(weights_of(stories, 0.8)), 5)
    second = run(engine, requests)
    engine.load_weights(iter(weights_of(stories)), 6)
    third = run(engine, requests)

    assert [{sample.policy_version for sample in run_.values()} for run_ in (first, second, third)] == [{0}, {5}, {6}]
    assert tokens(second) != tokens(first)
    assert tokens(third) == tokens(first)


def test_weights_of_the_training_backend_make_the_engine_follow_it(engine, stories, prompts, tmp_path):
    backend = make_backend(stories)
    batch = make_batch(random_ids([9, 12]))
    backend.forward_backward(batch, lambda out, part: (-out.log_probs.sum(), {}), temperature=1.0)
    backend.step()
    engine.load_weights(backend.weights(), 1)
    backend.save(tmp_path)

    samples = run(engine, requests_of(prompts, temperature=0.0))

    own = load_model(str(tmp_path), attention="eager")
    for i, prompt in enumerate(prompts):
        assert list(samples[i].token_ids) == greedy_by_transformers(own, prompt, 20)
        expected = log_probs_of(own, [*prompt, *samples[i].token_ids])[len(prompt) :]
        assert list(samples[i].log_probs) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("max_batch_size", [1024, 2])
def test_running_sequences_continue_under_new_weights(max_batch_size, stories, plain, prompts):
    engine = make_engine(stories, max_batch_size=max_batch_size)
    new = load_model(stories, attention="eager")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(0.9)
    requests = requests_of(prompts, max_response_tokens=12)
    short = replace(requests[0], sampling=Sampling(max_response_tokens=4))

    async def swap():
        samples = []
        async for sample in engine.generate([short, *requests[1:]]):
            samples.append(sample)
            if sample.request_id == 0:
                engine.load_weights(((name, p.detach()) for name, p in new.named_parameters()), 9)
        return {sample.request_id: sample for sample in samples}

    samples = asyncio.run(asyncio.wait_for(swap(), HANG_S))

    assert {i: sample.policy_version for i, sample in samples.items()} == {0: 0, 1: 9, 2: 9, 3: 9}
    for i, prompt in enumerate(prompts):
        ids = [*prompt, *samples[i].token_ids]
        old_part = 4 if i == 0 or i < max_batch_size else 0
        if 0 < old_part < len(samples[i].token_ids):
            assert list(samples[i].token_versions) == [0] * old_part + [9] * (len(samples[i].token_ids) - old_part)
        else:
            assert not samples[i].token_versions
        expected = torch.cat(
            [log_probs_of(plain, ids)[len(prompt) :][:old_part], log_probs_of(new, ids)[len(prompt) :][old_part:]]
        )
        assert list(samples[i].log_probs) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda weights: weights[:-1], "1 weights are missing, the first is 'model.norm.weight'\nGive trainer"),
        (lambda weights: [*weights, ("model.extra", torch.ones(2))], r"weight 'model.extra' \(2,\) is unknown in"),
        (lambda weights: [(weights[0][0], torch.ones(3)), *weights[1:]], r"\(3,\) is \(512, 64\) in the rollout's"),
    ],
    ids=["one is missing", "one is unknown", "one has another shape"],
)
def test_mismatched_weights_are_refused_and_the_engine_refuses_to_generate_until_complete_ones_arrive(
    spoil, message, engine, stories, prompts
):
    before = run(engine, requests_of(prompts))

    with pytest.raises(ModelError, match="version 4 of the weights does not fit the rollout: .*" + message):
        engine.load_weights(iter(spoil(weights_of(stories, 0.8))), 4)
    with pytest.raises(InfrastructureError, match=r"has incomplete weights: .*\nLoad them again"):
        run(engine, requests_of(prompts))
    engine.load_weights(iter(weights_of(stories)), 0)

    assert_same(run(engine, requests_of(prompts)), before)


def test_weights_whose_sender_fails_leave_an_engine_that_refuses(engine, stories, prompts):
    def failing():
        yield from weights_of(stories)[:3]
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError):
        engine.load_weights(failing(), 7)
    with pytest.raises(InfrastructureError, match="the sender is gone"):
        run(engine, requests_of(prompts))


def test_loaded_weights_are_copies(engine, stories, prompts):
    weights = weights_of(stories)
    engine.load_weights(iter(weights), 0)
    before = run(engine, requests_of(prompts))
    for _, tensor in weights:
        tensor.zero_()

    assert_same(run(engine, requests_of(prompts)), before)


def test_weights_with_nan_are_reported_with_the_request(engine, stories, prompts):
    engine.load_weights(iter(weights_of(stories, float("nan"))), 1)

    with pytest.raises(NumericalError, match=f"request 0: .* not finite at position {len(prompts[0])}\nLook for NaN"):
        run(engine, requests_of(prompts))


def test_sleep_refuses_requests_until_wake_and_close_ends_the_engine(engine, prompts):
    before = run(engine, requests_of(prompts))
    engine.sleep()
    engine.sleep()
    with pytest.raises(InfrastructureError, match=r"is asleep\nCall wake\(\)"):
        run(engine, requests_of(prompts))
    engine.wake()
    engine.wake()
    assert_same(run(engine, requests_of(prompts)), before)

    engine.close()
    engine.close()
    with pytest.raises(InfrastructureError, match="is closed\nCreate a new one"):
        run(engine, requests_of(prompts))


def test_bfloat16_engine_is_near_the_float32_one(stories, plain, prompts):
    samples = run(make_engine(stories, precision="bfloat16"), requests_of(prompts))

    for i, prompt in enumerate(prompts):
        expected = log_probs_of(plain, [*prompt, *samples[i].token_ids])[len(prompt) :]
        difference = (torch.tensor(samples[i].log_probs).double() - expected).abs()
        assert 0.0 < float(difference.mean()) < 0.1


@pytest.mark.parametrize(
    ("config_class", "options", "message"),
    [
        ("MambaConfig", {"state_size": 4}, "rollout=hf cannot run MambaForCausalLM: .*"),
        ("GptOssConfig", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux, .*rollout=hf .*"),
    ],
    ids=["a state instead of keys", "attention sinks"],
)
def test_family_that_the_cache_cannot_hold_is_refused_with_another_engine_to_type(
    config_class, options, message, tmp_path
):
    import transformers

    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2} if config_class != "MambaConfig" else {}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, config_class)(**sizes, **heads, **ends, **options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=message + "\nUse another engine .*=vllm"):
        make_engine(str(tmp_path))
