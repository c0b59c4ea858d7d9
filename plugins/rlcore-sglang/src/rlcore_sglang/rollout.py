"""`rollout=sglang`: what the core calls. The engine is a process of ours (own.py) or a server (server.py)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from rlcore.errors import ConfigError, DeadlineExceeded
from rlcore.models.load import check_directory
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts.checks import ExpectedWeights, Limits, Readiness, read_limits
from rlcore.types import Mesh, Request, Sample
from rlcore_sglang.config import SGLangConfig, check_precision
from rlcore_sglang.install import check_installed
from rlcore_sglang.requests import Answer, Response, sampling_params
from rlcore_sglang.weights import send


class Engine(Protocol):
    """What `SGLangRollout` needs of an engine; both kinds have it."""

    num_ranks: int

    async def answer(self, prompt_ids: list[int], params: Mapping[str, Any]) -> Answer: ...

    def control(self, action: str, **fields: Any) -> None: ...

    def close(self) -> None: ...


class SGLangRollout:
    """One rank of one engine. The first rank of an engine has it; the others lend their devices."""

    Config = SGLangConfig

    def __init__(self, config: SGLangConfig, *, model: ModelConfig, context: RolloutContext) -> None:
        check_directory(model.path)
        self.mesh = _mesh(config, context)
        self._config, self._path, self._device = config, model.path, context.device
        self._expected = ExpectedWeights(model.path)
        self._limits = read_limits(model.path, config.max_model_len)
        self._engine = _engine(config, model, context, self._limits)
        self._num_loads = self._version = 0
        self._state = Readiness()
        self._num_in_flight = 0
        self._stale = False

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        """Yield samples as they finish. New weights may come meanwhile."""
        engine = self._ready()
        responses = [Response(request, self._limits.room(request)) for request in requests]
        asked = [(response, sampling_params(response, self._limits, self._config)) for response in responses]
        if engine is None:
            return
        if self._stale and not self._num_in_flight:
            engine.control("flush_cache")
            self._stale = False
        self._num_in_flight += len(asked)
        # A server gets as many at once as it takes: a connection each, and its time-out runs from when it is asked.
        room = asyncio.Semaphore(self._config.max_batch_size if self._config.url else max(1, len(asked)))
        tasks = {asyncio.create_task(self._respond(engine, room, response, params)) for response, params in asked}
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=self._config.timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise DeadlineExceeded(_late(self._config.timeout_s, len(pending)))
                for task in done:
                    sample = task.result()
                    self._ready()
                    yield sample
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._num_in_flight -= len(asked)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; until all are here the engine serves nothing."""
        with self._state.loading(version):
            self._num_loads += 1
            whole = self._expected.checked(weights, version)
            if self._engine is None:
                for _ in whole:  # gathering them may need every rank
                    pass
            else:
                self._send(self._engine, whole, version)
            self._version = version

    @staticmethod
    def takes_turns(config: SGLangConfig) -> bool:
        """An engine of its own can leave the device; a server has others."""
        return not config.url

    @staticmethod
    def engine_bytes(config: SGLangConfig, weights: int, cache: int, *, device: int) -> int:
        """An engine of its own takes its share of a GPU, whatever it needs; a server has other devices.

        Raises:
            SGLangMissing: there is no SGLang for an engine here.
        """
        if config.url:
            return 0
        if not config.python:
            check_installed(needs_kernels=device > 0)
        if config.kv_cache_gb:
            return weights + int(config.kv_cache_gb * 2**30) // config.tensor_parallel
        return int(device * config.gpu_memory_utilization) if device else weights + cache

    @staticmethod
    def check_model(config: SGLangConfig, *, model: ModelConfig, device: str) -> None:
        """Refuse a precision that SGLang cannot compute with; a server has been started with its own."""
        if not config.url:
            check_precision(config, model, device)

    def sleep(self) -> None:
        """Free the device. On a CPU there is nothing to free, and a server keeps its own."""
        if not self._state.is_asleep:
            self._occupation("release_memory_occupation")
        self._state.is_asleep = True

    def wake(self) -> None:
        """Be ready again, with the weights that the engine had."""
        if self._state.is_asleep:
            self._occupation("resume_memory_occupation")
        self._state.is_asleep = False

    def close(self) -> None:
        """End the engine; a server goes on."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self._state.is_closed = None, True

    async def _respond(
        self, engine: Engine, room: asyncio.Semaphore, response: Response, params: Mapping[str, Any]
    ) -> Sample:
        """One response; where new weights aborted it, its beginning goes back as prompt."""
        while True:
            async with room:
                num_loads = self._num_loads
                answer = await engine.answer(response.prompt_ids, params)
            response.add(answer)
            others = bool(self._config.router)  # another rank's weights came to the server that had it
            aborted = answer.finish_reason["type"] == "abort" and (others or num_loads != self._num_loads)
            if not aborted or response.is_full or self._state.broken:
                return response.sample(answer, self._version)
            params = sampling_params(response, self._limits, self._config)

    def _send(self, engine: Engine, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Keys and values of old weights are dropped now, or when the last who still use them have ended."""
        pause = self._config.pause if self._num_in_flight else "retract"
        self._stale = pause == "in_place"
        device = "cpu" if self._config.url else self._device
        send(engine, weights, version, config=self._config, device=device, path=self._path, pause=pause)

    def _occupation(self, action: str) -> None:
        self._state.check_open()
        if self._engine is not None and self._device != "cpu" and not self._config.url:
            self._engine.control(action)

    def _ready(self) -> Engine | None:
        self._state.check()
        return self._engine


def _engine(config: SGLangConfig, model: ModelConfig, context: RolloutContext, limits: Limits) -> Engine | None:
    """The engine on its first rank, None on the others. All ranks come here: devices are gathered."""
    if config.url:
        from rlcore_sglang.server import Server

        return Server(config, model=model, context=context, limits=limits)
    from rlcore_sglang.own import OwnEngine

    devices = _devices(config, context)
    if context.rank % config.tensor_parallel:
        return None
    return OwnEngine(config, model=model, context=context, limits=limits, devices=devices)


def _devices(config: SGLangConfig, context: RolloutContext) -> list[str]:
    """The GPUs of the ranks that share an engine, as CUDA names them; empty where nothing needs to be said."""
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
            "Type a  rollout.tensor_parallel  that divides  pools.rollout.devices_per_node"
        )
    return [device for _, device in places]


def _mesh(config: SGLangConfig, context: RolloutContext) -> Mesh:
    """Neighbouring ranks share an engine; the first of them returns its samples."""
    size, rank = config.tensor_parallel, context.rank
    if config.url:
        size = 1
    if context.world_size % size:
        fitting = [str(n) for n in range(1, context.world_size + 1) if context.world_size % n == 0]
        raise ConfigError(
            f"rollout.tensor_parallel={size} does not divide the {context.world_size} ranks of the rollout's pool\n"
            f"Type  rollout.tensor_parallel={fitting[-1]}   ({', '.join(fitting)} are possible)"
        )
    return Mesh(
        rank=rank,
        world_size=context.world_size,
        dp_rank=rank // size,
        dp_size=context.world_size // size,
        returns=rank % size == 0,
    )


def _late(timeout_s: float, number: int) -> str:
    return (
        f"SGLang finished none of {number} requests within {timeout_s:g} s\n"
        "Wait longer:  rollout.timeout_s=3600   or see the engine's log"
    )
