"""`hf`: the reference engine, in plain PyTorch, for any causal language model of transformers.

A prompt is prefilled once for all its samples; then each pass adds a token to all running sequences, finished ones
leave immediately, and waiting requests join when there is room. It is the reference for faster engines, and fast enough
for small models.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import ModelError
from rlcore.kits.engine.checks import Readiness, check_finite, matched, read_limits
from rlcore.models import attention
from rlcore.models.comparison import check_attention
from rlcore.models.load import load_model, load_tokenizer
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts import cache
from rlcore.rollouts.cache import Decode, KeyValueCache, Prefill
from rlcore.rollouts.sampler import SamplingArrays, draw, penalized
from rlcore.types import FinishReason, Mesh, Request, Sample

_REFILL_BELOW = 0.75
"""Waiting requests join when less than this fraction of a full batch is running, because each join costs a pass."""
_PREFILL_TOKENS = 16384
"""Maximum number of prompt tokens in one pass."""
_NUM_DECODED = 6
"""Tokens of each sample decoded in the comparison at start; more than the attention window during it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFConfig:
    """Limits of the batch."""

    max_batch_size: int = 1024
    """Maximum number of running sequences."""
    max_batch_tokens: int = 262144
    """Maximum number of tokens in the KV cache: running sequences times the longest possible length among them."""


class HFRollout:
    """One engine on one device."""

    Config = HFConfig
    reshapes = ("repetition_penalty", "presence_penalty", "frequency_penalty")

    def __init__(self, config: HFConfig, *, model: ModelConfig, context: RolloutContext) -> None:
        attention.register(cache.NAME, cache.cached_attention)
        self.mesh = Mesh(
            rank=context.rank, world_size=context.world_size, dp_rank=context.rank, dp_size=context.world_size
        )
        self._config, self._path = config, model.path
        self._device = torch.device(context.device)
        dtype = torch.bfloat16 if model.precision == "bfloat16" else torch.float32
        self._model: Any = load_model(model.path, device=context.device, dtype=dtype, attention="eager")
        self._model.requires_grad_(False)
        self._limits = read_limits(model.path, sys.maxsize)
        _use_cached_attention(self._model)
        self._version = 0
        self._num_loads = 0
        self._state = Readiness()
        self.num_tokens = 0
        """Tokens of all responses, finished or not."""
        self._decoding: _Decoding | None = None
        """State that the running calls of `generate` share."""

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        """Yield samples as they finish.

        New weights may arrive meanwhile; the running sequences are then prefilled again. Overlapping calls decode
        together: whichever waits advances all, and each sample goes to the call that requested it."""
        await self._state.resumed()
        self._state.check()
        outbox: deque[Sample] = deque()
        rows = [self._row(request) for request in requests]
        decoding = self._decoding = self._decoding or _Decoding(self._model, self._config, self._device)
        decoding.add(rows, outbox)
        try:
            for _ in rows:
                while not outbox:
                    if self._state.is_paused:
                        await self._state.resumed()
                        continue
                    self._state.check()
                    decoding.follow(self._num_loads, self._version)
                    finished = decoding.advance()
                    self.num_tokens += decoding.num_advanced
                    for row, finish_reason in finished:
                        row.outbox.append(row.sample(finish_reason))
                    if not outbox:
                        await asyncio.sleep(0)  # allow cancellation and other tasks
                yield outbox.popleft()
                if not outbox:
                    await asyncio.sleep(0)
        finally:
            decoding.remove(rows)
            if self._decoding is decoding and not decoding.unfinished:
                self._decoding = None

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy all parameters, tied ones once under any name; the engine refuses to generate until it succeeds."""
        with self._state.loading(version), torch.no_grad():
            parameters = dict(self._model.named_parameters(remove_duplicate=False))
            for name, tensor in matched(weights, parameters, version):
                parameters[name].copy_(tensor)
        self._num_loads += 1
        self._version = version

    @staticmethod
    def frees_device(config: HFConfig) -> bool:
        """Return True: the model can be offloaded."""
        return True

    @staticmethod
    def in_flight_updates(config: HFConfig) -> bool:
        """Return True: running sequences are prefilled again under new weights."""
        return True

    def pause(self) -> None:
        """Stop between two passes."""
        self._state.pause()

    def resume(self) -> None:
        """Continue all responses."""
        self._state.resume()

    def sleep(self) -> None:
        """Offload the weights and drop the KV cache of responses in progress, which are prefilled again."""
        self._state.is_asleep = True
        if self._decoding is not None:
            self._decoding.retract()
        if self._device.type == "cuda":
            self._state.check_open()
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the weights back to the device."""
        self._state.check_open()
        self._model.to(self._device)
        self._state.is_asleep = False

    def close(self) -> None:
        """Release the model."""
        self._model, self._state.is_closed = None, True

    def _row(self, request: Request) -> _Row:
        """Return the request with its limits; refuse one that cannot run."""
        room = self._limits.room(request)
        sampling = request.sampling
        return _Row(request, room, {*self._limits.end_ids, *sampling.stop_token_ids}, self._decoder(sampling.stop))

    def _decoder(self, stop: Sequence[str]) -> Callable[[list[int]], str] | None:
        if not stop:
            return None
        tokenizer = load_tokenizer(self._path)
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class _Row:
    """A response in progress."""

    __slots__ = ("_decode", "_end_ids", "_room", "_tail", "log_probs", "outbox", "request", "token_ids", "versions")

    def __init__(
        self, request: Request, room: int, end_ids: set[int], decode: Callable[[list[int]], str] | None
    ) -> None:
        self.request = request
        self.outbox: deque[Sample] = deque()
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self._room, self._end_ids, self._decode = room, end_ids, decode
        # All but a few tokens of a stop string cover at least one byte of it, so these tokens contain it.
        self._tail = max((len(text.encode()) for text in request.sampling.stop), default=0) + 4

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        return len(self.request.prompt_ids) + self._room

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.token_ids)

    def add(self, token: int, log_prob: float, version: int) -> FinishReason | None:
        """Append a token sampled by weights of this version; return the finish reason, if the response ends."""
        if not math.isfinite(log_prob):
            check_finite(self.request, [*self.log_probs, log_prob])
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if token in self._end_ids or self._has_stop_string():
            return "stop"
        return "length" if len(self.token_ids) == self._room else None

    def sample(self, finish_reason: FinishReason) -> Sample:
        """Return the finished response."""
        return Sample(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=finish_reason,
            policy_version=self.versions[-1],
            token_versions=self.versions if self.versions[0] != self.versions[-1] else (),
        )

    def _has_stop_string(self) -> bool:
        if self._decode is None:
            return False
        text = self._decode(self.token_ids[-self._tail :])
        return any(stop in text for stop in self.request.sampling.stop)


class _Decoding:
    """Running and waiting rows. Slot i of the cache belongs to running row i."""

    def __init__(self, model: Any, config: HFConfig, device: torch.device) -> None:
        self._model, self._config, self._device = model, config, device
        self._num_loads, self._version = -1, 0
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache = KeyValueCache()
        self._arrays: SamplingArrays | None = None
        self._joining = True
        self._num_full = self._longest = 0
        self.num_advanced = 0
        """Responses that got a token in the last pass."""

    def add(self, rows: Sequence[_Row], outbox: deque[Sample]) -> None:
        """Add rows, which join when there is room; `outbox` receives their samples."""
        for row in rows:
            row.outbox = outbox
        self._waiting.extend(rows)

    @torch.inference_mode()
    def remove(self, rows: Sequence[_Row]) -> None:
        """Remove these rows, finished or not."""
        gone = set(rows)
        self._waiting = deque(row for row in self._waiting if row not in gone)
        if places := {place for place, row in enumerate(self._rows) if row in gone}:
            self._leave(places)

    def follow(self, num_loads: int, version: int) -> None:
        """After new weights, prefill the running rows again."""
        if self._num_loads not in (-1, num_loads):
            self.retract()
        self._num_loads, self._version = num_loads, version

    def retract(self) -> None:
        """Drop the KV cache, so that running rows are prefilled again, including their responses."""
        self._waiting.extendleft(reversed(self._rows))
        self._rows, self._cache, self._arrays = [], KeyValueCache(), None

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self._rows)

    @torch.inference_mode()
    def advance(self) -> list[tuple[_Row, FinishReason]]:
        """Run one pass: the first token of joining rows, else the next token of all; return the finished rows."""
        first = len(self._rows)
        if joining := self._join():
            logits = self._prefill(joining, first)
            self._rows += joining
            arrays = SamplingArrays.of([row.request for row in joining], self._device)
            self._arrays = None
        else:
            first, logits = 0, self._decode()
            arrays = self._arrays = self._arrays or SamplingArrays.of([r.request for r in self._rows], self._device)
        rows = self._rows[first:]
        self.num_advanced = len(rows)
        positions = torch.tensor([row.length for row in rows], device=self._device)
        altered = penalized(logits, [row.request for row in rows], [row.token_ids for row in rows])
        tokens, log_probs = draw(logits, arrays, positions, altered)
        drawn = zip(rows, tokens.tolist(), log_probs.tolist())
        reasons = [row.add(token, log_prob, self._version) for row, token, log_prob in drawn]
        finished = [(row, reason) for row, reason in zip(rows, reasons) if reason is not None]
        if finished:
            self._leave({first + i for i, reason in enumerate(reasons) if reason is not None})
        return finished

    def _join(self) -> list[_Row]:
        """Return waiting rows for which there is room at their full length, at most one pass of prompt tokens."""
        self._joining = self._joining or len(self._rows) < _REFILL_BELOW * self._num_full
        longest = max((row.capacity for row in self._rows), default=0) if self._joining else 0
        joining: list[_Row] = []
        num_tokens = 0
        while self._waiting and self._joining:
            row, number = self._waiting[0], len(self._rows) + len(joining) + 1
            longer = max(longest, row.capacity)
            too_many = number > self._config.max_batch_size or number * longer > self._config.max_batch_tokens
            self._joining = number == 1 or not too_many
            is_copy = bool(joining) and _sequence(joining[-1]) == _sequence(row)
            num_tokens += 0 if is_copy else row.length
            if not self._joining or (joining and num_tokens > _PREFILL_TOKENS):
                break
            joining.append(self._waiting.popleft())
            longest = longer
        if joining:
            self._num_full, self._longest = len(self._rows) + len(joining), longest
        return joining

    def _prefill(self, joining: Sequence[_Row], first: int) -> Tensor:
        """Return [n, V] logits after each row's sequence; equal sequences are computed once."""
        sequences = [_sequence(row) for row in joining]
        number = {sequence: i for i, sequence in enumerate(dict.fromkeys(sequences))}
        which = [number[sequence] for sequence in sequences]
        lengths = [len(sequence) for sequence in number]
        self._cache.reserve(first + len(joining), max(lengths), limit=self._longest)
        step = Prefill(self._cache, lengths, which, first, self._device)
        input_ids = torch.tensor([token for sequence in number for token in sequence], device=self._device)[None]
        logits = _logits(self._model, input_ids, step, logits_to_keep=step.last_tokens)[0]
        return logits[torch.tensor(which, device=self._device)]

    def _decode(self) -> Tensor:
        """Return [n, V] logits after the newest token of each row."""
        positions = [row.length - 1 for row in self._rows]
        self._cache.reserve(len(self._rows), max(positions) + 1, limit=self._longest)
        input_ids = torch.tensor([row.token_ids[-1:] for row in self._rows], device=self._device)
        return _logits(self._model, input_ids, Decode(self._cache, positions, self._device))[:, 0]

    def _leave(self, places: set[int]) -> None:
        """Remove rows and move the last ones to their places."""
        num_left = len(self._rows) - len(places)
        targets = sorted(place for place in places if place < num_left)
        sources = [place for place in range(num_left, len(self._rows)) if place not in places]
        self._cache.move(sources, targets)
        for source, target in zip(sources, targets):
            self._rows[target] = self._rows[source]
        del self._rows[num_left:]
        self._arrays = None


def _sequence(row: _Row) -> tuple[int, ...]:
    return (*row.request.prompt_ids, *row.token_ids)


def _logits(model: Any, input_ids: Tensor, step: Prefill | Decode, **options: Any) -> Tensor:
    logits: Tensor = model(
        input_ids=input_ids, position_ids=step.position_ids, use_cache=False, step=step, **options
    ).logits
    return logits


@torch.inference_mode()
def _cached_logits(model: Any, samples: Sequence[Tensor]) -> Tensor:
    """Return [T, V] logits of all samples; the last tokens of each are decoded one by one."""
    device, lengths = samples[0].device, [len(sample) - _NUM_DECODED for sample in samples]
    store = KeyValueCache()
    longest = max(lengths) + _NUM_DECODED
    store.reserve(len(samples), longest, limit=longest)
    prompts = torch.cat([sample[:length] for sample, length in zip(samples, lengths)])
    step = Prefill(store, lengths, range(len(samples)), 0, device)
    places = torch.arange(len(prompts), device=device)
    rows = list(torch.split(_logits(model, prompts[None], step, logits_to_keep=places)[0], lengths))
    for number in range(_NUM_DECODED):
        positions = [length + number for length in lengths]
        newest = torch.stack([sample[place] for sample, place in zip(samples, positions)])[:, None]
        logits = _logits(model, newest, Decode(store, positions, device))
        rows = [torch.cat([row, new]) for row, new in zip(rows, logits)]
    return torch.cat(rows).float()


def _use_cached_attention(model: Any) -> None:
    """Switch the model to the cached attention and compare it with the model's own on a few tokens.

    Raises:
        ModelError: the family keeps state elsewhere or has an unsupported attention.
    """

    def refuse(reason: str) -> ModelError:
        advice = "Use another engine for this model:  rollout=vllm"
        return ModelError(f"rollout=hf cannot run {type(model).__name__}: {reason}\n{advice}")

    tolerance = 1e-4 if model.dtype == torch.float32 else 5e-2
    check_attention(model, cache.NAME, partial(_cached_logits, model), tolerance=tolerance, refuse=refuse)
