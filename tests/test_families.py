"""Samples that are three attention windows long, for many families: the model's own log-probs, or an error."""

import asyncio

import pytest
import torch
from rlcore_tests.families import PLAIN, WINDOW, WINDOWED, make_family
from transformers.masking_utils import AttentionMaskInterface

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.errors import ModelError
from rlcore.models import attention, comparison
from rlcore.models.comparison import small_limits
from rlcore.models.head import TokenHead, use_packed_attention
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.testing.waiting import HANG_S
from rlcore.types import Request, Sampling
from tests.models import log_probs_of, make_backend, make_batch, random_ids

LENGTHS = [3 * WINDOW + 1, 5, 2 * WINDOW, 3 * WINDOW - 2]


def make_engine(path):
    return HFRollout(HFConfig(), model=ModelConfig(path=path), context=RolloutContext())


async def collect(engine, requests):
    return [sample async for sample in engine.generate(requests)]


@pytest.mark.parametrize("model_type", [*WINDOWED, *PLAIN])
def test_local_has_the_log_probs_of_the_model_itself(model_type, tmp_path):
    own = make_family(model_type)
    own.save_pretrained(tmp_path)
    batch = make_batch(samples := random_ids(LENGTHS))

    found = make_backend(str(tmp_path)).forward(batch, temperature=1.0).log_probs[batch["loss_mask"]]

    expected = torch.cat([log_probs_of(own, sample)[2:] for sample in samples])
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", [*WINDOWED, *PLAIN])
def test_hf_engine_has_the_log_probs_of_the_model_itself(model_type, tmp_path):
    own = make_family(model_type)
    own.generation_config.eos_token_id = None
    own.save_pretrained(tmp_path)
    prompts = random_ids([3, WINDOW + 3])
    sampling = Sampling(max_response_tokens=2 * WINDOW)
    requests = [Request(request_id=i, prompt_ids=ids, sampling=sampling, seed=1) for i, ids in enumerate(prompts)]

    samples = asyncio.run(asyncio.wait_for(collect(make_engine(str(tmp_path)), requests), HANG_S))

    assert max(len(prompts[sample.request_id]) + len(sample.token_ids) for sample in samples) > 2 * WINDOW
    for sample in samples:
        prompt = prompts[sample.request_id]
        expected = log_probs_of(own, [*prompt, *sample.token_ids])[len(prompt) :]
        torch.testing.assert_close(torch.tensor(sample.log_probs).double(), expected, atol=2e-5, rtol=1e-5)


def plan_local(path):
    return LocalBackend.data_parallel(LocalConfig(), model=ModelConfig(path=path), world_size=1, device="cpu")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (plan_local, "llama4_text has attention in chunks of 8 tokens, .*\nNo backend takes it"),
        (make_backend, "llama4_text has attention in chunks of 8 tokens, .*\nNo backend takes it"),
        (make_engine, "rollout=hf cannot run Llama4ForCausalLM: its logits differ .*\nUse another .*rollout=vllm"),
    ],
    ids=["plan", "local", "hf"],
)
def test_chunked_attention_is_refused(make, message, tmp_path):
    make_family("llama4_text").save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=message):
        make(str(tmp_path))


def test_scale_that_depends_on_the_place_in_a_batch_is_refused(tmp_path):
    kinds = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0], "attn_temperature_tuning": True}
    make_family("llama4_text", floor_scale=64, **kinds).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=r"logits differ by .* longer than its .*floor_scale=64"):
        make_engine(str(tmp_path))


@pytest.mark.parametrize("model_type", ["phimoe", "qwen2_moe"])
def test_window_that_attention_does_not_see_is_refused(model_type, monkeypatch):
    attention.register()
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, attention.NAME, lambda *args, **options: None)
    model = make_family(model_type, sliding_window=64)

    with pytest.raises(ModelError, match=r"logits differ by .* longer than its sliding_window=64"):
        use_packed_attention(model, TokenHead(model))

    assert model.config.sliding_window == 64


def test_window_that_stays_as_it_is_is_refused(monkeypatch):
    attention.register()
    monkeypatch.setattr(comparison, "_LIMITS", ("max_position_embeddings",))
    model = make_family("mistral", sliding_window=64)

    with pytest.raises(ModelError, match="max_position_embeddings=512 cannot be changed, so longer samples cannot be"):
        use_packed_attention(model, TokenHead(model))


@pytest.mark.parametrize("model_type", WINDOWED)
def test_windows_are_small_during_the_comparison_and_restored_after_it(model_type):
    model = make_family(model_type)
    layers = [layer.self_attn for layer in model.model.layers]
    before = [getattr(layer, "sliding_window", None) for layer in layers]

    with small_limits(model) as limits:
        small = [getattr(layer, "sliding_window", None) for layer in layers]
        assert (limits, model.config.sliding_window) == (f"sliding_window={WINDOW}", 4)

    assert small == [4 if window == WINDOW else None for window in before]
    assert [getattr(layer, "sliding_window", None) for layer in layers] == before
    assert model.config.sliding_window == WINDOW
