"""vLLM generates the same as the reference engine, before and after new weights."""

import pytest
import torch
from conftest import make_hf, make_vllm, requests_of, run, tokens
from models import save_tiny

from rlcore.models.load import load_model, load_tokenizer

PROMPTS = [[5, 9, 11], [3], list(range(4, 44)), [7, 7, 7, 7, 7, 8], list(range(4, 44))]
"""Prompts of several lengths; the long one appears twice, so that a cached prefix is used."""


def changed_weights(path, scale):
    model = load_model(path).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(scale)
    return list(model.named_parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_greedy_responses_equal_those_of_hf_before_and_after_new_weights(family, tied, small_model, tmp_path):
    path = save_tiny(family, tmp_path, small_model, tied=tied)
    mine, reference = make_vllm(path), make_hf(path)
    try:
        seen = []
        for version, scale in ((0, None), (1, 1.3), (2, 0.8)):
            if scale is not None:
                for engine in (mine, reference):
                    engine.load_weights(iter(changed_weights(path, scale)), version)
            found, expected = run(mine, requests_of(PROMPTS)), run(reference, requests_of(PROMPTS))
            assert tokens(found) == tokens(expected)
            for request_id, sample in expected.items():
                assert list(found[request_id].log_probs) == pytest.approx(list(sample.log_probs), abs=2e-4)
                assert (found[request_id].finish_reason, found[request_id].policy_version) == (
                    sample.finish_reason,
                    version,
                )
            seen.append(tokens(found))
        assert seen[0] != seen[1] != seen[2], "the weights must change the responses for the test to be meaningful"
    finally:
        mine.close()


def test_the_story_model_generates_the_same_story_as_with_hf(story_model):
    tokenizer = load_tokenizer(story_model)
    prompts = [tokenizer(text).input_ids for text in ("Once upon a time", "Lily and Tom", "The dog")]
    mine = make_vllm(story_model)
    try:
        asked = requests_of(prompts, max_response_tokens=60)
        found, expected = run(mine, asked), run(make_hf(story_model), asked)
        assert tokens(found) == tokens(expected)
        assert "there was a little girl named" in tokenizer.decode(found[0].token_ids)

        cut = requests_of(prompts, max_response_tokens=60, stop=("was",))
        found, expected = run(mine, cut), run(make_hf(story_model), cut)
        assert tokens(found) == tokens(expected)
        assert tokenizer.decode(found[0].token_ids).endswith("was")
    finally:
        mine.close()


def test_bfloat16_log_probs_are_close_to_those_of_float32(story_model):
    mine = make_vllm(story_model, precision="bfloat16")
    try:
        prompt = load_tokenizer(story_model)("Once upon a time").input_ids
        asked = requests_of([prompt] * 4, temperature=1.0, max_response_tokens=40)
        plain = load_model(story_model)
        for sample in run(mine, asked).values():
            ids = torch.tensor([[*prompt, *sample.token_ids]])
            with torch.no_grad():
                scores = plain(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            wanted = scores.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
            gap = (wanted - torch.tensor(sample.log_probs)).abs()
            assert gap.mean() < 0.05 and gap.max() < 0.3
            assert gap.max() > 1e-5, "bfloat16 was not used"
    finally:
        mine.close()
