"""SGLang in its own process: equality with the reference engine, weight updates at any time, and refusals."""

import asyncio
from dataclasses import replace

import pytest
import torch
from rlcore_sglang import SGLangConfig, SGLangRollout
from rlcore_sglang import weights as weights_module
from rlcore_tests.counts import counted_tokens

from rlcore.errors import ConfigError, InfrastructureError, ModelError, UserError
from rlcore.models.load import load_model
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.testing.rollout import request, run, weights
from rlcore.testing.waiting import HANG_S
from rlcore.types import Request, Sampling

TOLERANCE = 5e-3
"""Tolerance of log-probs; see the README."""
BFLOAT16_TOLERANCE = 0.3
"""Tolerance in bfloat16 against a reference in float32."""


def make(model, precision="float32", **options):
    config, model = SGLangConfig(max_batch_size=16, **options), ModelConfig(path=model, precision=precision)
    return SGLangRollout(config, model=model, context=RolloutContext())


def scaled(model, factor):
    """Return all weights multiplied by a factor: the same shapes, another distribution."""
    return [(name, tensor * factor) for name, tensor in weights(model)]


@pytest.fixture(scope="module")
def llama(tiny_llama):
    engine = make(tiny_llama)
    yield engine
    engine.close()


class TestFidelity:
    """Greedy tokens and log-probs compared with `hf`, before and after each kind of weight update."""

    @pytest.mark.parametrize("how", ["as loaded", "memory", "small pieces", "disk"])
    def test_llama_equals_the_reference_engine(self, llama, tiny_llama, how):
        compare(llama, tiny_llama, how)

    @pytest.mark.parametrize("family", ["tiny_qwen2", "tiny_qwen3", "tiny_qwen3_moe"])
    def test_qwen_equals_the_reference_engine(self, family, request):
        model = request.getfixturevalue(family)
        engine = make(model)
        try:
            for how in ("as loaded", "memory", "disk"):
                compare(engine, model, how)
        finally:
            engine.close()

    def test_bfloat16_is_near_the_reference_engine_in_float32(self, tiny_qwen3_moe):
        engine = make(tiny_qwen3_moe, "bfloat16")
        try:
            for how in ("as loaded", "memory", "disk"):
                compare(engine, tiny_qwen3_moe, how, BFLOAT16_TOLERANCE)
        finally:
            engine.close()


def compare(engine, model, how, tolerance=TOLERANCE):
    margin = 2 * tolerance  # gap of the two most likely tokens above which the choices must be equal
    reference = HFRollout(HFConfig(), model=ModelConfig(path=model), context=RolloutContext())
    if how != "as loaded":
        change = {"memory": {}, "small pieces": {"bucket_mb": 1}, "disk": {"weights": "disk"}}[how]
        monkeypatch = pytest.MonkeyPatch()
        sent = watch(engine, monkeypatch)
        if how == "small pieces":
            monkeypatch.setattr(weights_module, "_MB", 20_000)
        with changed(engine, **change):
            for one in (engine, reference):
                one.load_weights(iter(scaled(model, 1.1 if how == "disk" else 0.9)), 7)
        monkeypatch.undo()
        assert (sent.count("update_weights_from_tensor") > 5) == (how == "small pieces")
    asked = [request(i, num_prompt=2 + 5 * i, temperature=0.0, max_response_tokens=16) for i in range(4)]
    found, wanted = ({sample.request_id: sample for sample in run(one, asked)} for one in (engine, reference))
    num_equal = 0
    for number, sample in found.items():
        scores = scores_of(reference, asked[number], sample)
        scored = scores.gather(1, torch.tensor(list(sample.token_ids))[:, None]).squeeze(1)
        assert float((scored - torch.tensor(list(sample.log_probs))).abs().max()) < tolerance
        best = scores.topk(2, dim=-1).values
        assert float((best[:, 0] - scored).max()) < margin, "the sampled token is not the most likely one"
        unclear = (best[:, 0] - best[:, 1] < margin).nonzero()
        same = int(unclear[0]) if len(unclear) else len(sample.token_ids)
        assert list(sample.token_ids)[:same] == list(wanted[number].token_ids)[:same]
        assert sample.policy_version == (7 if how != "as loaded" else 0)
        num_equal += same
    if tolerance == TOLERANCE:
        assert num_equal > 20, "the model's choices are too ambiguous to compare"


def watch(engine, monkeypatch):
    """Return a list that records all further control actions."""
    actions, control = [], engine._engine.control

    def telling(action, **fields):
        actions.append(action)
        control(action, **fields)

    monkeypatch.setattr(engine._engine, "control", telling)
    return actions


@torch.no_grad()
def scores_of(reference, asked, sample):
    """Return the reference's log-probs [n, V] at each token of a response."""
    ids = torch.tensor([[*asked.prompt_ids, *sample.token_ids]])
    model = reference._model
    model.set_attn_implementation("sdpa")
    return model(ids).logits[0, len(asked.prompt_ids) - 1 : -1].log_softmax(-1)


class changed:
    """Context manager that changes settings temporarily."""

    def __init__(self, engine, **options):
        self.engine, self.options = engine, options

    def __enter__(self):
        self.before = self.engine._config
        self.engine._config = replace(self.before, **self.options)

    def __exit__(self, *_):
        self.engine._config = self.before


@pytest.fixture(scope="module")
def plain(tiny_llama):
    """An engine without two defaults: it ignores seeds, and returns each token before the next one is computed."""
    engine = make(tiny_llama, deterministic=False, engine_options={"disable_overlap_schedule": True})
    yield engine
    engine.close()


class TestWeightsMeanwhile:
    """New weights that arrive while sequences are in flight."""

    @pytest.mark.parametrize("pause", ["retract", "abort", "in_place", "in_place, without overlap"])
    def test_sequences_go_on_under_the_new_weights(self, tiny_llama, pause, request):
        pause, _, plainly = pause.partition(", ")
        llama = request.getfixturevalue("plain" if plainly else "llama")
        llama.load_weights(iter(weights(tiny_llama)), 10)
        asked = [_long(i, tokens=3 if i == 0 else 120) for i in range(4)]
        with changed(llama, pause=pause):
            samples = asyncio.run(asyncio.wait_for(_load_after_first(llama, asked, scaled(tiny_llama, 1.3)), HANG_S))

            later = run(llama, [_long(i, tokens=5) for i in range(4)])
        for sample in later:  # with the same prompts, whose old KV cache must not be reused
            new = _log_probs(tiny_llama, 1.3, asked[sample.request_id], sample)
            assert float((torch.tensor(list(sample.log_probs)) - new).abs().max()) < TOLERANCE

        assert sorted(samples) == [0, 1, 2, 3]
        assert samples[0].policy_version == 10
        for number in (1, 2, 3):
            sample = samples[number]
            assert sample.policy_version == 11
            assert sample.finish_reason == ("stop" if sample.token_ids[-1] == 1 else "length")
            assert len(sample.token_ids) == 120 or sample.finish_reason == "stop"
            old, new = (_log_probs(tiny_llama, factor, asked[number], sample) for factor in (1.0, 1.3))
            found = torch.tensor(list(sample.log_probs))
            is_old, is_new = (found - old).abs() < TOLERANCE, (found - new).abs() < TOLERANCE
            switch = int((~is_old).nonzero()[0])
            assert switch > 0, "no token was sampled before the new weights arrived"
            named = list(sample.token_versions).count(10)
            assert list(sample.token_versions) == [10] * named + [11] * (len(found) - named)
            # In place, SGLang attaches the version when it returns a token: one is sampled before and labeled after.
            assert switch - named in ((0, 1) if pause == "in_place" and not plainly else (0,))
            if pause != "in_place":  # otherwise the new tokens attend to the KV cache of the old weights
                assert bool(is_new[switch:].all()), f"token {switch} on must be sampled under the new weights alone"

    def test_a_broken_update_ends_those_who_wait(self, llama, tiny_llama):
        async def go():
            stream = llama.generate([_long(0, tokens=2), _long(1, tokens=200)])
            await anext(stream)
            with pytest.raises(ModelError, match="weights are missing"):
                llama.load_weights(iter(weights(tiny_llama)[:-1]), 12)
            with pytest.raises(InfrastructureError, match="incomplete weights"):
                await anext(stream)

        asyncio.run(asyncio.wait_for(go(), HANG_S))
        llama.load_weights(iter(weights(tiny_llama)), 13)
        assert {sample.policy_version for sample in run(llama, [request(0)])} == {13}


def test_tokens_of_unfinished_responses_are_counted(llama):
    asked = [_long(1, tokens=200)]
    found = asyncio.run(asyncio.wait_for(counted_tokens(llama, asked), HANG_S))

    assert found == sorted(found)
    assert found[0] < found[-2]
    before = llama.num_tokens
    samples = run(llama, asked)
    assert llama.num_tokens - before >= sum(len(sample.token_ids) for sample in samples)


def _long(number, tokens):
    return Request(
        request_id=number,
        prompt_ids=[3 + number, 4, 5],
        sampling=Sampling(max_response_tokens=tokens),
        seed=number,
    )


async def _load_after_first(engine, asked, new):
    stream = engine.generate(asked)
    samples = [await anext(stream)]
    engine.load_weights(iter(new), 11)
    samples += [sample async for sample in stream]
    return {sample.request_id: sample for sample in samples}


@torch.no_grad()
def _log_probs(path, factor, asked, sample):
    model = load_model(path).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(factor)
    ids = torch.tensor([[*asked.prompt_ids, *sample.token_ids]])
    scores = model(ids).logits[0, len(asked.prompt_ids) - 1 : -1].log_softmax(-1)
    return scores.gather(1, ids[0, len(asked.prompt_ids) :, None]).squeeze(1)


@pytest.fixture(scope="module")
def ranks(tiny_llama):
    config, model = SGLangConfig(max_batch_size=16, tensor_parallel=2), ModelConfig(path=tiny_llama)
    contexts = [RolloutContext(rank=rank, world_size=2) for rank in (0, 1)]
    ranks = [SGLangRollout(config, model=model, context=context) for context in contexts]
    yield ranks
    for rank in ranks:
        rank.close()


class TestTensorParallel:
    """Two ranks that share an engine; here both are objects in one process."""

    @pytest.mark.parametrize("how", ["as loaded", "memory", "disk"])
    def test_two_ranks_equal_the_reference_engine(self, ranks, tiny_llama, how):
        compare(ranks[0], tiny_llama, how)

    def test_the_second_rank_takes_its_part_and_yields_nothing(self, ranks, tiny_llama):
        taken = []
        ranks[1].load_weights(_watched(weights(tiny_llama), taken), 8)
        assert taken == [name for name, _ in weights(tiny_llama)], (
            "every rank must iterate over the weights, as gathering may need it"
        )
        assert run(ranks[1], [request(0), request(1)]) == []
        with pytest.raises(ModelError, match="weights are missing"):
            ranks[1].load_weights(iter(weights(tiny_llama)[:-1]), 9)

    def test_the_worker_of_the_second_rank_returns_no_rows(self, tiny_llama):
        from rlcore.data.batch import Batch
        from rlcore.protocols.worker import WorkerContext
        from rlcore.registry import resolve
        from rlcore.workers.rollout import RolloutWorker

        context = WorkerContext(role="rollout", rank=1, world_size=2, device="cpu", host="here")
        spec = resolve("rollout", "sglang").spec
        config = SGLangConfig(tensor_parallel=2)
        worker = RolloutWorker(context, rollout=spec, rollout_config=config, model=ModelConfig(path=tiny_llama))
        ones = torch.ones(2, dtype=torch.int64)
        prompts = Batch.of(
            lengths=ones, tokens={"input_ids": ones * 4}, rows={"group_id": ones, "seed": ones, "prompt_id": ones}
        )
        assert len(worker.generate(prompts, Sampling(max_response_tokens=2), 2)) == 0


def _watched(pairs, taken):
    for name, tensor in pairs:
        taken.append(name)
        yield name, tensor


def test_without_seeds_samples_differ_and_min_p_is_allowed(plain):
    one = request(0, min_p=0.01, max_response_tokens=8)
    asked = [replace(one, request_id=i) for i in range(6)]
    assert len({tuple(sample.token_ids) for sample in run(plain, asked)}) > 1


def test_min_p_with_seeds_is_refused_before_anything_runs(shared_engine):
    with pytest.raises(ConfigError, match=r"rollout.deterministic=false"):
        run(shared_engine, [request(0), request(1, min_p=0.1)])
    assert len(run(shared_engine, [request(0)])) == 1


def test_a_model_that_sglang_cannot_run_is_refused_and_another_engine_suggested(small_model):
    with pytest.raises(ModelError) as caught:
        make(small_model, engine_options={"attention_backend": "fa3"})
    first, second = str(caught.value).splitlines()[:2]
    assert first.startswith(f"SGLang cannot serve model.path={small_model}: ")
    assert second.endswith("rollout=hf")


def test_a_missing_interpreter_is_reported(small_model):
    with pytest.raises(UserError, match=r"rollout.python=/nowhere/python cannot be started"):
        make(small_model, python="/nowhere/python")


def test_a_virtual_environment_without_the_plugin_is_reported_with_the_command_to_type(small_model, tmp_path):
    """Use an empty virtual environment as `rollout.python`."""
    import subprocess
    import sys

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=HANG_S)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(UserError) as caught:
        make(small_model, python=python)
    first, second = str(caught.value).splitlines()
    assert first == f"rollout.python={python} is in a virtual environment without rlcore-sglang"
    assert second == f'Type  {python} -m pip install "rlcore-sglang[engine]"'
