"""Samples that the rollout worker accepts from an engine: one for each request, in any order."""

from __future__ import annotations

import asyncio

import pytest

from rlcore.data.batch import Batch
from rlcore.errors import InfrastructureError
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.protocols.worker import WorkerContext
from rlcore.registry import resolve
from rlcore.testing.fakes import FakeConfig
from rlcore.testing.training import save_model
from rlcore.testing.waiting import HANG_S
from rlcore.types import Mesh, Request, Sample, Sampling
from rlcore.workers.rollout import RolloutWorker, _drain, samples_batch


class Engine:
    """Engine that returns samples with these request ids."""

    mesh = Mesh(rank=0, world_size=1, dp_rank=0, dp_size=1)

    def __init__(self, *answers: int) -> None:
        self.answers = answers

    async def generate(self, requests):
        for request_id in self.answers:
            yield Sample(request_id=request_id, token_ids=[7], log_probs=[-1.0], finish_reason="stop", policy_version=3)


REQUESTS = [Request(request_id=i, prompt_ids=[1], sampling=Sampling(), seed=i) for i in range(3)]


def test_samples_come_back_in_the_order_of_the_requests():
    drawn = []
    samples = asyncio.run(_drain(Engine(2, 0, 1), REQUESTS, drawn.append))

    assert [sample.request_id for sample in samples] == [0, 1, 2]
    assert [sample.request_id for sample in drawn] == [2, 0, 1]


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ((0, 1), "2 samples for 3 requests: 1 requests without one, 0 samples twice, 0 for unknown requests"),
        ((0, 1, 2, 1), "4 samples for 3 requests: 0 requests without one, 1 samples twice, 0 for unknown requests"),
        ((0, 1, 2, 9), "4 samples for 3 requests: 0 requests without one, 0 samples twice, 1 for unknown requests"),
        ((0, 1, 1), "3 samples for 3 requests: 1 requests without one, 1 samples twice, 0 for unknown requests"),
    ],
)
def test_a_sample_too_few_or_too_many_is_an_error_of_the_engine(answers, fault):
    with pytest.raises(RuntimeError, match=f"Engine returned {fault}"):
        asyncio.run(_drain(Engine(*answers), REQUESTS, [].append))


@pytest.mark.parametrize("name", ["hf", "fake"])
def test_tokens_of_unfinished_responses_are_counted(name, tmp_path):
    model = save_model("qwen3", tmp_path / "model")
    kind = resolve("rollout", name).object
    engine = kind(kind.Config(), model=ModelConfig(path=model), context=RolloutContext())
    requests = [
        Request(request_id=i, prompt_ids=[5, 6], sampling=Sampling(max_response_tokens=limit), seed=i)
        for i, limit in enumerate((2, 30))
    ]
    seen = []

    async def draw(request):
        async for sample in engine.generate([request]):
            seen.append((engine.num_tokens, len(sample.token_ids)))

    async def both():
        await asyncio.gather(*map(draw, requests))

    assert engine.num_tokens == 0
    asyncio.run(both())
    (first, short), (last, long) = seen
    assert short < first < last == short + long


def fake_worker(path, **config):
    context = WorkerContext(role="rollout", rank=0, world_size=1, device="cpu", host="here")
    engine = {"rollout": resolve("rollout", "fake").spec, "rollout_config": FakeConfig(**config)}
    return RolloutWorker(context, **engine, model=ModelConfig(path=path))


@pytest.fixture(scope="module")
def two_prompts(tmp_path_factory):
    """(path of a model, two prompts)."""
    rows = {"group_id": [0, 1], "seed": [0, 1], "engine": [0, 0]}
    return save_model("qwen3", tmp_path_factory.mktemp("model") / "model"), Batch.of(
        lengths=[2, 2], tokens={"input_ids": [4, 5, 4, 6]}, rows=rows
    )


def test_unfinished_responses_are_open(two_prompts):
    worker = fake_worker(two_prompts[0], fault="hang", fault_after=3)
    worker.request_groups(two_prompts[1], Sampling(max_response_tokens=4), 2)
    worker.finished_groups(1, HANG_S)

    assert worker.pause() == worker.num_open == 1, "the fourth response"
    worker.close()


class Silent:
    @property
    def num_tokens(self):
        raise InfrastructureError("no answer")


def test_a_count_that_fails_loses_no_finished_response(two_prompts, caplog):
    worker = fake_worker(two_prompts[0])
    worker._counter = Silent()
    worker.request_groups(two_prompts[1], Sampling(max_response_tokens=4), 2)

    samples, _ = worker.finished_groups(2, HANG_S)

    assert len(samples) == 4
    assert "number of tokens is not known: no answer" in caplog.text
    worker.close()


def test_nothing_is_open_after_a_draw_that_failed(two_prompts):
    worker = fake_worker(two_prompts[0], fault="raise", fault_after=3)

    with pytest.raises(InfrastructureError, match="fault=raise"):
        worker.generate(two_prompts[1], Sampling(max_response_tokens=4), 2)

    assert worker.pause() == worker.num_open == 0
    worker.close()


def test_every_token_keeps_the_version_that_drew_it():
    sampling = Sampling()
    requests = [Request(request_id=i, prompt_ids=[4, 5], sampling=sampling, seed=i) for i in range(2)]
    whole = {"log_probs": [-1.0] * 3, "finish_reason": "stop", "policy_version": 7}
    samples = [
        Sample(request_id=0, token_ids=[6, 7, 8], token_versions=[6, 6, 7], **whole),
        Sample(request_id=1, token_ids=[6, 7, 8], **whole),
    ]
    prompts = Batch.of(lengths=[2, 2], tokens={"input_ids": [4, 5, 4, 5]}, rows={"group_id": [0, 1], "seed": [0, 1]})

    batch = samples_batch(prompts, 1, requests, samples)

    assert batch["token_version"].tolist() == [-1, -1, 6, 6, 7, -1, -1, 7, 7, 7]
