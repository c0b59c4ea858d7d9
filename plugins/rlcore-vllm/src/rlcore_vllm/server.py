"""Client of a running vLLM server, started by `python -m rlcore_vllm.serve`. Requests go over HTTP, weights through files
or by broadcast.

The server has its own devices, so `sleep` and `wake` do nothing. It is paused during a weight update and stays paused if
the update fails: it serves nothing until a complete update has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from rlcore.controller.weights import Broadcast, meeting_point
from rlcore.errors import ConfigError, InfrastructureError
from rlcore.kits.engine.buckets import buckets, naming_directory
from rlcore.kits.engine.checks import Limits, Readiness, end_ids
from rlcore.kits.engine.ranks import server_client, server_url
from rlcore.kits.http import BadAnswer
from rlcore.models.load import load_model
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.types import Request, Sample
from rlcore_vllm.config import VLLMConfig
from rlcore_vllm.requests import check_dropped, check_taken, model_facts, sample

_MB = 2**20
_UNTOUCHED = "default"
"""vLLM's version name of the weights that it started with."""


class VLLMServerClient:
    """Client of one server."""

    def __init__(self, config: VLLMConfig, *, model: ModelConfig, context: RolloutContext) -> None:
        self._config = config
        self._url = server_url(config, context)
        self._server = server_client(config, self._url)
        self._paused, self._version = False, 0
        self._num_in_flight, self._stale = 0, False
        self._device = context.device
        self._group: Broadcast | None = None
        """Process group with the server's ranks, created by the first update and again after a failed one."""
        facts = self._facts(model)
        self.limits = Limits(
            vocab_size=facts["vocab_size"],
            context_length=min(facts["max_model_len"], config.max_model_len or facts["max_model_len"]),
            end_ids=end_ids(model.path),
        )
        is_ours = Path(facts["path"]).resolve() == Path(model.path).resolve()
        if is_ours and self._get("/weight_info")["weight_version"] == _UNTOUCHED:
            self._post("/update_weight_version", {"new_version": "0"})
        else:  # another model directory, or weights of an earlier run
            self.load(iter(load_model(model.path).named_parameters()), 0)

    async def generate(
        self, requests: Sequence[Request], options: Sequence[dict[str, Any]], state: Readiness
    ) -> AsyncIterator[Sample]:
        """Yield samples as they finish; closing the iterator aborts the rest."""
        state.check()
        if self._stale and not self._num_in_flight:
            check_dropped(self._post("/reset_prefix_cache?reset_running_requests=true")["success"])
            self._stale = False
        self._num_in_flight += len(requests)
        room = asyncio.Semaphore(self._config.max_batch_size)
        tasks = [asyncio.create_task(self._one(room, *pair)) for pair in zip(requests, options)]
        try:
            for task in asyncio.as_completed(tasks):
                finished = await task
                state.check()
                yield finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._num_in_flight -= len(requests)

    def num_tokens(self) -> int:
        return int(self._call("rlcore_num_tokens")[0])

    def load(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Write the weights to files, bucket by bucket, and send the server their paths; or broadcast the weights."""
        self._stale = self._config.pause == "in_place" and self._num_in_flight > 0
        self._post(f"/pause?mode=keep&clear_cache={'false' if self._stale else 'true'}")
        self._begin()
        try:
            if self._config.weights == "broadcast":
                self._send(weights)
            else:
                for number, bucket in enumerate(buckets(weights, self._config.bucket_mb * _MB)):
                    self._hand_over(bucket, number)
            check_taken(self._call("rlcore_missing"))
        except BaseException:
            self._group = None
            with contextlib.suppress(InfrastructureError):  # keep the first error
                self._post("/abort_requests", {})  # so that waiting requests are answered
            with contextlib.suppress(InfrastructureError):
                self._post("/finish_weight_update", {})  # still paused
            raise
        self._post("/finish_weight_update", {"weight_version": str(version)})
        self._version = version
        if not self._paused:
            self._post("/resume")

    def pause(self) -> None:
        """Make requests in flight wait on the server."""
        self._post("/pause?mode=keep&clear_cache=false")
        self._paused = True

    def resume(self) -> None:
        self._post("/resume")
        self._paused = False

    def sleep(self, keep: bool) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        """Do nothing; the server keeps running until its owner stops it."""

    async def _one(self, room: asyncio.Semaphore, request: Request, options: dict[str, Any]) -> Sample:
        body = {"token_ids": list(request.prompt_ids), "sampling_params": options}
        async with room:
            answer = await self._server.acall("/inference/v1/generate", body)
        choice = answer["choices"][0]
        log_probs = [position["logprob"] for position in (choice["logprobs"] or {}).get("content") or ()]
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()]
        return sample(request, choice["token_ids"], log_probs, choice["finish_reason"], spans, self._version)

    def _begin(self) -> None:
        try:
            self._post("/start_weight_update")
        except BadAnswer:  # a killed run left an update unfinished
            self._post("/finish_weight_update", {})
            self._post("/start_weight_update")

    def _hand_over(self, bucket: dict[str, Tensor], number: int) -> None:
        """Send one bucket. Each bucket has its own file, because vLLM reads from it until all of its layers are complete."""
        from safetensors.torch import save_file

        where = self._config.weights_directory
        with naming_directory(where), tempfile.TemporaryDirectory(prefix="rlcore-", dir=where) as directory:
            path = Path(directory) / f"{number}.safetensors"
            save_file(bucket, path)
            self._post("/update_weights", {"update_info": {"path": str(path)}})

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._group = self._group or self._join()
        with self._meanwhile("/update_weights", {"update_info": {"broadcast": True}}):
            self._group.send(weights, self._config.bucket_mb * _MB)

    def _join(self) -> Broadcast:
        """Create the process group with the server's ranks, at the address from which this host reaches the server."""
        server, timeout_s = urlsplit(self._url), self._config.timeout_s
        port = server.port or (443 if server.scheme == "https" else 80)
        with socket.create_connection((server.hostname or "", port), timeout_s) as connection:
            address = connection.getsockname()[0]
        store = meeting_point(address)
        store.set_timeout(timedelta(seconds=timeout_s))
        size = 1 + int(self._get("/get_world_size")["world_size"])
        place = {"address": address, "port": store.port, "world_size": size, "timeout_s": timeout_s}
        with self._meanwhile("/init_weight_transfer_engine", {"init_info": place}):
            return Broadcast(store, rank=0, world_size=size, device=self._device, timeout_s=timeout_s)

    @contextlib.contextmanager
    def _meanwhile(self, path: str, body: Any) -> Iterator[None]:
        """Call the server in a thread while the body runs here."""
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(self._post, path, body)
            try:
                yield
            except RuntimeError:  # the group failed; the server's error may give the cause
                asked.result()
                raise
            asked.result()

    def _facts(self, model: ModelConfig) -> dict[str, Any]:
        """Return the server's model properties after checking them against `model`."""
        start = f"Start it with  python -m rlcore_vllm.serve {model.path} --precision {model.precision} --port PORT"
        self._get("/v1/models")  # distinguishes an unreachable server from an unsuitable one
        try:
            facts: dict[str, Any] = self._call("rlcore_prepare")[0]
        except InfrastructureError as error:
            raise ConfigError(
                f"rollout.url={self._url} is not a vLLM server that rlcore can train with:"
                f" {str(error).splitlines()[0]}\n{start}"
            ) from error
        wanted = {**model_facts(model.path), "precision": model.precision}
        differing = [f"{name} {facts[name]} instead of {own}" for name, own in wanted.items() if facts[name] != own]
        if differing:
            raise ConfigError(
                f"rollout.url={self._url} serves a different model than model.path={model.path}:"
                f" {', '.join(differing)}\n{start}"
            )
        return facts

    def _call(self, method: str) -> list[Any]:
        """Call a method of the worker extension and return the result of each rank."""
        answers: list[Any] = self._post("/collective_rpc", {"method": method})["results"]
        return answers

    def _get(self, path: str) -> Any:
        return self._server.call("GET", path)

    def _post(self, path: str, body: Any = None) -> Any:
        return self._server.call("POST", path, body)
