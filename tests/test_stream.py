"""Groups are drawn while other calls run, and each token has the version of the weights that sampled it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from itertools import pairwise

import pytest
import ray
import torch

from rlcore.controller.dispatch import dispatch
from rlcore.controller.group import spawn
from rlcore.controller.make import make_runtime
from rlcore.controller.pool import PoolConfig
from rlcore.controller.runtime import RuntimeConfig
from rlcore.controller.transfer import Collective, InProcess, ObjectStore
from rlcore.data.batch import Batch
from rlcore.errors import InfrastructureError
from rlcore.models.load import load_model
from rlcore.protocols.backend import ModelConfig
from rlcore.registry import resolve
from rlcore.rollouts.hf import HFConfig
from rlcore.testing.training import save_model
from rlcore.testing.waiting import HANG_S, wait_until
from rlcore.types import Sampling
from rlcore.workers.policy import PolicyWorker
from rlcore.workers.rollout import RolloutWorker
from rlcore.workers.stream import Stream
from tests.workers import Echo, model_group

FACTOR = 1.25
"""Version n of the weights is the model times FACTOR**n."""
SAMPLING = Sampling(max_response_tokens=40)


@pytest.fixture(params=[False, True], ids=["driven by calls", "in a thread"])
def stream(request):
    stream = Stream(in_thread=request.param)
    yield stream
    stream.close()


async def ticks(number, result=None, seen=None):
    for _ in range(number):
        await asyncio.sleep(0)
        if seen is not None:
            seen.append(result)
    return result


async def fails():
    raise ValueError("boom")


def test_finished_groups_are_returned_once_in_the_order_of_their_start(stream):
    for number in (3, 1, 2):
        stream.begin(ticks(number, number))

    assert stream.finished(3, HANG_S) == [3, 1, 2]
    assert stream.finished(3, HANG_S) == []


def test_a_group_is_returned_while_others_are_drawn(stream):
    released = threading.Event()

    async def held():
        while not released.is_set():
            await asyncio.sleep(0)

    stream.begin(held())
    stream.begin(ticks(3, "first"))

    assert stream.finished(1, HANG_S) == ["first"]
    released.set()
    assert stream.finished(1, HANG_S) == [None]


def test_without_a_thread_groups_are_drawn_only_while_a_call_waits():
    stream, seen = Stream(in_thread=False), []
    stream.begin(ticks(9, "a", seen))

    assert stream.finished(1, 0) == [] and not seen
    assert stream.run(ticks(1, "b")) == "b" and 0 < len(seen) < 9
    assert stream.finished(1, 1) == ["a"]
    stream.close()


def test_in_a_thread_groups_are_drawn_while_no_call_waits():
    stream, seen = Stream(in_thread=True), []
    stream.begin(ticks(2, "a", seen))

    wait_until(lambda: len(seen) == 2)
    stream.close()


def test_a_failed_group_cancels_the_others_and_the_stream_goes_on(stream):
    stream.begin(ticks(10**9))
    stream.begin(fails())

    with pytest.raises(ValueError, match="boom"):
        stream.finished(2, HANG_S)

    stream.begin(ticks(1, "again"))
    assert stream.finished(2, HANG_S) == ["again"]


def test_a_poll_ends_in_time_while_new_weights_are_loaded():
    stream, loading, loaded = Stream(in_thread=True), threading.Event(), threading.Event()

    def load():
        loading.set()
        assert loaded.wait(HANG_S)

    stream.begin(ticks(10**9))
    thread = threading.Thread(target=stream.pause, args=(load,))
    thread.start()
    assert loading.wait(HANG_S)

    assert stream.finished(1, 0.01) == []
    loaded.set()
    thread.join(HANG_S)
    assert stream.progress(0, 0).paused_s > 0
    stream.close()


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_pause_counts_until_it_ends_and_is_not_idle(in_thread):
    stream = Stream(in_thread=in_thread)
    stream.begin(ticks(1))
    stream.finished(1, HANG_S)

    stream.pause(lambda: None, until_resume=True)
    before = stream.progress(0, 0)
    stream.pause(lambda: None, until_resume=True)
    stream.pause(lambda: time.sleep(0.05))
    during = stream.progress(0, 0)
    stream.resume(lambda: None)
    after = stream.progress(0, 0)

    assert 0.05 < during.paused_s - before.paused_s < during.since_start_s - before.since_start_s + 0.01
    assert during.idle_s == before.idle_s
    assert after.paused_s >= during.paused_s
    assert after.idle_s + after.paused_s <= after.since_start_s
    wait_until(lambda: stream.progress(0, 0).idle_s > after.idle_s)
    assert stream.progress(0, 0).paused_s == after.paused_s
    stream.close()


def test_closing_ends_what_is_drawn_and_calls_that_wait(stream):
    errors, cancelled = [], threading.Event()

    async def drawn():
        try:
            await ticks(10**9)
        finally:
            cancelled.set()

    def wait():
        try:
            stream.run(drawn())
        except InfrastructureError as error:
            errors.append(str(error))

    stream.begin(ticks(10**9))
    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: stream._runner is not None and thread.is_alive())
    wait_until(lambda: len(asyncio.all_tasks(stream._runner.get_loop())) > 1)
    stream.abort()
    thread.join(HANG_S)
    stream.close()

    assert cancelled.is_set()
    assert errors == ["the rollout worker was closed while it generated\nStart the run again."]
    with pytest.raises(InfrastructureError, match="was closed"):
        stream.begin(ticks(1))


def test_idle_time_counts_from_the_first_group(stream):
    before = stream.progress(0, 0).idle_s
    stream.begin(ticks(1))
    stream.finished(1, HANG_S)

    first = stream.progress(0, 0).idle_s
    assert before == 0.0
    wait_until(lambda: stream.progress(0, 0).idle_s > first)
    stream.begin(ticks(10**9))
    busy = stream.progress(0, 0).idle_s
    assert stream.progress(0, 0).idle_s == busy


class Drifting(PolicyWorker):
    """Policy whose weights of each version are known without training."""

    fails = False

    @dispatch("all")
    def drift(self) -> None:
        with torch.no_grad():
            for _, tensor in super().weights():
                tensor.mul_(FACTOR)

    @dispatch("all")
    def fail(self, fails: bool) -> None:
        self.fails = fails

    def weights(self):
        named = list(super().weights())
        yield from named[:3] if self.fails else named
        if self.fails:
            raise ValueError("the source fails")


def start(name):
    if name == "ray" and not ray.is_initialized():
        ray.init(num_cpus=8, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level=logging.WARNING)
    runtime = make_runtime(RuntimeConfig(name=name, call_timeout_s=HANG_S))
    runtime.start({"a": PoolConfig(device="cpu"), "b": PoolConfig(devices_per_node=2, device="cpu")}, {})
    return runtime


@pytest.fixture(scope="module")
def runtimes():
    started = {}
    yield lambda name: started[name] if name in started else started.setdefault(name, start(name))
    for runtime in started.values():
        runtime.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model("qwen3", tmp_path_factory.mktemp("model") / "model")


def rollout_group(runtime, pool, model, **config):
    options = {
        "rollout": resolve("rollout", "hf").spec,
        "rollout_config": HFConfig(**config),
        "model": ModelConfig(path=model),
    }
    return spawn(RolloutWorker, runtime, role="rollout", pool=pool, options=options)


def prompts(*numbers, num_engines=1):
    ids = [3 + (7 * number + place) % 50 for number in numbers for place in range(3)]
    rows = {"group_id": list(numbers), "seed": [100 + number for number in numbers]}
    rows["engine"] = [number % num_engines for number in numbers]
    return Batch.of(lengths=[3] * len(numbers), tokens={"input_ids": ids}, rows=rows)


def gap_to_teacher(model, samples):
    """Return the largest difference to the log-probs of the weights that sampled each token."""
    scores = {}
    for version in range(4):
        scaled = load_model(model, attention="eager").requires_grad_(False)
        for parameter in scaled.parameters():
            parameter.mul_(FACTOR**version)
        scores[version] = scaled
    offsets, gap = samples.offsets().tolist(), 0.0
    for first, last in pairwise(offsets):
        ids = samples["input_ids"][first:last]
        for version in samples["token_version"][first:last].unique().tolist():
            if version >= 0:
                logits = scores[version](ids[None]).logits[0, :-1].float().log_softmax(-1)
                wanted = logits.gather(1, ids[1:, None]).squeeze(1)
                places = samples["token_version"][first + 1 : last] == version
                found = samples["rollout_log_probs"][first + 1 : last]
                gap = max(gap, float((found - wanted)[places].abs().max()))
    return gap


def all_groups(rollout, number):
    """Return the samples of this number of groups."""
    parts = []
    while number:
        samples, _ = rollout.finished_groups(number, HANG_S)
        parts.append(samples.local())
        number -= len(parts[-1]) // 2
    return Batch.cat(parts)


WAYS = [
    ("local", InProcess, "a"),
    ("local", ObjectStore, "b"),
    ("ray", InProcess, "a"),
    ("ray", ObjectStore, "b"),
    ("ray", Collective, "b"),
]


@pytest.fixture(params=WAYS, ids=lambda it: f"{it[0]}-{it[1].__name__}")
def parts(request, runtimes, model):
    """(actor, rollout, transfer, number of engines); an engine runs two sequences at once, so others wait."""
    name, way, pool = request.param
    runtime = runtimes(name)
    actor = model_group(Drifting, runtime, "a", model)
    rollout = rollout_group(runtime, pool, model, max_batch_size=2)
    return actor, rollout, way(source=actor, target=rollout), runtime.pool_size(pool)


def test_each_token_has_the_log_prob_of_the_weights_that_sampled_it(parts, model):
    actor, rollout, transfer, num_engines = parts
    rollout.request_groups(prompts(*range(24), num_engines=num_engines), SAMPLING, 2)
    first, progress = rollout.finished_groups(1, HANG_S)
    for version in (1, 2):
        actor.drift()
        transfer.send(version)
        rollout.request_groups(prompts(23 + version, num_engines=num_engines), SAMPLING, 2)
        evaluated = rollout.generate(prompts(30, 31, 32).drop("engine"), SAMPLING, 1).local()
        assert set(evaluated["token_version"].tolist()) == {-1, version}
    samples = Batch.cat([first.local(), all_groups(rollout, 26 - len(first) // 2)])

    assert len(progress) == num_engines and sum(it.num_tokens for it in progress) >= int(first["num_loss_tokens"].sum())
    assert sorted(samples["sample_id"].tolist()) == list(range(52))
    versions = [part.unique().tolist() for part in samples["token_version"].split(samples.lengths.tolist())]
    assert any(len(version) > 2 for version in versions), "no response was in flight while weights arrived"
    assert {it for version in versions for it in version} == {-1, 0, 1, 2}
    assert samples["first_version"].tolist() == [version[1] for version in versions]
    assert gap_to_teacher(model, samples) < 1e-4
    assert gap_to_teacher(model, evaluated) < 1e-4
    assert "engine" not in samples


def test_a_failed_update_ends_what_is_drawn_until_a_complete_one(parts, model):
    actor, rollout, transfer, num_engines = parts
    rollout.request_groups(prompts(*range(40), num_engines=num_engines), SAMPLING, 2)
    rollout.finished_groups(1, HANG_S)
    actor.fail(True)

    with pytest.raises(ValueError, match="the source fails"):
        transfer.send(1)
    with pytest.raises(InfrastructureError, match="incomplete weights"):
        all_groups(rollout, 10**6)

    actor.fail(False)
    transfer.send(1)
    while rollout.finished_groups(1, 0)[0] is not None:
        pass  # groups that had finished before the update
    rollout.request_groups(prompts(50), SAMPLING, 2)
    samples = all_groups(rollout, 1)
    assert set(samples["group_id"].tolist()) == {50}
    assert set(samples["token_version"].tolist()) == {-1, 1}


def test_local_streams_are_equal_in_every_run(model):
    found = []
    for _ in range(2):
        runtime = start("local")
        actor = model_group(Drifting, runtime, "a", model)
        rollout = rollout_group(runtime, "b", model, max_batch_size=4)
        rollout.request_groups(prompts(*range(8), num_engines=2), SAMPLING, 2)
        early = rollout.finished_groups(1, 1)[0].local()
        actor.drift()
        ObjectStore(source=actor, target=rollout).send(1)
        found.append(Batch.cat([early, all_groups(rollout, 8 - len(early) // 2)]))
        runtime.shutdown()

    assert set(found[0]["token_version"].tolist()) == {-1, 0, 1}
    for name in found[0].columns:
        assert (found[0][name] == found[1][name]).all(), name


def test_a_poll_and_a_transfer_run_at_the_same_time(runtimes, model):
    runtime = runtimes("ray")
    actor = model_group(Drifting, runtime, "a", model)
    rollout = rollout_group(runtime, "b", model, max_batch_size=2)
    rollout.request_groups(prompts(*range(16), num_engines=2), SAMPLING, 2)
    poll = rollout.finished_groups.submit(16, HANG_S)

    actor.drift()
    ObjectStore(source=actor, target=rollout).send(1)

    samples, _ = poll.result()
    assert len(samples) == 32
    assert 1 in samples.fetch("token_version").tolist(), "the transfer waited for the poll"


def test_shutdown_ends_hosts_that_generate(model):
    runtime = start("ray")
    rollout, echo = (
        rollout_group(runtime, "b", model, max_batch_size=2),
        spawn(Echo, runtime, role="echo", pool="b"),
    )
    pids = echo.pid()
    rollout.request_groups(prompts(*range(64), num_engines=2), SAMPLING, 8)
    rollout.generate.submit(prompts(*range(64)).drop("engine"), SAMPLING, 8)

    runtime.shutdown()

    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
