"""`hf`: the reference engine, in plain PyTorch on any causal language model that transformers loads.

Requests with the same sampling run together in waves. A prompt goes through the model once however many samples it gets; then
all sequences of the wave take a token at a time, and finished ones leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.data.packing import plan_micro_batches
from rlcore.errors import InfrastructureError, ModelError, SampleError
from rlcore.models.attention import Packing
from rlcore.models.head import TokenHead
from rlcore.models.load import load_model, load_tokenizer
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts import cache
from rlcore.rollouts.cache import KeyValueCache
from rlcore.rollouts.sampler import sample
from rlcore.types import FinishReason, Mesh, Request, Sample, Sampling

_SHRINK_BELOW = 0.75
"""Finished sequences are taken out of the cache when fewer than this share still run: taking out is a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFConfig:
    """How much runs at once."""

    max_batch_size: int = 1024
    """Sequences in one wave."""
    max_batch_tokens: int = 262144
    """Tokens, at their longest, of all sequences in one wave."""


class HFRollout:
    """One engine on one device."""

    Config = HFConfig

    def __init__(self, config: HFConfig, *, model: ModelConfig, context: RolloutContext) -> None:
        cache.register()
        self.mesh = Mesh(
            rank=context.rank, world_size=context.world_size, dp_rank=context.rank, dp_size=context.world_size
        )
        self._config, self._path = config, model.path
        self._device = torch.device(context.device)
        dtype = torch.bfloat16 if model.precision == "bfloat16" else torch.float32
        self._model = load_model(model.path, device=context.device, dtype=dtype, attention=cache.NAME)
        self._model.requires_grad_(False)
        self._head = TokenHead(self._model)
        self._context_length = int(getattr(self._model.config.get_text_config(), "max_position_embeddings", 2**31))
        self._end_ids = _end_ids(self._model)
        self._version = 0
        self._broken: str | None = None

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        """Yield samples as they finish, wave by wave."""
        if self._broken:
            raise InfrastructureError(f"the engine has no whole set of weights: {self._broken}\nLoad weights again.")
        for request in requests:
            self._check(request)
        for sampling in dict.fromkeys(request.sampling for request in requests):
            alike = [request for request in requests if request.sampling == sampling]
            for wave in self._waves(alike, sampling):
                async for finished in self._run(wave, sampling):
                    yield finished

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy every weight; until all are here the engine serves nothing."""
        targets = dict(self._model.state_dict(keep_vars=True))
        missing = {parameter.data_ptr(): name for name, parameter in self._model.named_parameters()}
        self._broken = f"loading version {version} did not end"
        for name, tensor in weights:
            target = targets.get(name)
            if target is None or target.shape != tensor.shape:
                has = f"{tuple(target.shape)} here" if target is not None else "unknown here"
                self._broken = f"weight '{name}' {tuple(tensor.shape)} is {has}"
                raise ModelError(f"version {version}: {self._broken}\nThe trainer and the rollout have different models.")
            with torch.no_grad():
                target.copy_(tensor)
            missing.pop(target.data_ptr(), None)
        if missing:
            self._broken = f"{len(missing)} weights did not come, the first is '{next(iter(missing.values()))}'"
            raise ModelError(f"version {version}: {self._broken}\nThe trainer and the rollout have different models.")
        self._version, self._broken = version, None

    def sleep(self) -> None:
        """Move the weights off the device."""
        self._model.to("cpu")

    def wake(self) -> None:
        """Bring the weights back."""
        self._model.to(self._device)

    def close(self) -> None:
        """Forget the model."""
        self._broken = "the engine is closed"
        self._model = None

    def _check(self, request: Request) -> None:
        if not request.prompt_ids:
            raise SampleError(f"request {request.request_id} has an empty prompt")
        if len(request.prompt_ids) >= self._context_length:
            raise SampleError(
                f"request {request.request_id}: a prompt of {len(request.prompt_ids)} tokens leaves no room in a context of"
                f" {self._context_length}\nType  data.max_prompt_tokens={self._context_length - 1} data.overlong=drop"
            )

    def _room(self, request: Request) -> int:
        """How many tokens a response may have."""
        return min(request.sampling.max_response_tokens, self._context_length - len(request.prompt_ids))

    def _waves(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Request]]:
        wave: list[Request] = []
        longest = 0
        for request in requests:
            longest = max(longest, len(request.prompt_ids) + self._room(request))
            full = len(wave) == self._config.max_batch_size
            if wave and (full or longest * (len(wave) + 1) > self._config.max_batch_tokens):
                yield wave
                wave, longest = [], len(request.prompt_ids) + self._room(request)
            wave.append(request)
        if wave:
            yield wave

    @torch.inference_mode()
    async def _run(self, wave: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """All tokens of one wave."""
        running = _Running(wave, [self._room(request) for request in wave], self._device)
        keys_values = KeyValueCache([len(request.prompt_ids) for request in wave], self._device)
        logits = self._prefill(wave, keys_values)
        stops = _Stops(sampling, self._end_ids, self._path, self._device)
        while True:
            tokens, log_probs = sample(logits, sampling, running.seeds, running.num_new)
            running.add(tokens, log_probs)
            for finished in running.finish(stops):
                yield self._sample(finished)
            if not running.num_left:
                return
            if running.num_left < _SHRINK_BELOW * running.num_rows:
                keep = running.shrink()
                keys_values.keep(keep)
                tokens = tokens[keep]
            await asyncio.sleep(0)  # a chance to be cancelled
            logits = self._decode(tokens, keys_values)

    def _prefill(self, wave: Sequence[Request], keys_values: KeyValueCache) -> Tensor:
        """[A, V] logits after each prompt; prompts that are equal go through once."""
        prompts = list(dict.fromkeys(tuple(request.prompt_ids) for request in wave))
        number = {prompt: i for i, prompt in enumerate(prompts)}
        of_sequence = torch.tensor([number[tuple(request.prompt_ids)] for request in wave])
        lengths = [len(prompt) for prompt in prompts]
        last = torch.zeros(len(prompts), self._model.config.get_text_config().hidden_size, device=self._device)
        for rows in plan_micro_batches(lengths, self._config.max_batch_tokens):
            packing = Packing([lengths[row] for row in rows], self._device)
            starts = torch.tensor([0, *(lengths[row] for row in rows)]).cumsum(0)
            place = {row: i for i, row in enumerate(rows)}
            sequences = torch.tensor([i for i, prompt in enumerate(of_sequence.tolist()) if prompt in place])
            which = torch.tensor([place[int(prompt)] for prompt in of_sequence[sequences]])
            width = torch.arange(max(lengths[row] for row in rows))[None]
            index = starts[which][:, None] + torch.minimum(width, torch.tensor(lengths)[rows][which][:, None] - 1)
            keys_values.begin_prefill(packing, sequences.to(self._device), index.to(self._device))
            ids = torch.tensor([token for row in rows for token in prompts[row]], device=self._device)[None]
            hidden = self._hidden(ids, packing.position_ids, keys_values)[0]
            last[torch.tensor(rows)] = hidden[(starts[1:] - 1).to(self._device)].to(last.dtype)
        states = last.to(self._model.dtype)
        return self._head.logits(states)[of_sequence.to(self._device)]

    def _decode(self, tokens: Tensor, keys_values: KeyValueCache) -> Tensor:
        """[A, V] logits after one more token for each sequence."""
        keys_values.begin_decode()
        hidden = self._hidden(tokens[:, None], keys_values.lengths[:, None], keys_values)
        keys_values.end_decode()
        return self._head.logits(hidden[:, 0])

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, keys_values: KeyValueCache) -> Tensor:
        out = self._model.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=None, use_cache=False, cache=keys_values
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _sample(self, finished: tuple[Request, list[int], list[float], FinishReason]) -> Sample:
        request, token_ids, log_probs, reason = finished
        return Sample(
            request_id=request.request_id,
            token_ids=token_ids,
            log_probs=log_probs,
            finish_reason=reason,
            policy_version=self._version,
        )


class _Running:
    """The responses of a wave as they grow. Row r of the tensors is request `requests[rows[r]]`."""

    def __init__(self, requests: Sequence[Request], rooms: Sequence[int], device: torch.device) -> None:
        self._requests = requests
        self._rows = torch.arange(len(requests))
        self._rooms = torch.tensor(rooms)
        self._done = torch.zeros(len(requests), dtype=torch.bool)
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self.seeds = torch.tensor([request.seed for request in requests], dtype=torch.int64)

    @property
    def num_new(self) -> int:
        return len(self._tokens)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def num_left(self) -> int:
        return int((~self._done).sum())

    def add(self, tokens: Tensor, log_probs: Tensor) -> None:
        self._tokens.append(tokens.cpu())
        self._log_probs.append(log_probs.float().cpu())

    def finish(self, stops: _Stops) -> list[tuple[Request, list[int], list[float], FinishReason]]:
        """The responses that ended with the newest token."""
        stopped = stops.token(self._tokens[-1]) & ~self._done
        full = (self._rooms == self.num_new) & ~self._done
        if stops.has_strings:
            for row in (~self._done & ~stopped).nonzero().squeeze(1).tolist():
                stopped[row] = stops.text([int(tokens[row]) for tokens in self._tokens])
        ended = (stopped | full).nonzero().squeeze(1)
        if not len(ended):
            return []
        self._done[ended] = True
        tokens = torch.stack([tokens[ended] for tokens in self._tokens], 1).tolist()
        log_probs = torch.stack([values[ended] for values in self._log_probs], 1).tolist()
        reasons: list[FinishReason] = ["stop" if stop else "length" for stop in stopped[ended].tolist()]
        requests = [self._requests[row] for row in self._rows[ended].tolist()]
        return list(zip(requests, tokens, log_probs, reasons))

    def shrink(self) -> Tensor:
        """Take out what has ended; returns the rows that stay."""
        keep = (~self._done).nonzero().squeeze(1)
        self._rows, self._rooms, self._done = self._rows[keep], self._rooms[keep], self._done[keep]
        self._tokens = [tokens[keep] for tokens in self._tokens]
        self._log_probs = [values[keep] for values in self._log_probs]
        self.seeds = self.seeds[keep]
        return keep


class _Stops:
    """What ends a response besides its length."""

    def __init__(self, sampling: Sampling, end_ids: Sequence[int], path: str, device: torch.device) -> None:
        self._ids = torch.tensor([*end_ids, *sampling.stop_token_ids], dtype=torch.int64)
        self._strings = sampling.stop
        self._tokenizer = load_tokenizer(path) if sampling.stop else None
        self._window = max((len(text) for text in sampling.stop), default=0) + 8

    @property
    def has_strings(self) -> bool:
        return bool(self._strings)

    def token(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, self._ids)

    def text(self, token_ids: list[int]) -> bool:
        """Whether the end of the response holds a stop string; no token is shorter than nothing, so a window will do."""
        assert self._tokenizer is not None, "text stops need a tokenizer"
        tail: str = self._tokenizer.decode(token_ids[-self._window :])
        return any(text in tail for text in self._strings)


def _end_ids(model: Any) -> list[int]:
    """End-of-sequence tokens of the generation config, else of the model config."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return []
