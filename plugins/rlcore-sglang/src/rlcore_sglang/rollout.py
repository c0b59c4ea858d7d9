"""`rollout=sglang`: the class that the core calls. The engine runs in its own process (own.py) or as a server (server.py)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from rlcore.errors import ConfigError, DeadlineExceeded
from rlcore.kits.engine.checks import ExpectedWeights, Limits, Readiness, read_limits
from rlcore.kits.engine.memory import taken_bytes
from rlcore.kits.engine.ranks import engine_mesh
from rlcore.models.load import check_directory
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.types import Request, Sample
from rlcore_sglang.config import SGLangConfig, check_precision
from rlcore_sglang.install import check_installed
from rlcore_sglang.requests import Answer, Response, sampling_params
from rlcore_sglang.weights import Control, send


class SGLangEngine(Control, Protocol):
    """Interface that `SGLangRollout` uses for both kinds of engine."""

    async def answer(self, prompt_ids: list[int], params: Mapping[str, Any]) -> Answer: ...

    def num_tokens(self) -> int:
        """Return the number of tokens sampled so far; called from any thread."""

    def close(self) -> None: ...


class SGLangRollout:
    """One rank of one engine. The first rank starts the engine; the others only provide their devices."""

    Config = SGLangConfig

    def __init__(self, config: SGLangConfig, *, model: ModelConfig, context: RolloutContext) -> None:
        check_directory(model.path)
        self.mesh = engine_mesh(config, context)
        self._config, self._path, self._device = config, model.path, context.device
        self._expected = ExpectedWeights(model.path)
        self._limits = read_limits(model.path, config.max_model_len)
        self._engine = _engine(config, model, context, self._limits)
        self._num_loads = self._version = self._num_pauses = 0
        self._state = Readiness()
        self._num_in_flight = 0
        self._stale = False

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        """Yield samples as they finish. Weights may be loaded meanwhile."""
        await self._state.resumed()
        engine = self._ready()
        responses = [Response(request, self._limits.room(request)) for request in requests]
        asked = [(response, sampling_params(response, self._limits, self._config)) for response in responses]
        if engine is None:
            return
        if self._stale and not self._num_in_flight:
            engine.control("flush_cache")
            self._stale = False
        self._num_in_flight += len(asked)
        # A server gets at most max_batch_size requests at once: each has a connection, whose timeout starts when it is sent.
        room = asyncio.Semaphore(self._config.max_batch_size if self._config.url else max(1, len(asked)))
        tasks = {asyncio.create_task(self._respond(engine, room, response, params)) for response, params in asked}
        pending = set(tasks)
        try:
            while pending:
                num_pauses = self._num_pauses
                done, pending = await asyncio.wait(
                    pending, timeout=self._config.timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and num_pauses == self._num_pauses and not self._state.is_paused:
                    raise DeadlineExceeded(_late(self._config.timeout_s, len(pending)))
                for task in done:
                    sample = task.result()
                    await self._state.resumed()
                    self._ready()
                    yield sample
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._num_in_flight -= len(asked)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, also of unfinished responses; on a server, for all of its clients."""
        engine = self._engine
        return 0 if engine is None else engine.num_tokens()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; the engine serves nothing until the update is complete."""
        with self._state.loading(version):
            self._num_loads += 1
            whole = self._expected.checked(weights, version)
            if self._engine is None:
                for _ in whole:  # gathering the weights may need every rank
                    pass
            else:
                self._send(self._engine, whole, version)
            self._version = version

    @staticmethod
    def frees_device(config: SGLangConfig) -> bool:
        """Return True for an engine started by this rollout, which can free its device; a server uses other devices."""
        return not config.url

    @staticmethod
    def in_flight_updates(config: SGLangConfig) -> bool:
        """Return False for an engine with several ranks, whose requests and updates would have to be in lockstep."""
        return bool(config.url) or config.tensor_parallel == 1

    @staticmethod
    def engine_bytes(config: SGLangConfig, weights: int, cache: int, *, device: int) -> int:
        """Return the memory that the engine takes on one device.

        Raises:
            EngineMissing: SGLang is not installed here, and the engine needs it.
        """
        if not (config.url or config.python):
            check_installed(needs_kernels=device > 0)
        return taken_bytes(config, weights, cache, device=device, num_sharing=config.tensor_parallel)

    @staticmethod
    def check_model(config: SGLangConfig, *, model: ModelConfig, device: str) -> None:
        """Refuse a precision that SGLang does not support; a server's precision is set when it starts."""
        if not config.url:
            check_precision(config, model, device)

    def pause(self) -> None:
        """Stop sampling until `resume`. Requests in flight wait without a KV cache. Idempotent."""
        if not self._state.is_paused and self._engine is not None:
            self._engine.control("pause_generation", mode="retract")
        self._num_pauses += 1
        self._state.pause()

    def resume(self) -> None:
        """Continue after `pause`. Idempotent."""
        if self._state.is_paused and self._engine is not None:
            self._engine.control("continue_generation")
        self._state.resume()

    def sleep(self) -> None:
        """Free the device's memory. On a CPU there is nothing to free, and a server keeps its devices."""
        if not self._state.is_asleep:
            self._occupation("release_memory_occupation")
        self._state.is_asleep = True

    def wake(self) -> None:
        """Restore the engine with the weights it had before `sleep`."""
        if self._state.is_asleep:
            self._occupation("resume_memory_occupation")
        self._state.is_asleep = False

    def close(self) -> None:
        """Shut the engine down; a server keeps running."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self._state.is_closed = None, True

    async def _respond(
        self, engine: SGLangEngine, room: asyncio.Semaphore, response: Response, params: Mapping[str, Any]
    ) -> Sample:
        """Generate one response; if new weights abort it, continue with the tokens so far as part of the prompt."""
        while True:
            async with room:
                num_loads = self._num_loads
                answer = await engine.answer(response.prompt_ids, params)
            response.add(answer)
            others = bool(self._config.router)  # the request may be on a server that another rank updates
            aborted = answer.finish_reason["type"] == "abort" and (others or num_loads != self._num_loads)
            if not aborted or response.is_full or self._state.broken:
                return response.sample(answer, self._version)
            params = sampling_params(response, self._limits, self._config)

    def _send(self, engine: SGLangEngine, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Send the weights. The KV cache of old weights is dropped now, or when the last request that uses it is done."""
        paused = self._state.is_paused
        pause = self._config.pause if self._num_in_flight and not paused else "retract"
        self._stale = pause == "in_place"
        device = "cpu" if self._config.url else self._device
        send(
            engine,
            weights,
            version,
            config=self._config,
            device=device,
            path=self._path,
            pause=pause,
            resume=not paused,
        )

    def _occupation(self, action: str) -> None:
        self._state.check_open()
        if self._engine is not None and self._device != "cpu" and not self._config.url:
            self._engine.control(action)

    def _ready(self) -> SGLangEngine | None:
        self._state.check()
        return self._engine


def _engine(config: SGLangConfig, model: ModelConfig, context: RolloutContext, limits: Limits) -> SGLangEngine | None:
    """Start the engine on its first rank; return None on the others. All ranks must call this, as it gathers devices."""
    if config.url:
        from rlcore_sglang.server import SGLangServerClient

        return SGLangServerClient(config, model=model, context=context, limits=limits)
    from rlcore_sglang.own import EngineProcess

    devices = _devices(config, context)
    if context.rank % config.tensor_parallel:
        return None
    return EngineProcess(config, model=model, context=context, limits=limits, devices=devices)


def _devices(config: SGLangConfig, context: RolloutContext) -> list[str]:
    """Return the CUDA device ids of the ranks that share an engine; empty if they need not be set."""
    size = config.tensor_parallel
    if size == 1 or context.device == "cpu":
        return []
    import torch.distributed as dist

    own = (socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES", context.device.partition(":")[2] or "0"))
    places: list[Any] = [None] * context.world_size
    dist.all_gather_object(places, own)
    first = context.rank - context.rank % size
    places = places[first : first + size]
    if len({host for host, _ in places}) > 1:
        raise ConfigError(
            f"rollout.tensor_parallel={size}: its ranks are on several nodes: {', '.join(host for host, _ in places)}\n"
            "Set  rollout.tensor_parallel  to a divisor of  pools.rollout.devices_per_node"
        )
    return [device for _, device in places]


def _late(timeout_s: float, number: int) -> str:
    return (
        f"SGLang finished none of {number} requests within {timeout_s:g} s\n"
        "Wait longer:  rollout.timeout_s=3600   or see the engine's log"
    )
