"""Episodes over vLLM and SGLang, if installed: the log-probs of every turn match the trainer's."""

import importlib

import pytest
import torch
from test_episodes import TEMPLATE, Settings, play

from rlcore.models.load import load_tokenizer
from rlcore.protocols import ModelConfig, RolloutContext
from rlcore.testing.model import plain_model, small_model


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name"), [("vllm", "VLLMRollout"), ("sglang", "SGLangRollout")])
def test_log_probs_of_every_turn_match_the_trainer(tmp_path_factory, package, name):
    pytest.importorskip(package, reason=f"needs {package} in this virtual environment")
    engine_class = getattr(importlib.import_module(f"rlcore_{package}"), name)
    path = small_model(tmp_path_factory.getbasetemp())
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = TEMPLATE

    engine = engine_class(engine_class.Config(), model=ModelConfig(path=path), context=RolloutContext())
    try:
        episodes = play(engine, tokenizer, num=24, turns=3)
    finally:
        engine.close()

    assert {episode.num_turns for episode in episodes} == {Settings().turns}
    for episode in episodes:
        ids = torch.tensor(episode.token_ids)
        with torch.no_grad():
            scores = plain_model(path)(ids[None]).logits[0, :-1].log_softmax(-1)
        mask = torch.tensor(episode.loss_mask)[1:]
        wanted = scores.gather(1, ids[1:, None]).squeeze(1)[mask]
        torch.testing.assert_close(torch.tensor(episode.log_probs), wanted, atol=2e-5, rtol=0)
