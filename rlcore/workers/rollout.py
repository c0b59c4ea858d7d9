"""The rollout worker: prompts in, samples out, through an inference engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.data.loader import mix
from rlcore.data.shares import even_sizes
from rlcore.data.transcript import Transcript, transcripts_batch
from rlcore.errors import InfrastructureError
from rlcore.models.load import check_directory
from rlcore.models.size import ModelSize, rollout_bytes
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.optional import ChecksModel, CountsTokens, EstimatesEngine
from rlcore.protocols.rollout import Rollout, RolloutContext
from rlcore.protocols.worker import WorkerContext
from rlcore.registry import PluginSpec, load
from rlcore.types import Request, Sample, Sampling
from rlcore.workers.base import Worker
from rlcore.workers.plan import PoolFacts, RoleMemory, RunPlan
from rlcore.workers.stream import Progress, Stream

logger = logging.getLogger(__name__)


class RolloutWorker(Worker):
    """A worker with one rank of an inference engine."""

    default_weights_from = "actor"
    updated_every_step = True

    @classmethod
    def options_of(cls, plan: RunPlan, role: str) -> dict[str, Any]:
        engine = plan.rollout
        model = replace(plan.config.model, path=plan.models[role])
        return {"rollout": engine.resolved.spec, "rollout_config": engine.config, "model": model}

    @classmethod
    def max_tokens(cls, plan: RunPlan, role: str) -> int:
        """Return the maximum number of tokens in a sequence."""
        return plan.config.data.max_prompt_tokens + plan.config.sampling.max_response_tokens

    @classmethod
    def memory(cls, plan: RunPlan, role: str, pool: PoolFacts) -> RoleMemory:
        config, engine = plan.config, plan.rollout
        model = replace(config.model, path=plan.models[role])
        size, half = ModelSize.read(check_directory(model.path)), model.precision == "bfloat16"
        tokens = cls.max_tokens(plan, role)
        prompts = even_sizes(config.trainer.prompts_per_step, pool.num_devices)[0]  # the largest share
        sequences = prompts * config.sampling.samples_per_prompt
        limits = engine.config
        at_once = getattr(limits, "max_batch_size", sequences)
        at_once = min(at_once, max(1, getattr(limits, "max_batch_tokens", sequences * tokens) // tokens))
        ranks = int(getattr(limits, "tensor_parallel", 1))
        weights = rollout_bytes(size, num_sequences=0, max_tokens=tokens, half=half) // ranks
        whole = rollout_bytes(size, num_sequences=min(sequences, at_once), max_tokens=tokens, half=half) // ranks
        kind = engine.resolved.object
        if not pool.own_python and isinstance(kind, ChecksModel):
            kind.check_model(engine.config, model=model, device=pool.device)
        if not pool.own_python and isinstance(kind, EstimatesEngine):
            whole = kind.engine_bytes(engine.config, weights, whole - weights, device=pool.device_bytes)
        return RoleMemory(device=whole, offloaded=weights)

    def __init__(self, context: WorkerContext, *, rollout: PluginSpec, rollout_config: Any, model: ModelConfig) -> None:
        super().__init__(context)
        engine_class: Any = load(rollout, rank=context.rank, host=context.host)
        self.engine: Rollout = engine_class(
            rollout_config,
            model=model,
            context=RolloutContext(rank=context.rank, world_size=context.world_size, device=context.device),
        )
        self.mesh = self.engine.mesh
        self._counter: CountsTokens | None = self.engine if isinstance(self.engine, CountsTokens) else None
        self._stream: Stream[Batch] = Stream(in_thread=context.concurrent)
        self._num_finished_tokens = self._progress = 0
        self._open: list[set[int]] = []
        """Request ids of the unfinished responses of each draw."""

    @dispatch("dp")
    def generate(self, prompts: Batch, sampling: Sampling, samples_per_prompt: int) -> Batch:
        """Generate samples for each prompt, adjacent and in prompt order, with the row columns of the prompt.

        `prompts` has `input_ids` and the row columns `group_id` and `seed`. Adds `loss_mask`, `rollout_log_probs`,
        `token_version`, `sample_id`, `policy_version`, `first_version`, `num_loss_tokens` and `finish_reason`.
        """
        return self._stream.run(self.draw(prompts, sampling, samples_per_prompt))

    @dispatch("rlcore.controller.dispatch:PerEngine")
    def request_groups(self, prompts: Batch, sampling: Sampling, samples_per_prompt: int) -> None:
        """Start to generate samples for each prompt and return at once; `finished_groups` returns them.

        `prompts` has the columns of `generate` and the row column `engine`: the engine that gets the prompt. Weights that
        are loaded meanwhile continue the responses: see `rollout.pause`. `generate` runs beside them.
        """
        for place in range(len(prompts)):
            self._stream.begin(self.draw(prompts.slice(place, place + 1), sampling, samples_per_prompt))

    @dispatch("rlcore.controller.dispatch:PerEngine", on_device=False, concurrent=True)
    def finished_groups(self, count: int, wait_s: float) -> tuple[Batch | None, list[Progress]]:
        """Return the samples of groups that have finished since the last call, and the progress of each engine.

        Args:
            count: wait until each engine has this number of groups, or all of its groups if there are fewer.
            wait_s: limit of the wait in seconds. With runtime=local, 0 draws nothing, and there is no other limit.

        Raises:
            Exception: an error of the engine or an environment. All requested groups of this engine are aborted.
        """
        groups = self._stream.finished(count, wait_s)
        return Batch.cat(groups) if groups else None, [self._stream.progress(self.context.rank, self._num_tokens())]

    async def draw(self, prompts: Batch, sampling: Sampling, samples_per_prompt: int) -> Batch:
        """Return the samples of `generate`. Draws of single groups overlap, and weights are loaded between their steps."""
        requests = requests_of(prompts, sampling, samples_per_prompt)
        unfinished = {request.request_id for request in requests}

        def finish(sample: Sample) -> None:
            unfinished.discard(sample.request_id)
            self.count(sample)

        self._open.append(unfinished)
        try:
            samples = await _drain(self.engine, requests, finish)
        finally:
            self._open = [others for others in self._open if others is not unfinished]
        if len(samples) < len(requests):
            return prompts.take([])  # not collected: another rank of the engine returns the samples
        return samples_batch(prompts.repeat(samples_per_prompt), samples_per_prompt, requests, samples)

    @property
    def num_open(self) -> int:
        """Return the number of responses that are requested and not finished."""
        return sum(map(len, self._open))

    def count(self, sample: Sample) -> None:
        """Count a finished response as progress."""
        self._num_finished_tokens += len(sample.token_ids)

    def _num_tokens(self) -> int:
        """Return the progress of the engine; if a server does not answer, what it was before."""
        try:
            self._progress = self._num_finished_tokens if self._counter is None else self._counter.num_tokens
        except InfrastructureError as error:
            logger.warning("the engine's number of tokens is not known: %s", str(error).partition("\n")[0])
        return self._progress

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace the engine's weights between two of its steps; called by the host when it receives them."""
        self._stream.pause(lambda: self.engine.load_weights(weights, version))

    @dispatch("all", on_device=False)
    def pause(self) -> int:
        """Set unfinished responses aside until `resume`, and return their number. The engine declares `Pauses`."""
        engine: Any = self.engine
        self._stream.pause(engine.pause, until_resume=True)
        return self.num_open

    @dispatch("all", on_device=False)
    def resume(self) -> None:
        """Continue the responses that were set aside."""
        engine: Any = self.engine
        self._stream.resume(engine.resume)

    @dispatch("all", on_device=False)
    def sleep(self) -> None:
        """Free the device for training."""
        self._stream.between_steps(self.engine.sleep)

    @dispatch("all", on_device=False)
    def wake(self) -> None:
        """Return to the device, ready to generate."""
        self._stream.between_steps(self.engine.wake)

    def abort(self) -> None:
        self._stream.abort()

    def close(self) -> None:
        self._stream.close()
        self.engine.close()


def requests_of(prompts: Batch, sampling: Sampling, samples_per_prompt: int) -> list[Request]:
    """Return n requests for each prompt, each with its own seed."""
    offsets = prompts.offsets().tolist()
    ids = prompts["input_ids"].tolist()
    texts = [ids[start:stop] for start, stop in pairwise(offsets)]
    seeded = [
        (text, mix(seed, k)) for text, seed in zip(texts, prompts["seed"].tolist()) for k in range(samples_per_prompt)
    ]
    return [
        Request(request_id=i, prompt_ids=text, sampling=sampling, seed=seed) for i, (text, seed) in enumerate(seeded)
    ]


async def _drain(engine: Rollout, requests: Sequence[Request], count: Callable[[Sample], None]) -> list[Sample]:
    samples = []
    if requests:
        async for sample in engine.generate(requests):
            count(sample)
            samples.append(sample)
    if not samples and not engine.mesh.returns:
        return []
    by_request = {sample.request_id: sample for sample in samples}
    asked = {request.request_id for request in requests}
    if by_request.keys() != asked or len(samples) != len(requests):
        raise RuntimeError(
            f"{type(engine).__name__} returned {len(samples)} samples for {len(requests)} requests: "
            f"{len(asked - by_request.keys())} requests without one, {len(samples) - len(by_request)} samples twice, "
            f"{len(by_request.keys() - asked)} for unknown requests"
        )
    return [by_request[request.request_id] for request in requests]


def samples_batch(
    prompts: Batch, samples_per_prompt: int, requests: Sequence[Request], samples: Sequence[Sample]
) -> Batch:
    """Return one row per sample; `prompts` has been repeated to match."""
    transcripts = []
    for request, sample in zip(requests, samples):
        transcript = Transcript()
        transcript.read(request.prompt_ids)
        transcript.write(sample)
        transcripts.append(transcript)
    return transcripts_batch(prompts, samples_per_prompt, transcripts)
