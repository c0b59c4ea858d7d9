"""GPU-specific behavior, tested without a GPU: vLLM's sleep allocator with simulated memory, and vLLM's defaults for a
GPU."""

import asyncio
from types import SimpleNamespace

import pytest
from conftest import collect, make_vllm, requests_of, run, tokens

from rlcore.errors import ModelError
from rlcore.testing.rollout import weights
from rlcore.testing.waiting import HANG_S


@pytest.fixture(scope="module")
def on_cpu(small_model):
    """An engine on the CPU. Its creation imports vLLM, so other vLLM imports are inside functions."""
    engine = make_vllm(small_model)
    yield engine
    engine.close()


@pytest.fixture
def mapped(on_cpu, monkeypatch):
    """Tags of the allocations that have device memory: one for the weights, one for the KV cache."""
    from vllm.device_allocator import AllocationData, cumem
    from vllm.v1.worker.cpu_worker import CPUWorker

    tags, names = {"weights", "kv_cache"}, {1: "weights", 2: "kv_cache"}
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: tags.add(names[handle[2]]))
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: tags.remove(names[handle[2]]))
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=lambda *arguments: None))
    monkeypatch.setattr(cumem, "PIN_MEMORY", False)
    allocator = cumem.CuMemAllocator()
    allocator.pointer_to_data = {pointer: AllocationData((0, 64, pointer, 0), tag) for pointer, tag in names.items()}
    monkeypatch.setattr(CPUWorker, "sleep", lambda self, level: allocator.sleep(offload_tags="weights"))
    monkeypatch.setattr(CPUWorker, "wake_up", lambda self, tags: allocator.wake_up(tags))
    return tags


@pytest.fixture
def engine(on_cpu, mapped, monkeypatch):
    monkeypatch.setattr(on_cpu._engine, "_is_cpu", False)
    return on_cpu


def test_new_weights_are_loaded_before_the_cache_takes_its_memory(engine, small_model, mapped):
    asked, seen = requests_of([[3, 4], [5]]), []
    wanted = tokens(run(engine, asked))

    def watched():
        for pair in weights(small_model):
            seen.append(set(mapped))
            yield pair

    engine.sleep()
    assert mapped == set()
    engine.wake()
    engine.load_weights(watched(), 1)
    assert seen[0] == seen[-1] == {"weights"}
    assert tokens(run(engine, asked)) == wanted
    assert mapped == {"weights", "kv_cache"}


def test_an_engine_that_generated_nothing_after_waking_sleeps_and_wakes_again(engine, mapped):
    asked = requests_of([[3, 4], [5]])
    wanted = tokens(run(engine, asked))

    for _ in range(2):
        engine.sleep()
        assert mapped == set()
        engine.wake()
        assert mapped == {"weights"}

    assert tokens(run(engine, asked)) == wanted


@pytest.mark.parametrize("loads", [False, True])
def test_responses_that_are_set_aside_continue_after_sleeping(engine, small_model, mapped, loads):
    asked = requests_of([[3, 4], [5], [6], [7]], max_response_tokens=60, temperature=2.0)
    wanted = tokens(run(engine, asked))

    async def set_aside():
        task = asyncio.create_task(collect(engine, asked))
        for _ in range(6):
            await asyncio.sleep(0)
        for action in (engine.pause, engine.sleep):
            action()
        await asyncio.sleep(0.1)
        assert mapped == set()
        engine.wake()
        if loads:
            engine.load_weights(iter(weights(small_model)), 7)
        await asyncio.sleep(0.1)
        assert mapped == {"weights"}
        assert not task.done(), "the responses ended before the pause"
        engine.resume()
        return await asyncio.wait_for(task, HANG_S)

    samples = asyncio.run(set_aside())

    assert tokens(samples) == wanted
    assert any(0 < list(sample.token_versions).count(7) < 60 for sample in samples.values()) == loads


def test_prefill_batches_on_a_gpu_are_as_large_as_in_vllm_llm(on_cpu, small_model, monkeypatch):
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms.cpu import CpuPlatform
    from vllm.usage.usage_lib import UsageContext

    contexts = []

    def refused(arguments, usage_context=UsageContext.ENGINE_CONTEXT):
        contexts.append(usage_context)
        raise ValueError("seen enough")

    monkeypatch.setattr(LLMEngine, "from_engine_args", refused)
    with pytest.raises(ModelError, match="seen enough"):
        make_vllm(small_model)

    monkeypatch.setattr(CpuPlatform, "is_cpu", lambda self: False)
    monkeypatch.setattr(CpuPlatform, "get_device_total_memory", lambda *arguments: 80 * 2**30)
    monkeypatch.setattr(CpuPlatform, "get_device_name", lambda *arguments: "NVIDIA H100")
    num_tokens, _ = EngineArgs.get_batch_defaults(world_size=1)
    assert [num_tokens.get(context, 2048) for context in contexts] == [16384]
