"""In-process engine: vLLM's `LLMEngine`, driven step by step.

A step samples one token for every sequence in flight. Each active call of `generate` runs steps, and every finished
sequence goes to the call that requested it. Calls may therefore overlap, and weights are loaded between two steps.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import ConfigError, InfrastructureError, ModelError
from rlcore.kits.engine.checks import Limits, Readiness, end_ids, read_limits
from rlcore.kits.engine.memory import bytes_per_token, cache_bytes, start_advice
from rlcore.models.load import read_config
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.types import Request, Sample
from rlcore_vllm import adapters, host
from rlcore_vllm.config import VLLMConfig
from rlcore_vllm.install import check_installed
from rlcore_vllm.requests import check_dropped, check_taken, sample

_CPU_BLOCK_TOKENS = 32
"""Block size of the KV cache: the smallest that vLLM's CPU attention supports. Prefixes are reused in whole blocks."""
_SPARE_TOKENS = 256
"""Room in a CPU's KV cache in addition to each sequence: for rounding up, and for a block that vLLM reserves."""
_CPU_STEP_TOKENS = 4096
"""Minimum number of tokens that one step can prefill."""
_live_engines = 0
"""Number of engines in this process; the last one to close destroys vLLM's process groups."""


class InProcessEngine:
    """One rank of an engine."""

    def __init__(self, config: VLLMConfig, *, model: ModelConfig, context: RolloutContext) -> None:
        global _live_engines
        check_installed()
        _check_heads(config, model.path)
        self._is_cpu = context.device == "cpu"
        host.set_environment(context.device)
        self._engine: Any = None
        self._had_group = torch.distributed.is_initialized() and not _live_engines
        with host.kept_as_it_was(), host.launched(context):
            self._engine, facts = _make_engine(config, model, context)
        _live_engines += 1
        self._adapter: Any = adapters.asked_with() if config.lora_rank else None
        self._engine.set_weight_version("0")
        self.limits = Limits(
            vocab_size=facts["vocab_size"], context_length=facts["max_model_len"], end_ids=end_ids(model.path)
        )
        self._num_requests = 0
        self._in_place, self._stale = config.pause == "in_place", False
        self._outboxes: dict[str, list[Any]] = {}
        """Name of a request in flight -> list that receives its output."""

    async def generate(
        self, requests: Sequence[Request], options: Sequence[dict[str, Any]], state: Readiness
    ) -> AsyncIterator[Sample]:
        """Yield samples as they finish; closing the iterator aborts the rest."""
        await state.resumed()
        state.check()
        if self._stale and not self._outboxes:
            self._drop_cache()
        outbox: list[Any] = []
        asked: dict[str, Request] = {}
        try:
            for request, chosen in zip(requests, options):
                asked[self._add(request, chosen, outbox)] = request
            while asked:
                await state.resumed()
                state.check()
                if not outbox:
                    self._sample_tokens()
                while outbox:
                    await state.resumed()
                    state.check()  # the consumer of the samples may have loaded weights meanwhile
                    output = outbox.pop()
                    if output is None:
                        raise _slept(next(iter(asked.values())))
                    yield self._sample(asked.pop(output.request_id), output.outputs[0])
                await asyncio.sleep(0)  # allow cancellation, other tasks and weight updates
        finally:
            self._abort(list(asked))

    def num_tokens(self) -> int:
        num_tokens: int = self._engine.collective_rpc("rlcore_num_tokens")[0]  # reads a counter, so any thread may
        return num_tokens

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights. Sequences in flight are prefilled again under them, or continue in place."""
        self._finish_batches()
        if self._adapter:
            self._load_adapter(weights)
        else:
            self._load_model(weights)
        self._stale = self._in_place and bool(self._outboxes)
        if not self._stale:
            self._drop_cache()
        self._engine.set_weight_version(str(version))

    def pause(self) -> None:
        """Finish the batches that are launched. Calls of `generate` launch no others while they wait."""
        self._finish_batches()

    def resume(self) -> None: ...

    def sleep(self, keep: bool) -> None:
        """Move the weights to host memory and drop the KV cache. On a CPU there is nothing to free.

        Requests that are kept are prefilled again, including their responses. Without `keep`, vLLM aborts requests in flight
        without an output, so their calls receive None instead."""
        for outbox in self._outboxes.values() if not keep else ():
            outbox.append(None)
        if not self._is_cpu:
            self._engine.sleep(1, mode="keep" if keep else "abort")

    def wake(self) -> None:
        """Restore the weights. `generate` restores the KV cache, so that an update can use its memory before."""
        if not self._is_cpu:
            self._engine.wake_up(["weights"])

    def close(self) -> None:
        global _live_engines
        if self._engine is None:
            return
        # Not the engine's own shutdown, which destroys all process groups of this process, including the trainer's.
        self._engine.engine_core._finalizer.detach()
        self._engine.model_executor.shutdown()
        self._engine = None
        _live_engines -= 1
        if not _live_engines:
            _end_groups(self._had_group)
        if not self._is_cpu:
            gc.collect()
            torch.cuda.empty_cache()

    def _finish_batches(self) -> None:
        """Process the batches that vLLM has launched ahead, as it does on a GPU.

        Their tokens are already sampled: they belong to the current weights, and the random generators have advanced.
        """
        self._engine.sleep(0, mode="keep")  # stop scheduling
        for _ in range(self._engine.vllm_config.max_concurrent_batches):
            self._step()
        self._engine.wake_up(["scheduling"])

    def _drop_cache(self) -> None:
        """Drop the KV cache of old weights; sequences that use it are prefilled again."""
        check_dropped(self._engine.reset_prefix_cache(reset_running_requests=True))
        self._stale = False

    def _load_model(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        call = self._engine.collective_rpc
        call("start_weight_update")
        call("update_weights", kwargs={"update_info": {"weights": weights}})
        missing = call("rlcore_missing")
        call("finish_weight_update")
        check_taken(missing)

    def _load_adapter(self, factors: Iterator[tuple[str, Tensor]]) -> None:
        with adapters.written(factors) as directory:
            try:
                self._engine.add_lora(adapters.asked_with(directory, replace=True))
            except (ValueError, RuntimeError, AssertionError) as error:
                raise ModelError(
                    f"vLLM cannot add these adapters to the model: {_first_line(error)}\n"
                    "Send full models:  rollout.lora_rank=0 backend.lora_sync=merged"
                ) from error

    def _add(self, request: Request, chosen: dict[str, Any], outbox: list[Any]) -> str:
        """Add a request to the engine and return its name there."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        if grammar := chosen.get("structured_outputs"):
            chosen = {**chosen, "structured_outputs": StructuredOutputsParams(**grammar)}
        self._num_requests += 1
        name = str(self._num_requests)
        parameters = SamplingParams(**chosen, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        self._engine.add_request(name, prompt, parameters, lora_request=self._adapter)
        self._outboxes[name] = outbox
        return name

    def _sample_tokens(self) -> None:
        """Run a step, after restoring the KV cache: `wake` restored only the weights."""
        if self._engine.is_sleeping():
            self._engine.wake_up(["kv_cache"])
        self._step()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except (RuntimeError, ValueError, AssertionError) as error:
            raise InfrastructureError(
                f"the vLLM engine failed while generating: {_first_line(error)}\n"
                "Start the run again; if it ran out of memory, type  rollout.max_batch_size=64"
            ) from error
        for output in outputs:
            outbox = self._outboxes.pop(output.request_id, None)
            if outbox is not None:
                outbox.append(output)

    def _sample(self, request: Request, output: Any) -> Sample:
        spans = [(span.version, span.start, span.end) for span in output.weight_versions]
        version = int(self._engine.get_weight_version())
        return sample(request, list(output.token_ids), output.logprobs.logprobs, output.finish_reason, spans, version)

    def _abort(self, names: list[str]) -> None:
        for name in names:
            self._outboxes.pop(name, None)
        if names and self._engine is not None:
            self._engine.abort_request(names)


def _slept(request: Request) -> InfrastructureError:
    return InfrastructureError(
        f"the vLLM engine was put to sleep in the middle of request {request.request_id}\n"
        "Generate it again, and finish responses before calling sleep()."
    )


def _make_engine(config: VLLMConfig, model: ModelConfig, context: RolloutContext) -> tuple[Any, dict[str, Any]]:
    """Return the engine and the result of `rlcore_prepare`. Samples one token, so that missing kernels fail here."""
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.usage.usage_lib import UsageContext

    try:
        arguments = EngineArgs(**engine_options(config, model, context))
        # As in vllm.LLM: an engine without a usage context prefills only 2,048 tokens per step, on any GPU.
        engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        facts = engine.collective_rpc("rlcore_prepare")[0]
        engine.add_request(
            "0", {"prompt_token_ids": [0]}, SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
        )
        while engine.has_unfinished_requests():
            engine.step()
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AssertionError, OSError) as error:
        raise ModelError(
            f"vLLM cannot serve model.path={model.path}: {_first_line(error)}\n{start_advice(str(error), config)}"
        ) from error
    return engine, facts


def _check_heads(config: VLLMConfig, path: str) -> None:
    size, heads = config.tensor_parallel, read_config(Path(path)).get_text_config().num_attention_heads
    if heads % size:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"rollout.tensor_parallel={size} does not divide the {heads} attention heads of model.path={path}\n"
            f"Type  rollout.tensor_parallel=1   ({fitting} are possible)"
        )


def engine_options(config: VLLMConfig, model: ModelConfig, context: RolloutContext) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`."""
    is_cpu = context.device == "cpu"
    options: dict[str, Any] = {
        "model": model.path,
        "dtype": model.precision,
        "seed": 0,
        "max_num_seqs": config.max_batch_size,
        "max_model_len": config.max_model_len or None,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.enforce_eager or is_cpu,
        "enable_sleep_mode": not is_cpu,
        "generation_config": "vllm",  # no sampling defaults from the model directory
        "logprobs_mode": "raw_logits",  # worker.py turns them into log-probs
        "worker_extension_cls": "rlcore_vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": "rlcore"},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "tensor_parallel_size": config.tensor_parallel,
        "gpu_memory_utilization": config.gpu_memory_utilization,
    }
    if config.lora_rank:
        if not is_cpu and model.precision == "float32":
            raise ConfigError(
                "rollout.lora_rank: on a GPU vLLM supports adapters only in 16-bit precision\n"
                "Type  model.precision=bfloat16  or  rollout.lora_rank=0 backend.lora_sync=merged"
            )
        options |= adapters.engine_options(config.lora_rank)
    if context.world_size > 1:
        options |= {"distributed_executor_backend": "external_launcher", "disable_custom_all_reduce": True}
    if is_cpu:
        context_length = read_limits(model.path, config.max_model_len).context_length
        options |= {
            "block_size": _CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": _cache_bytes(config, model, context_length),
        }
        # vLLM 0.32 cannot rewind the seed of a partially prefilled request, because CPU generators have no offset.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(_CPU_STEP_TOKENS, context_length)}
    elif config.kv_cache_gb:
        options["kv_cache_memory_bytes"] = int(config.kv_cache_gb * 2**30)
    return options | dict(config.engine_options)


def _cache_bytes(config: VLLMConfig, model: ModelConfig, context_length: int) -> int:
    """Return the size of the KV cache of a rank on a CPU."""
    import psutil  # a dependency of vLLM, which planning a run does not need

    return cache_bytes(
        config,
        free=psutil.virtual_memory().available,
        context_length=context_length,
        spare_tokens=_SPARE_TOKENS,
        token_bytes=max(1, bytes_per_token(model) // config.tensor_parallel),
    )


def _end_groups(keep_default: bool) -> None:
    """Destroy vLLM's process groups, and the default group if vLLM created it."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    if not keep_default:
        destroy_distributed_environment()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
