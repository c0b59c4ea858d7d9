"""Fakes for tests without a model: `FakeRollout`, also as `rollout=fake`, and `FakeRoles` for algorithms."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from rlcore.controller.future import Future
from rlcore.controller.group import spawn
from rlcore.controller.make import make_runtime
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.data.transcript import Transcript, transcripts_batch
from rlcore.errors import InfrastructureError
from rlcore.kits.engine.checks import ExpectedWeights, Readiness, read_limits
from rlcore.models.load import check_directory, load_tokenizer
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.registry import resolve
from rlcore.types import Counts, Mean, Mesh, Metrics, Request, Sample, Sampling
from rlcore.workers.base import Worker

_HANG_S = 3600.0
_FURTHER = {"prompt_id": 100, "group_id": 1000, "seed": 10000}
"""First numbers of further prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """Responses of the engine, their order, and faults."""

    answers: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """Prompt ids as text, "5 9", -> responses, chosen by seed modulo their number, to which an end token is added. Any
    other prompt gets tokens derived from prompt and seed."""
    order: Literal["asked", "reversed", "shortest"] = "asked"
    """Order in which the samples of a call finish."""
    fault: Literal["none", "raise", "die", "hang", "late"] = "none"
    """raise: InfrastructureError; die: the process ends; hang: no sample for an hour; late: after `late_s`."""
    fault_after: int = 0
    """Samples that this engine begins before the fault, over all calls."""
    late_s: float = 0.1
    """Delay of the fault "late", in seconds."""


class FakeRollout:
    """An engine without a model, which returns a token of each call at a time. It reads only sizes, names of weights and the tokenizer from the model's directory."""

    Config = FakeConfig

    def __init__(self, config: FakeConfig, *, model: ModelConfig, context: RolloutContext) -> None:
        self.mesh = Mesh(
            rank=context.rank, world_size=context.world_size, dp_rank=context.rank, dp_size=context.world_size
        )
        self.requests: list[Request] = []
        """All requests to this engine."""
        self.version = self.num_tokens = 0
        self._config, self._path = config, str(check_directory(model.path))
        self._limits, self._expected, self._state = read_limits(self._path), ExpectedWeights(self._path), Readiness()
        self._end_ids = self._limits.end_ids or (0,)
        self._num_begun = 0

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        await self._state.resumed()
        self._state.check()
        self.requests += requests
        responses = [(request, *self._respond(request)) for request in requests]
        if self._config.order == "reversed":
            responses.reverse()
        elif self._config.order == "shortest":
            responses.sort(key=lambda response: len(response[1]))
        for request, token_ids, finish_reason in responses:
            await self._go_wrong()
            self._num_begun += 1
            versions = []
            for _ in token_ids:
                await self._state.resumed()
                self._state.check()
                versions.append(self.version)
                self.num_tokens += 1
                await asyncio.sleep(0)
            await self._state.resumed()
            self._state.check()
            yield Sample(
                request_id=request.request_id,
                token_ids=token_ids,
                log_probs=[-math.log(1 + _hash(request.seed, i, token) % 50) for i, token in enumerate(token_ids)],
                finish_reason=finish_reason,
                policy_version=versions[-1],
                token_versions=versions,
            )
            await asyncio.sleep(0)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Check names and shapes; with tied embeddings, the head is optional."""
        with self._state.loading(version):
            for _ in self._expected.checked(weights, version):
                pass
        self.version = version

    @staticmethod
    def frees_device(config: FakeConfig) -> bool:
        """Return True: it uses no device."""
        return True

    @staticmethod
    def in_flight_updates(config: FakeConfig) -> bool:
        """Return True: the next token of each call has the new version."""
        return True

    def pause(self) -> None:
        self._state.pause()

    def resume(self) -> None:
        self._state.resume()

    def sleep(self) -> None:
        self._state.is_asleep = True

    def wake(self) -> None:
        self._state.is_asleep = False

    def close(self) -> None:
        self._state.is_closed = True

    async def _go_wrong(self) -> None:
        fault = self._config.fault
        if fault == "none" or self._num_begun != self._config.fault_after:
            return
        if fault == "raise":
            raise InfrastructureError("the fake engine fails because fault=raise\nSet fault=none.")
        if fault == "die":
            os._exit(1)
        await asyncio.sleep(_HANG_S if fault == "hang" else self._config.late_s)

    def _respond(self, request: Request) -> tuple[list[int], Literal["stop", "length"]]:
        room, sampling = self._limits.room(request), request.sampling
        end_ids = {*self._end_ids, *sampling.stop_token_ids}
        token_ids: list[int] = []
        for token in self._tokens(request):
            token_ids.append(token)
            if token in end_ids or (sampling.stop and self._stopped(token_ids, sampling.stop)):
                return token_ids, "stop"
            if len(token_ids) == room:
                break
        return token_ids, "length"

    def _tokens(self, request: Request) -> Iterator[int]:
        answers = self._config.answers.get(" ".join(map(str, request.prompt_ids)))
        if answers:
            yield from answers[request.seed % len(answers)]
            yield self._end_ids[0]
            return
        seed = 0 if request.sampling.temperature == 0 else request.seed
        for position in range(request.sampling.max_response_tokens):
            yield _hash(seed, position, *request.prompt_ids) % self._limits.vocab_size

    def _stopped(self, token_ids: list[int], stop: Sequence[str]) -> bool:
        text = str(load_tokenizer(self._path).decode(token_ids, clean_up_tokenization_spaces=False))
        return any(one in text for one in stop)


def _hash(*numbers: int) -> int:
    """Return a hash that is equal in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=6).digest(), "big")


class FakeStore:
    """Columns that stand for those in workers; counts fetches to the controller."""

    def __init__(self) -> None:
        self.num_far_reads = 0
        """Columns of tokens and objects that the controller fetched."""

    def put(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def get(self, refs: Sequence[Any]) -> list[Any]:
        self.num_far_reads += len(refs)
        return list(refs)


class FakeGroup:
    """A role without processes; its results are derived from the tokens, and `updates` records the training calls."""

    dp_size = 2

    def __init__(self, name: str, store: FakeStore) -> None:
        self.updates: list[tuple[Batch, Counts]] = []
        self.skipped = 0.0
        """Fraction of updates that report a non-finite gradient."""
        self.update = _Update(self)
        self._name, self._store = name, store

    def log_probs(self, batch: Batch, temperature_factor: float = 1.0) -> Batch:
        return self.apply(_log_probs, batch, of_reference=self._name != "actor")

    def values(self, batch: Batch) -> Batch:
        return self.apply(_values, batch)

    def generate(self, prompts: Batch, sampling: Sampling, samples_per_prompt: int) -> Batch:
        """Return made-up responses, independent of `sampling`, like the rollout."""
        return self.apply(_sampled, prompts, samples_per_prompt=samples_per_prompt)

    def demonstrations(self, prompts: Batch, columns: Sequence[str], max_tokens: int) -> Batch:
        """Return a made-up response for each column, ignoring the texts of the data."""
        answers = self.apply(_sampled, prompts, samples_per_prompt=len(columns))
        return answers.drop("rollout_log_probs", "token_version", "policy_version", "first_version")

    def score(self, samples: Batch) -> Batch:
        """Score the first of four samples 1 and the others 0, like the reward."""
        return self.apply(_scored, samples)

    def apply(self, function: Callable[..., Batch], batch: Batch, **options: Any) -> Batch:
        """Run the function where the data is; the columns of the result stay there."""
        reads = self._store.num_far_reads
        result = BatchRef.publish(function(batch.local(), **options), self._store)
        self._store.num_far_reads = reads
        return result


class _Update:
    """`group.update(mini, counts)` and `group.update.submit(mini, counts)`."""

    def __init__(self, group: FakeGroup) -> None:
        self._group = group

    def __call__(self, batch: Batch, counts: Counts) -> Metrics:
        self._group.updates.append((batch, counts))
        return {"loss": Mean(0.5), "grad_norm": Mean(1.0), "lr": Mean(0.1), "skipped": Mean(self._group.skipped)}

    def submit(self, batch: Batch, counts: Counts) -> Future[Metrics]:
        return Future.of(self(batch, counts))


class FakeRoles:
    """Roles for `collect` and `update` of an algorithm, only the requested ones.

    Every prompt gets four responses, of 1 to 5 tokens; the first of them scores 1, the others 0. Roles whose workers need
    neither a model nor other options are real: two workers in this process.
    """

    actor: Any
    reference: Any
    critic: Any
    rollout: Any
    reward: Any
    samples_per_prompt = 4
    rewards: Sequence[Any] = ()

    def __init__(self, roles: Sequence[str | RoleSpec], *, keep_scored: bool = True) -> None:
        """Create the groups; a role given by its name alone is a fake."""
        self.store = FakeStore()
        self.groups: dict[str, Any] = {name: FakeGroup(name, self.store) for name in ("rollout", "reward")}
        for spec in roles:
            name = spec if isinstance(spec, str) else spec.name
            self.groups[name] = self._real(spec) or FakeGroup(name, self.store)
        self.sampling = Sampling(max_response_tokens=5)
        self.generated: Batch | None = None
        """Last result of `generate` or `demonstrations`."""
        self.metrics: Metrics = {}
        """Metrics that were passed to `note`."""
        self.sent: list[tuple[str, str, float]] = []
        """(source, target, mix) of each `send`."""
        self._keep_scored = keep_scored
        self._num_more = 0

    def _real(self, spec: str | RoleSpec) -> Any:
        """Return a group of real workers if nothing but their class is needed to create them, else None."""
        if isinstance(spec, str):
            return None
        worker: type = resolve("worker", spec.worker).object
        if next((base for base in worker.__mro__ if "options_of" in vars(base)), Worker) is not Worker:
            return None
        runtime = make_runtime(RuntimeConfig(name="local"))
        runtime.start({"main": PoolConfig(devices_per_node=2, device="cpu")}, {})
        return spawn(worker, runtime, role=spec.name, pool="main")

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("groups", {}):
            return self.groups[name]
        raise AttributeError(f"this run has no role '{name}'; its algorithm asked for {', '.join(self.groups)}")

    def has(self, name: str) -> bool:
        return name in self.groups

    def group(self, name: str, worker: type) -> Any:
        """Return the fake of any role; `worker` is for type checkers."""
        return getattr(self, name)

    def send(self, source: str, target: str, mix: float = 1.0) -> None:
        """Record the transfer in `sent`."""
        self.sent.append((self.groups[source]._name, self.groups[target]._name, mix))

    def note(self, name: str, mean: Mean) -> None:
        self.metrics[name] = self.metrics.get(name, Mean(0.0, 0.0)) + mean

    def generate(self, prompts: Batch, rollout: str = "rollout") -> Batch:
        """Return made-up responses with the columns of the rollout worker."""
        return self._noted(self.groups[rollout].generate(prompts, self.sampling, self.samples_per_prompt))

    def more_prompts(self, count: int) -> Batch:
        """Return prompts of two tokens, different ones in each call."""
        self._num_more += count
        numbers = list(range(self._num_more - count, self._num_more))
        rows = {name: [start + number for number in numbers] for name, start in _FURTHER.items()}
        tokens = [token for number in numbers for token in (3 + number % 9, 4 + number % 9)]
        return BatchRef.publish(Batch.of(lengths=[2] * count, tokens={"input_ids": tokens}, rows=rows), self.store)

    def demonstrations(self, prompts: Batch, columns: Sequence[str]) -> Batch:
        """Return a made-up response for each column, ignoring the texts of the data."""
        return self._noted(self.rollout.demonstrations(prompts, columns, self.sampling.max_response_tokens))

    def compute_rewards(self, samples: Batch) -> Batch:
        """Add rewards and keep every row."""
        scored: Batch = samples | self.reward.score(samples)
        return scored

    def _noted(self, samples: Batch) -> Batch:
        reads = self.store.num_far_reads
        self.generated = samples.local()
        self.store.num_far_reads = reads
        return samples

    def score(self, samples: Batch) -> Batch:
        """Add rewards; drop all rows unless `keep_scored`, as if every reward failed."""
        scored = self.compute_rewards(samples)
        return scored if self._keep_scored else scored.take([])


def _sampled(prompts: Batch, *, samples_per_prompt: int) -> Batch:
    return _responses(prompts.repeat(samples_per_prompt), samples_per_prompt)


def _scored(samples: Batch) -> Batch:
    first = samples["sample_id"] % FakeRoles.samples_per_prompt == 0
    texts = [f"answer {sample_id}" for sample_id in samples["sample_id"].tolist()]
    status = torch.zeros(len(samples), dtype=torch.int64)
    rows = {"reward": first.float(), "reward_status": status, "completion": texts}
    return Batch.of(lengths=samples.lengths, rows=rows)


def _responses(rows: Batch, samples_per_prompt: int) -> Batch:
    starts = rows.offsets().tolist()
    transcripts = []
    for i, (start, stop) in enumerate(pairwise(starts)):
        answer = [(11 * i + 5 * k) % 40 for k in range(1 + (3 * i + i // 4) % 5)]
        transcript = Transcript()
        transcript.read(rows["input_ids"][start:stop].tolist())
        transcript.write(
            Sample(
                request_id=i, token_ids=answer, log_probs=[-1.0] * len(answer), finish_reason="stop", policy_version=0
            )
        )
        transcripts.append(transcript)
    return transcripts_batch(rows, samples_per_prompt, transcripts)


def _log_probs(batch: Batch, *, of_reference: bool) -> Batch:
    column = -0.5 - (batch["input_ids"] % 7) / 4
    if of_reference:
        return _of_tokens(batch, ref_log_probs=column - (batch["input_ids"] % 3) / 4)
    return _of_tokens(batch, log_probs=column, entropy=torch.ones_like(column))


def _values(batch: Batch) -> Batch:
    return _of_tokens(batch, values=(batch["input_ids"] % 5) / 20)


def _of_tokens(batch: Batch, **columns: Tensor) -> Batch:
    """Return token columns that are zero outside the mask, like the outputs of every role."""
    tokens = {name: torch.where(batch["loss_mask"], column, 0.0) for name, column in columns.items()}
    return Batch.of(lengths=batch.lengths, tokens=tokens)
