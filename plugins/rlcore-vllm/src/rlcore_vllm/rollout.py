"""`rollout=vllm`: the class that the core calls. The engine runs in this process (inprocess.py) or as a server (server.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from rlcore.kits.engine.checks import ExpectedWeights, Limits, Readiness
from rlcore.kits.engine.memory import taken_bytes
from rlcore.kits.engine.ranks import engine_mesh
from rlcore.models.load import check_directory
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.types import RESHAPING, Request, Sample
from rlcore_vllm.adapters import ExpectedAdapters
from rlcore_vllm.config import VLLMConfig
from rlcore_vllm.install import check_installed
from rlcore_vllm.requests import sampling_options


class VLLMEngine(Protocol):
    """Interface that `VLLMRollout` uses for both kinds of engine."""

    limits: Limits

    def generate(
        self, requests: Sequence[Request], options: Sequence[dict[str, Any]], state: Readiness
    ) -> AsyncIterator[Sample]:
        """Yield samples as they finish. `state` is checked before each step and each sample, and raises if the engine must
        not serve."""

    def num_tokens(self) -> int:
        """Return the number of tokens sampled so far; called from any thread."""

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def sleep(self, keep: bool) -> None:
        """Free the device; `keep` the requests in flight, which are paused."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


class VLLMRollout:
    """One rank of one engine."""

    Config = VLLMConfig
    reshapes = RESHAPING

    def __init__(self, config: VLLMConfig, *, model: ModelConfig, context: RolloutContext) -> None:
        check_directory(model.path)
        self.mesh = engine_mesh(config, context)
        self._expected = (
            ExpectedAdapters(model.path, config.lora_rank) if config.lora_rank else ExpectedWeights(model.path)
        )
        self._engine = _engine(config, model, context)
        if isinstance(self._expected, ExpectedAdapters):
            self._engine.load(self._expected.nothing(), 0)
        self._state = Readiness()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        """Yield samples as they finish. Weights may be loaded meanwhile."""
        engine = self._open()
        options = [sampling_options(request, engine.limits) for request in requests]
        samples: Any = engine.generate(requests, options, self._state)
        try:
            async for sample in samples:
                yield sample
        finally:
            await samples.aclose()

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, also of unfinished responses; on a server, for all of its clients."""
        return self._open().num_tokens()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; the engine serves nothing until the update is complete."""
        with self._state.loading(version):
            self._engine.load(self._expected.checked(weights, version), version)

    def pause(self) -> None:
        """Stop sampling until `resume`. Requests in flight wait; weights may be loaded, and the engine may sleep. Idempotent."""
        self._state.pause()
        self._engine.pause()

    def resume(self) -> None:
        """Continue after `pause`. Idempotent."""
        self._open().resume()
        self._state.resume()

    @staticmethod
    def frees_device(config: VLLMConfig) -> bool:
        """Return True for an in-process engine, which can free its device; a server uses other devices."""
        return not config.url

    @staticmethod
    def in_flight_updates(config: VLLMConfig) -> bool:
        """Return False for an engine with several ranks, whose requests and updates would have to be in lockstep."""
        return bool(config.url) or config.tensor_parallel == 1

    @staticmethod
    def engine_bytes(config: VLLMConfig, weights: int, cache: int, *, device: int) -> int:
        """Return the memory that the engine takes on one device.

        Raises:
            EngineMissing: vLLM is not installed here, and the engine needs it.
        """
        if not config.url:
            check_installed()
        return taken_bytes(config, weights, cache, device=device)

    def sleep(self) -> None:
        """Free the device's memory."""
        if not self._state.is_asleep:
            self._open().sleep(self._state.is_paused)
        self._state.is_asleep = True

    def wake(self) -> None:
        """Restore the engine with the weights it had before `sleep`."""
        if self._state.is_asleep:
            self._open().wake()
        self._state.is_asleep = False

    def close(self) -> None:
        """Shut the engine down."""
        if not self._state.is_closed:
            self._engine.close()
        self._state.is_closed = True

    def _open(self) -> VLLMEngine:
        self._state.check_open()
        return self._engine


def _engine(config: VLLMConfig, model: ModelConfig, context: RolloutContext) -> VLLMEngine:
    if config.url:
        from rlcore_vllm.server import VLLMServerClient

        return VLLMServerClient(config, model=model, context=context)
    from rlcore_vllm.inprocess import InProcessEngine

    return InProcessEngine(config, model=model, context=context)
