"""Client of a running SGLang server, preferably started by `python -m rlcore_sglang.serve`; one for each rank of the pool.

With a router, requests go there, and any server may answer them. Weights and pauses go to each server, because the router
does not support these calls. Servers have their own devices, so `sleep`, `wake` and `close` do not affect them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError, InfrastructureError
from rlcore.kits.engine.checks import Limits
from rlcore.kits.engine.ranks import server_client, server_url
from rlcore.kits.http import BadAnswer
from rlcore.models.load import load_model
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore_sglang import weights
from rlcore_sglang.config import SGLangConfig
from rlcore_sglang.install import wanted_version
from rlcore_sglang.requests import Answer

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")


class SGLangServerClient:
    """Client of one server."""

    def __init__(self, config: SGLangConfig, *, model: ModelConfig, context: RolloutContext, limits: Limits) -> None:
        own = server_url(config, context)
        self._server, self._front, *self._all = (
            server_client(config, url) for url in (own, config.router or own, *config.urls)
        )
        self._prefix, self._num_requests, self._num_answers = uuid.uuid4().hex, 0, 0
        self.num_ranks, is_ours = self._check(config, model, limits)
        if not is_ours:  # another model directory, or weights of an earlier run
            whole = iter(load_model(model.path).named_parameters())
            weights.send(self, whole, 0, config=config, device="cpu", path=model.path)

    async def answer(self, prompt_ids: list[int], params: Mapping[str, Any]) -> Answer:
        """Generate one response. Cancellation aborts it."""
        self._num_requests += 1
        name = f"{self._prefix}-{self._num_requests:012d}"
        body = {"rid": name, "input_ids": prompt_ids, "sampling_params": dict(params), "return_logprob": True}
        try:
            answer = Answer.read(await self._front.acall("/generate", body))
        except asyncio.CancelledError:
            for server in self._all:
                with contextlib.suppress(InfrastructureError):
                    await server.acall("/abort_request", {"rid": name})
            raise
        self._num_answers += 1
        return answer

    def num_tokens(self) -> int:
        """Return the tokens of the server's decode steps, and the first token of each answer, which prefills sample."""
        loads = self._server.call("GET", "/v1/loads?include=core")["loads"]
        return self._num_answers + sum(int(load["decode_moments"][-1]) for load in loads if load["decode_moments"])

    def control(self, action: str, **fields: Any) -> None:
        """Run one of SGLang's control actions. A server reports a refusal by its HTTP status."""
        if payloads := fields.get("serialized_named_tensors"):
            fields["serialized_named_tensors"] = [base64.b64encode(payload).decode() for payload in payloads]
        try:
            self._server.call("POST", f"/{action}", fields)
        except BadAnswer as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"rollout.url={self._server.url} does not support {action}: it is a router, or its SGLang is too old\n"
                f"Give the addresses of servers with {wanted_version()}; a router is  rollout.router={self._server.url}"
            ) from error

    def close(self) -> None:
        """Do nothing; the server keeps running until its owner stops it."""

    def _check(self, config: SGLangConfig, model: ModelConfig, limits: Limits) -> tuple[int, bool]:
        """Return the server's number of ranks, and True if its weights are those of `model`.

        Raises:
            ConfigError: rlcore cannot train with this server.
        """
        try:
            about, info = (self._server.call("GET", path) for path in ("/model_info", "/server_info"))
        except BadAnswer as error:
            reason = f"is not an SGLang server: {str(error).partition(chr(10))[0]}"
            raise _unfit(
                self._server.url, model, reason, f"; a router is  rollout.router={self._server.url}"
            ) from error
        reasons = [*_wrong_server(info, config, limits, model.precision), *_wrong_model(about, model)]
        if reasons:
            raise _unfit(self._server.url, model, "cannot be used for training: " + "; ".join(reasons))
        is_ours = about["weight_version"] == "0" and Path(about["model_path"]).resolve() == Path(model.path).resolve()
        return int(info["tp_size"]), is_ours


def _wrong_server(info: Mapping[str, Any], config: SGLangConfig, limits: Limits, precision: str) -> list[str]:
    wanted, reasons = wanted_version(), []
    if info["dtype"] not in ("auto", precision):
        reasons.append(
            f"it computes in {info['dtype']}, but model.precision={precision}; start it with  --precision {precision}"
        )
    if not wanted.specifier.contains(info["version"], prereleases=True):
        reasons.append(f"it is SGLang {info['version']}, but {wanted} is required")
    if info["dp_size"] != 1:
        reasons.append(
            f"dp_size={info['dp_size']}, but SGLang cannot update the weights of replicas; start one server for each"
        )
    if config.weights == "memory" and weights.LOADER not in (info["custom_weight_loader"] or []):
        reasons.append(f"it was started without --custom-weight-loader {weights.LOADER}, so type  rollout.weights=disk")
    if config.deterministic and not info["enable_deterministic_inference"]:
        reasons.append("it was started without --enable-deterministic-inference, so type  rollout.deterministic=false")
    if info["context_length"] and info["context_length"] < limits.context_length:
        reasons.append(
            f"its context length is {info['context_length']}, so type  rollout.max_model_len={info['context_length']}"
        )
    return reasons


def _wrong_model(about: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Compare the architecture, and the sizes if the server's model directory is visible from here."""
    own = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
    facts = {"architectures": about["architectures"]}
    theirs = Path(about["model_path"]) / "config.json"
    if theirs.is_file():
        served = json.loads(theirs.read_text(encoding="utf-8"))
        facts |= {name: served.get(name) for name in _SIZES}
    differing = [
        f"{name} {value} instead of {own.get(name)}" for name, value in facts.items() if value != own.get(name)
    ]
    return [f"it serves a different model than model.path={model.path}: {', '.join(differing)}"] if differing else []


def _unfit(url: str, model: ModelConfig, reason: str, more_advice: str = "") -> ConfigError:
    return ConfigError(
        f"rollout.url={url} {reason}\nStart one with  python -m rlcore_sglang.serve {model.path} --port PORT{more_advice}"
    )
