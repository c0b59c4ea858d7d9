"""What needs CUDA devices: the contract there, and Transformer Engine's packed attention against the core's buckets."""

import importlib.util

import pytest
import torch
from megatron_cases import save_model
from rlcore_megatron import MegatronBackend, MegatronConfig

from rlcore.protocols.backend import BackendContext, ModelConfig
from rlcore.testing import BackendContract
from rlcore.testing.training import GENTLE, column, make_batch, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None


class TestOnGPU(BackendContract):
    device = "cuda:0"

    def make(self, model, optimizer, context):
        return MegatronBackend(MegatronConfig(layers="local"), model=model, optimizer=optimizer, context=context)


@pytest.mark.skipif(not HAS_ENGINE, reason="no Transformer Engine")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_transformer_engine_says_what_the_buckets_say(family, tmp_path):
    path, batch = save_model(family, tmp_path, hidden_size=64, head_dim=64), make_batch().to("cuda:0")

    def make(layers):
        return MegatronBackend(
            MegatronConfig(layers=layers),
            model=ModelConfig(path=path, precision="bfloat16"),
            optimizer=GENTLE,
            context=BackendContext(device="cuda:0"),
        )

    engine, local = make("transformer_engine"), make("local")

    found, expected = (column(one.forward(batch, temperature=1.0)) for one in (engine, local))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)
    of_engine, of_local = train(engine, batch, 3), train(local, batch, 3)
    assert [row[0] for row in of_engine] == pytest.approx([row[0] for row in of_local], rel=0.1, abs=0.1)
