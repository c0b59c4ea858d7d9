"""Fixtures: one thread, no network, small models that vLLM's CPU kernels support, and both of vLLM's schedulers."""

import asyncio
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from rlcore_tests.assets import assets, each_assets  # noqa: F401
from rlcore_vllm import VLLMConfig, VLLMRollout

from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.testing.model import small_model as make_small_model
from rlcore.testing.waiting import HANG_S
from rlcore.types import Request, Sampling

_PLUGIN = str(Path(__file__).parent / "async_scheduling")
sys.path.append(_PLUGIN)
# Servers and Ray's workers inherit this one.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _PLUGIN)))
SCHEDULING = "RLCORE_TEST_ASYNC_SCHEDULING"
"""Environment variable; set to 1, engines schedule asynchronously, as on a GPU. See async_scheduling/."""


def pytest_configure(config):
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)


@pytest.fixture(scope="module", params=["sync", "async"])
def scheduling(request):
    """Run the tests with each of vLLM's schedulers. Its default is sync on CPUs and async on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SCHEDULING, "1" if request.param == "async" else "0")
        yield request.param


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A Qwen2 with heads of 32 dimensions and tied embeddings."""
    return make_small_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def story_model(each_assets, tmp_path_factory):  # noqa: F811
    """A trained model in a form that vLLM's CPU attention supports."""
    from models import save_widened_story

    return save_widened_story(each_assets / "models" / "stories260k", tmp_path_factory.mktemp("story"))


def make_vllm(path, precision="float32", **config):
    model = ModelConfig(path=path, precision=precision)
    return VLLMRollout(VLLMConfig(**({"max_batch_size": 16} | config)), model=model, context=RolloutContext())


def make_hf(path, precision="float32"):
    return HFRollout(HFConfig(), model=ModelConfig(path=path, precision=precision), context=RolloutContext())


def requests_of(prompts, seed=0, **sampling):
    asked = Sampling(**({"max_response_tokens": 16, "temperature": 0.0} | sampling))
    return [Request(request_id=i, prompt_ids=ids, sampling=asked, seed=seed + i) for i, ids in enumerate(prompts)]


async def collect(engine, requests):
    return {sample.request_id: sample async for sample in engine.generate(requests)}


async def interrupted(engine, asked, new_weights):
    """Return samples by request id; new weights arrive as version 7 after some tokens have been sampled."""
    task = asyncio.create_task(collect(engine, asked))
    for _ in range(20):
        await asyncio.sleep(0)
    engine.load_weights(iter(new_weights), 7)
    return await asyncio.wait_for(task, HANG_S)


def run(engine, requests):
    """Return samples by request id."""
    return asyncio.run(asyncio.wait_for(collect(engine, requests), HANG_S))


def tokens(samples):
    return {request_id: list(samples[request_id].token_ids) for request_id in sorted(samples)}
